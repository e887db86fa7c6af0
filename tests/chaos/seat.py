"""Says which process ckpt-chaos kills: the trainer, or one that lowdiff starts.

``python -m tests.chaos.seat writer both log OUT`` is ``python -m tests.chaos.training log OUT``, except that the first
writer is armed. ckpt-chaos arms what it starts through a ``sitecustomize`` on Python's path, unless ``CKPT_CHAOS_ARMED``
is set: so it is set for all processes but the victim. With ``both`` the trainer is killed together with its writer; with
``alone`` it goes on, and lowdiff starts another writer.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lowdiff.persistence.files import detached_process
from tests.chaos import training

ARMED = "CKPT_CHAOS_ARMED"
#: Set where something is to be killed: not where a training is resumed.
WATCHED = "CKPT_CHAOS_WATCH"
#: By name: the module that is its process.
MODULES = {"writer": "lowdiff.persistence.writer.main", "replica": "lowdiff.recovery.replica.main"}
#: Exit status of a process that ckpt-chaos ended.
KILLED = 137


class ArmedProcess(detached_process.DetachedProcess):
    """The first process of a kind is armed, and how it ended is written into a file; see the module."""

    victim = ""
    takes_trainer_along = False
    outcome = Path()

    def __init__(self, args: Sequence[str], *, env: Mapping[str, str], **rest: Any) -> None:
        is_victim = self.victim in args
        if is_victim:
            ArmedProcess.victim = ""
            env = {name: value for name, value in env.items() if name != ARMED}
        super().__init__(args, env=env, **rest)
        if is_victim:
            threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        try:
            ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
            code = None if ended is None else ended.si_status
        except ChildProcessError:  # its handle was faster
            code = self.returncode
        self.outcome.write_text(str(code))
        if code == KILLED and self.takes_trainer_along:
            os.kill(os.getpid(), signal.SIGKILL)


def main(argv: Sequence[str]) -> int:
    """Arm the victim and train."""
    name, how, *words = argv
    if WATCHED in os.environ:
        if name == "trainer":
            from ckpt_chaos.targets.common import arm_from_env

            arm_from_env(int(os.environ.get("RANK", "0")), lazy=True)  # as sitecustomize does
        else:
            ArmedProcess.victim, ArmedProcess.takes_trainer_along = MODULES[name], how == "both"
            ArmedProcess.outcome = Path(f"{words[1]}.victim")
            setattr(detached_process, "DetachedProcess", ArmedProcess)  # noqa: B010
    return training.main(words)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
