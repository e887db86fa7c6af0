"""What every phase of a cell needs, on one rank."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

from benches.peers.arm import Arm, Place, Task
from benches.peers.full_state import remove_old
from benches.peers.systems import SYSTEMS, arm_of, compression_of
from benches.peers.training import MODELS, Compression, Training

#: An interval of full snapshots that no trial reaches.
NEVER = 1 << 40


class Trial:
    """What every phase needs."""

    def __init__(self, task: Task, rank: int) -> None:
        self.task, self.rank = task, rank
        self.system = SYSTEMS[task.system]
        self._arm = arm_of(task.system)  # imported before anything is timed
        task.staging.mkdir(parents=True, exist_ok=True)
        task.files.mkdir(parents=True, exist_ok=True)

    def training(self, *, has_arm: bool = True) -> Training:
        """A fresh training; without an arm it compresses by itself what the arm would."""
        return self._training(
            compression_of(self.task.system, self.task.num_ranks, has_arm=has_arm)
        )

    def dense_training(self) -> Training:
        """One in which nothing is compressed."""
        return self._training(None)

    def _training(self, compression: Compression | None) -> Training:
        return Training(
            MODELS[self.task.model],
            seed=self.task.seed,
            rank=self.rank,
            num_ranks=self.task.num_ranks,
            compression=compression,
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
            min(MODELS[self.task.model].batch_size, self.task.block_steps),
        )
        return self._arm(place)

    def end_by_kill(self, found: dict[str, Any]) -> None:
        """Leave what was found, and die as a crashed trainer does."""
        _write(self.task.found / f"rank-{self.rank}.json", found)
        dist.barrier()
        os.kill(os.getpid(), signal.SIGKILL)


def settle(this: Trial, arm: Arm) -> float:
    """Wait for all, and make room: what a user's retention would remove is removed, untimed.

    Returns:
        Seconds that the disk still took for what the system leaves in the page cache. If they were
        not waited for, the next block would bear them, whichever it is.
    """
    arm.drain()
    dist.barrier()
    seconds = 0.0
    if this.rank == 0:
        begun = time.perf_counter()
        os.sync()
        seconds = time.perf_counter() - begun
        if not this.system.keeps_differences:
            remove_old(this.task.files)
    dist.barrier()
    return seconds


def written_bytes(folder: Path) -> int:
    """Sizes of all files below a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _write(path: Path, content: dict[str, Any]) -> None:
    """As JSON, at once under its name."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(content), encoding="utf-8")
    partial.replace(path)
