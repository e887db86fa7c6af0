"""Blocks of steps with and without checkpoints, in turns."""

from __future__ import annotations

import gc
import time
from collections import defaultdict
from typing import Any

import torch
import torch.distributed as dist

from benches.harness import Pair, abba
from benches.peers.arm import Arm, Task
from benches.peers.training import Training
from benches.peers.trial import Trial, settle, written_bytes
from lowdiff.persistence.format.values import same


def measure(this: Trial) -> None:
    """Phase ``"overhead"``."""
    task = this.task
    plain, saved = this.training(has_arm=False), this.training()
    dense = [this.dense_training()] if this.system.compression else []
    warm_up = range(1, 1 + task.block_steps)
    times = {"begun": time.time()}
    for training in (plain, *dense):
        for step in warm_up:
            training.step(step)
    times["ready"] = time.time()
    arm = this.arm(snapshot_every=2 * task.rounds * task.block_steps)  # one in all blocks
    arm.open(saved)
    times["opened"] = time.time()
    for step in warm_up:
        saved.step(step)
        arm.after_step(step)
    settle(this, arm)
    times["warm"] = time.time()
    blocks = Blocks(this, arm, plain, saved)
    pairs: list[Pair] = []
    dense_blocks: list[float] = []
    for _ in range(task.rounds):
        dense_blocks += [sum(blocks.steps_of(training)) for training in dense]
        pairs += abba(blocks.with_arm, blocks.without)
    times["done"] = time.time()
    for training in (plain, saved, *dense):
        training.assert_sane()
    for mine, other in zip(plain.model.parameters(), saved.model.parameters(), strict=True):
        assert same(mine.detach(), other.detach()), "checkpointing changed training"
    num_steps = saved_steps(task)
    if this.rank == 0:
        torch.save(plain.state(), task.expected)
    plain.step(num_steps + 1)
    if this.rank == 0:
        torch.save(plain.state(), task.expected_next)
    found = {"pairs": pairs, "dense_blocks": dense_blocks, "num_steps": num_steps, "times": times}
    this.end_by_kill(found | blocks.found)


def saved_steps(task: Task) -> int:
    """Steps that the phase ``"overhead"`` makes with an arm."""
    return (1 + 2 * task.rounds) * task.block_steps


class Blocks:
    """Turns of several steps, which end when all that was saved has been written."""

    def __init__(self, this: Trial, arm: Arm, plain: Training, saved: Training) -> None:
        self._this, self._arm = this, arm
        self._plain, self._saved = plain, saved
        self._next: defaultdict[int, int] = defaultdict(lambda: this.task.block_steps + 1)
        self.found: dict[str, list[Any]] = {
            "plain_seconds": [],
            "saved_seconds": [],
            "call_seconds": [],
            "drain_seconds": [],
            "sync_seconds": [],
            "num_saved": [],
            "written_bytes": [],
        }

    def steps_of(self, training: Training) -> list[float]:
        """A block of any training; seconds of each step."""
        gc.collect()
        return [training.step(number) for number in self._numbers(training)]

    def without(self) -> float:
        """A block without checkpoints; seconds."""
        steps = self.steps_of(self._plain)
        self.found["plain_seconds"].append(steps)
        return sum(steps)

    def with_arm(self) -> float:
        """A block with; seconds of its steps, of saving and of the drain."""
        before = written_bytes(self._this.task.files)
        steps, calls, num_saved = [], [], 0
        gc.collect()
        begun = time.perf_counter()
        for number in self._numbers(self._saved):
            seconds = self._saved.step(number)
            calling = time.perf_counter()
            num_saved += self._arm.after_step(number)
            calls.append(time.perf_counter() - calling)
            steps.append(seconds + calls[-1])
        draining = time.perf_counter()
        self._arm.drain()
        ended = time.perf_counter()
        self.found["saved_seconds"].append(steps)
        self.found["call_seconds"].append(calls)
        self.found["drain_seconds"].append(ended - draining)
        self.found["num_saved"].append(num_saved)
        dist.barrier()  # the other ranks' files count as well
        self.found["written_bytes"].append(written_bytes(self._this.task.files) - before)
        self.found["sync_seconds"].append(settle(self._this, self._arm))
        return ended - begun

    def _numbers(self, training: Training) -> range:
        first = self._next[id(training)]
        self._next[id(training)] = first + self._this.task.block_steps
        return range(first, self._next[id(training)])
