"""Blocks of steps with and without checkpoints, in turns."""

from __future__ import annotations

import gc
import time
from typing import Any

import torch
import torch.distributed as dist

from benches.harness import Pair, abba
from benches.peers.arm import Arm, Task
from benches.peers.training import Training
from benches.peers.trial import Trial, settle, written_bytes
from lowdiff.persistence.values import same


def measure(this: Trial) -> None:
    """Phase ``"overhead"``."""
    task = this.task
    num_steps = 2 * task.rounds * task.block_steps
    plain, saved = this.training(has_arm=False), this.training()
    warm_up = range(1, 1 + task.block_steps)
    for step in warm_up:
        plain.step(step)
    times = {"ready": time.time()}
    arm = this.arm(num_steps)
    arm.open(saved)
    times["opened"] = time.time()
    for step in warm_up:
        saved.step(step)
        arm.after_step(step)
    settle(this, arm)
    times["warm"] = time.time()
    blocks = Blocks(this, arm, plain, saved)
    pairs: list[Pair] = []
    for _ in range(task.rounds):
        pairs += abba(blocks.with_arm, blocks.without)
    times["done"] = time.time()
    for training in (plain, saved):
        training.assert_sane()
    for mine, other in zip(plain.model.parameters(), saved.model.parameters(), strict=True):
        assert same(mine.detach(), other.detach()), "checkpointing changed training"
    if this.rank == 0:
        torch.save(plain.state(), task.expected)
    this.end_by_kill({"pairs": pairs, "steps": saved_steps(task), "times": times, **blocks.found})


def saved_steps(task: Task) -> int:
    """Steps that the phase ``"overhead"`` makes with an arm."""
    return (1 + 2 * task.rounds) * task.block_steps


class Blocks:
    """Turns of several steps, which end when all that was saved has been written."""

    def __init__(self, this: Trial, arm: Arm, plain: Training, saved: Training) -> None:
        self._this, self._arm = this, arm
        self._plain, self._saved = plain, saved
        first = this.task.block_steps + 1
        self._next = {"plain": first, "saved": first}
        self.found: dict[str, list[Any]] = {
            "plain_seconds": [],
            "saved_seconds": [],
            "call_seconds": [],
            "drain_seconds": [],
            "written_bytes": [],
        }

    def without(self) -> float:
        """A block without checkpoints; seconds."""
        gc.collect()
        begun = time.perf_counter()
        steps = [self._plain.step(number) for number in self._numbers("plain")]
        seconds = time.perf_counter() - begun
        self.found["plain_seconds"].append(steps)
        return seconds

    def with_arm(self) -> float:
        """A block with; seconds of its steps, of saving and of the drain."""
        before = written_bytes(self._this.task.files)
        steps, calls = [], []
        gc.collect()
        begun = time.perf_counter()
        for number in self._numbers("saved"):
            seconds = self._saved.step(number)
            calling = time.perf_counter()
            self._arm.after_step(number)
            calls.append(time.perf_counter() - calling)
            steps.append(seconds + calls[-1])
        draining = time.perf_counter()
        self._arm.drain()
        ended = time.perf_counter()
        self.found["saved_seconds"].append(steps)
        self.found["call_seconds"].append(calls)
        self.found["drain_seconds"].append(ended - draining)
        dist.barrier()  # the other ranks' files count as well
        self.found["written_bytes"].append(written_bytes(self._this.task.files) - before)
        settle(self._this, self._arm)
        return ended - begun

    def _numbers(self, which: str) -> range:
        first = self._next[which]
        self._next[which] = first + self._this.task.block_steps
        return range(first, self._next[which])
