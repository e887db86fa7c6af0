"""One rank of one phase of a cell, in the environment of the system in question.

    python -m benches.peers.rank TASK.json RANK

``"overhead"``: two equal trainings take turns in blocks, one of them saves every step. ``"train"``: a
history of some steps. Both end by SIGKILL, after everything was drained. ``"kill"``: steps until
killed from outside. ``"restore"``: what comes back of any of them, in a process that knows nothing.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benches.harness import abba
from benches.peers.arm import Arm, Place, Task
from benches.peers.full_state import remove_old
from benches.peers.systems import SYSTEMS, compression_of, make_arm
from benches.peers.training import MODELS, Training
from benches.restart_arms import evict
from lowdiff.persistence.values import same

_NEVER = 1 << 40
_SAVED_AT_END = 2


class Rank:
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
        write(self.task.found / f"rank-{self.rank}.json", found)
        dist.barrier()
        os.kill(os.getpid(), signal.SIGKILL)


def measure(this: Rank) -> None:
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
    pairs = []
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

    def __init__(self, this: Rank, arm: Arm, plain: Training, saved: Training) -> None:
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


def settle(this: Rank, arm: Arm) -> None:
    """Wait for all, and make room: what a user's retention would remove is removed, untimed."""
    arm.drain()
    dist.barrier()
    if this.rank == 0 and not this.system.keeps_differences:
        remove_old(this.task.files)
    dist.barrier()


def train(this: Rank) -> None:
    """Phase ``"train"``: a history of ``task.steps`` steps after the newest full snapshot.

    Who saves whole states is spared all but the last: the others would be removed unread.
    """
    task = this.task
    training = this.training()
    arm = this.arm(_NEVER)
    arm.open(training)
    first_saved = 1 if this.system.keeps_differences else task.steps - _SAVED_AT_END + 1
    before = written_bytes(task.files)
    for step in range(1, task.steps + 1):
        training.step(step)
        if step >= first_saved:
            arm.after_step(step)
    arm.drain()
    dist.barrier()
    grown = written_bytes(task.files) - before
    if this.rank == 0:
        torch.save(training.state(), task.expected)
    num_saved = task.steps - first_saved + 1
    this.end_by_kill({"written_bytes": grown, "saved_steps": num_saved})


def until_killed(this: Rank) -> None:
    """Phase ``"kill"``: steps, each saved and then noted in the diary."""
    training = this.training()
    arm = this.arm(_NEVER)
    arm.open(training)
    diary = os.open(this.task.diary, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for step in range(1, this.task.steps + 1):
        training.step(step)
        arm.after_step(step)
        if this.rank == 0:
            os.write(diary, b".")
    raise TimeoutError(f"nobody killed this process in {this.task.steps} steps")


def restore(this: Rank) -> None:
    """Phase ``"restore"``: from files that are not in the page cache, to the end of a first step."""
    task = this.task
    training = this.training()
    evict(task.files)
    dist.barrier()
    bytes_before = storage_bytes_read()
    begun = time.perf_counter()
    arm = this.arm(_NEVER)
    step = arm.restore(training)
    restored = time.perf_counter()
    bytes_read = storage_bytes_read() - bytes_before
    found: dict[str, Any] = {
        "restore_seconds": restored - begun,
        "bytes_read": bytes_read,
        "step": step,
    }
    if task.expected.exists() and step == task.steps:
        expected = torch.load(task.expected, weights_only=True)
        found |= differences(training.state(), expected)
    found["first_step_seconds"] = training.step(step + 1)
    # No end in good order: it would write a last snapshot of what nobody needs.
    this.end_by_kill(found)


def differences(state: dict[str, Any], expected: dict[str, Any]) -> dict[str, Any]:
    """Whether two states have the same bits, and by how much an element differs at most."""
    largest, is_same = 0.0, True
    pairs = [(state["model"][name], other) for name, other in expected["model"].items()]
    entries = state["optimizer"]["state"]
    for i, values in expected["optimizer"]["state"].items():
        pairs += [(entries.get(i, {}).get(name), other) for name, other in values.items()]
    for mine, other in pairs:
        if mine is None:
            return {"bit_identical": False, "largest_difference": float("inf")}
        is_same &= same(mine.detach(), other)
        largest = max(largest, (mine.detach().double() - other.double()).abs().max().item())
    return {"bit_identical": is_same, "largest_difference": largest}


def written_bytes(folder: Path) -> int:
    """Sizes of all files below a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def storage_bytes_read() -> int:
    """What this process has caused to be read from disks since it began."""
    lines = Path("/proc/self/io").read_text(encoding="ascii").splitlines()
    return int(dict(line.split(": ") for line in lines)["read_bytes"])


def write(path: Path, content: dict[str, Any]) -> None:
    """As JSON, at once under its name."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(content), encoding="utf-8")
    partial.replace(path)


def task_text(task: Task) -> str:
    """A task as JSON."""
    return json.dumps({k: str(v) if isinstance(v, Path) else v for k, v in asdict(task).items()})


def task_from(text: str) -> Task:
    """The inverse of ``task_text``."""
    values = json.loads(text)
    return Task(**{**values, **{k: Path(values[k]) for k in ("files", "staging", "found")}})


_PHASES: dict[str, Callable[[Rank], None]] = {
    "overhead": measure,
    "train": train,
    "kill": until_killed,
    "restore": restore,
}


def main() -> None:
    """Carry a task out."""
    task, rank = task_from(Path(sys.argv[1]).read_text(encoding="utf-8")), int(sys.argv[2])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(minutes=10))
    _PHASES[task.phase](Rank(task, rank))


if __name__ == "__main__":
    main()
