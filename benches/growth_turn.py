"""One recovery of ``bench_recovery_growth``, by one process or by a group of them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist

import lowdiff
from benches.harness import pin
from benches.peak import Peak
from benches.replay_arms import digest
from benches.runs import Places
from lowdiff.recovery.replay import ReplayOptions


@dataclass(frozen=True, slots=True)
class Growth:
    """What is to be recovered, and how.

    Attributes:
        steps: Differentials after the snapshot of step 0.
        workers: Threads of a process.
        cores: Of all processes together.
    """

    where: Places
    steps: int
    workers: int
    cores: Sequence[int]


@dataclass(frozen=True, slots=True)
class Turn:
    """What one recovery took.

    Attributes:
        seconds: By the wall clock, from when all its processes were there; of the last to end.
        cpu_seconds: Processor time, of all of them.
        peak_bytes: Peak memory above what they held before, added up.
        elements: Of the model.
        digests: SHA-256 of the state that each made.
    """

    seconds: float
    cpu_seconds: float
    peak_bytes: int
    elements: int
    ranks: int
    digests: tuple[str, ...]


def alone(task: Growth, connection: Connection) -> None:
    """Recover once in this process, and send a ``Turn``."""
    pin(task.cores[: task.workers])
    torch.set_num_threads(1)
    connection.send(_recovered(task, None))


def as_rank(rank: int, world_size: int, task: Growth) -> Turn:
    """One rank's part of a recovery that several share."""
    pin(task.cores)
    dist.barrier()
    return _recovered(task, dist.group.WORLD)


def added_up(turns: Sequence[Turn]) -> Turn:
    """What all ranks of a recovery took."""
    return Turn(
        seconds=max(turn.seconds for turn in turns),
        cpu_seconds=sum(turn.cpu_seconds for turn in turns),
        peak_bytes=sum(turn.peak_bytes for turn in turns),
        elements=turns[0].elements,
        ranks=len(turns),
        digests=tuple(digest for turn in turns for digest in turn.digests),
    )


def _recovered(task: Growth, group: dist.ProcessGroup | None) -> Turn:
    options = ReplayOptions(num_workers=task.workers, group=group)
    peak = Peak()
    began, cpu = time.perf_counter(), time.process_time()
    state = lowdiff.recover(task.where.run, task.steps, staging=task.where.staging, options=options)
    seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu
    peak_bytes = peak.bytes()
    assert (state.base_step, state.step) == (0, task.steps)
    entries = state.optimizers[0].state
    found = digest((n, p, entries[n]) for n, p in state.parameters.items())
    elements = state.fence.layout.elements
    return Turn(seconds, cpu_seconds, peak_bytes, elements, 1, (found,))
