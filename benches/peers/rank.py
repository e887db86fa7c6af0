"""One rank of one phase of a cell, in the environment of the system in question.

    python -m benches.peers.rank TASK.json RANK

``"overhead"``: two equal trainings take turns in blocks, one of them saves every step. ``"train"``: a
history of some steps. Both end by SIGKILL, after everything was drained. ``"kill"``: steps until
killed from outside. ``"restore"``: what comes back of any of them, in a process that knows nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from benches.peers.arm import Task
from benches.peers.histories import train, until_killed
from benches.peers.restoring import restore
from benches.peers.trial import Trial
from benches.peers.turns import measure

_PHASES: dict[str, Callable[[Trial], None]] = {
    "overhead": measure,
    "train": train,
    "kill": until_killed,
    "restore": restore,
}


def main() -> None:
    """Carry a task out."""
    task, rank = Task.from_json(Path(sys.argv[1]).read_text(encoding="utf-8")), int(sys.argv[2])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(minutes=10))
    _PHASES[task.phase](Trial(task, rank))


if __name__ == "__main__":
    main()
