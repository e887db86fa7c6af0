"""What every phase of a cell needs, on one rank."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import torch.distributed as dist

from benches.peers.arm import Arm, Place, Task
from benches.peers.full_state import remove_old
from benches.peers.systems import SYSTEMS, compression_of, make_arm
from benches.peers.training import MODELS, Training

#: An interval of full snapshots that no trial reaches.
NEVER = 1 << 40


class Trial:
    """What every phase needs."""

    def __init__(self, task: Task, rank: int) -> None:
        self.task, self.rank = task, rank
        self.system = SYSTEMS[task.system]
        task.staging.mkdir(parents=True, exist_ok=True)
        task.files.mkdir(parents=True, exist_ok=True)

    def training(self, *, has_arm: bool = True) -> Training:
        """A fresh training."""
        return Training(
            MODELS[self.task.model],
            seed=self.task.seed,
            rank=self.rank,
            num_ranks=self.task.num_ranks,
            compression=compression_of(self.task.system, self.task.num_ranks, has_arm=has_arm),
            is_sketch=self.task.is_sketch,
        )

    def arm(self, snapshot_every: int) -> Arm:
        """The system."""
        place = Place(
            self.task.files,
            self.task.staging,
            self.rank,
            self.task.num_ranks,
            snapshot_every,
            self.task.block_steps,
        )
        return make_arm(self.task.system, place)

    def end_by_kill(self, found: dict[str, Any]) -> None:
        """Leave what was found, and die as a crashed trainer does."""
        _write(self.task.found / f"rank-{self.rank}.json", found)
        dist.barrier()
        os.kill(os.getpid(), signal.SIGKILL)


def settle(this: Trial, arm: Arm) -> None:
    """Wait for all, and make room: what a user's retention would remove is removed, untimed."""
    arm.drain()
    dist.barrier()
    if this.rank == 0 and not this.system.keeps_differences:
        remove_old(this.task.files)
    dist.barrier()


def written_bytes(folder: Path) -> int:
    """Sizes of all files below a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _write(path: Path, content: dict[str, Any]) -> None:
    """As JSON, at once under its name."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(content), encoding="utf-8")
    partial.replace(path)
