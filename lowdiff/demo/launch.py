"""Start a training script under torchrun, read its output, and kill it with SIGKILL."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from lowdiff.errors import LowDiffError

if TYPE_CHECKING:
    from typing_extensions import Self

_LINES_SHOWN = 25


class WorkersFailed(LowDiffError):
    """Training processes that ended with an error; the message has their last output."""


def child_processes(pid: int) -> list[int]:
    """Return direct children of a process that have not ended yet, read from ``/proc``."""
    children = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with suppress(OSError):  # ended between listing and reading
                stat = (folder / "stat").read_text(errors="replace")
                # The second field is the command in brackets, which may itself contain blanks and
                # brackets.
                state, parent = stat.rpartition(")")[2].split()[:2]
                if state not in "ZX" and int(parent) == pid:
                    children.append(int(folder.name))
    return sorted(children)


class Launch:
    """One torchrun with its workers. Leaving the context kills the processes that still run.

    Args:
        command: Command to start: torchrun's agent, whose direct children are the workers.
        log: File that gets a copy of all output.
    """

    def __init__(self, command: Sequence[str], log: Path) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        self._log = log
        self._was_killed = False
        self._agent = subprocess.Popen(
            command,
            env={**os.environ, "OMP_NUM_THREADS": "1"},  # torchrun warns when it is unset
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,  # Ctrl-C reaches only this process, which then kills the others
        )

    def lines(self) -> Iterator[str]:
        """Yield each line of output as it is printed, until agent and workers have ended.

        Raises:
            WorkersFailed: If the processes ended with an error, and not by ``kill``.
        """
        assert self._agent.stdout is not None
        last: list[str] = []
        with self._log.open("w", encoding="utf-8") as log:
            for line in self._agent.stdout:
                log.write(line)
                last = [*last[1 - _LINES_SHOWN :], line]
                yield line
        if self._agent.wait() != 0 and not self._was_killed:
            raise WorkersFailed(
                f"torchrun ended with exit code {self._agent.returncode}; its last output:\n"
                f"{''.join(last)}(all of it: {self._log})"
            )

    def kill(self) -> list[int]:
        """Send SIGKILL to every worker and the agent at once; return the workers' process ids.

        torchrun gives each worker a session of its own, so a signal to the agent's group does not
        reach the workers. Processes that workers detached, such as lowdiff's writer, stay alive.
        """
        self._was_killed = True
        workers = child_processes(self._agent.pid)
        for pid in [*workers, self._agent.pid]:
            with suppress(ProcessLookupError):  # it ended on its own
                os.kill(pid, signal.SIGKILL)
        return workers

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._agent.poll() is None:
            self.kill()
        self._agent.communicate()  # the pipe ends once all processes are gone


def torchrun_command(module: str, arguments: Sequence[str], *, world_size: int) -> list[str]:
    """Return a command that runs a module in ``world_size`` processes here, on a free port."""
    torchrun = [sys.executable, "-m", "torch.distributed.run"]
    return [*torchrun, "--standalone", f"--nproc-per-node={world_size}", "-m", module, *arguments]
