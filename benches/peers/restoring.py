"""What comes back, in a process that knows nothing."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benches.peers.trial import NEVER, Trial
from benches.restart_arms import evict
from lowdiff.persistence.format.values import same


def restore(this: Trial) -> None:
    """Phase ``"restore"``: from files that are not in the page cache, to the end of a first step."""
    task = this.task
    training = this.training()
    evict(task.files)
    dist.barrier()
    bytes_before = storage_bytes_read()
    begun = time.perf_counter()
    arm = this.arm(NEVER)
    step = arm.restore(training)
    restored = time.perf_counter()
    bytes_read = storage_bytes_read() - bytes_before
    found: dict[str, Any] = {
        "restore_seconds": restored - begun,
        "bytes_read": bytes_read,
        "step": step,
    }
    states = _expected(this, step)
    compared = [differences(training.state(), state) for state in islice(states, 1)]
    found["first_step_seconds"] = training.step(step + 1)
    compared += [differences(training.state(), state) for state in states]
    if compared:
        found |= {
            "bit_identical": all(one["bit_identical"] for one in compared),
            "largest_difference": max(one["largest_difference"] for one in compared),
        }
    # No end in good order: it would write a last snapshot of what nobody needs.
    this.end_by_kill(found)


def _expected(this: Trial, step: int) -> Iterator[dict[str, Any]]:
    """The states that a training without checkpoints has at ``step`` and, where known, one later.

    From files of the process that died, if that was its last step; else from training once more. Of
    step 0 nothing is to be had: nothing came back. Nor of earlier steps than the last of a sketch.
    """
    task = this.task
    if task.expected.exists() and step == task.steps:
        for path in (task.expected, task.expected_next):
            if path.exists():
                yield torch.load(path, weights_only=True)
    elif step and not task.is_sketch:
        twin = this.training(has_arm=False)
        for number in range(1, step + 1):
            twin.step(number)
        yield twin.state()
        twin.step(step + 1)
        yield twin.state()


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


def storage_bytes_read() -> int:
    """What this process has caused to be read from disks since it began."""
    lines = Path("/proc/self/io").read_text(encoding="ascii").splitlines()
    return int(dict(line.split(": ") for line in lines)["read_bytes"])
