"""One recovery of ``bench_recovery_growth``."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection

import torch

import lowdiff
from benches.harness import pin
from benches.peak import Peak
from benches.replay_arms import digest
from benches.runs import Places
from lowdiff.recovery.replay.replayer import ReplayOptions


@dataclass(frozen=True, slots=True)
class Growth:
    """What is to be recovered, and how.

    Attributes:
        steps: Differentials after the snapshot of step 0.
        workers: Threads of the process.
        cores: Of the machine.
    """

    where: Places
    steps: int
    workers: int
    cores: Sequence[int]


@dataclass(frozen=True, slots=True)
class Turn:
    """What one recovery took.

    Attributes:
        seconds: By the wall clock.
        cpu_seconds: Processor time.
        peak_bytes: Peak memory above what the process held before.
        elements: Of the model.
        digest: SHA-256 of the state.
    """

    seconds: float
    cpu_seconds: float
    peak_bytes: int
    elements: int
    digest: str


def alone(task: Growth, connection: Connection) -> None:
    """Recover once in this process, and send a ``Turn``."""
    pin(task.cores[: task.workers])
    torch.set_num_threads(1)
    options = ReplayOptions(num_workers=task.workers)
    peak = Peak()
    began, cpu = time.perf_counter(), time.process_time()
    state = lowdiff.recover(task.where.run, task.steps, staging=task.where.staging, options=options)
    seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu
    peak_bytes = peak.bytes()
    assert (state.base_step, state.step) == (0, task.steps)
    entries = state.optimizers[0].state
    found = digest((n, p, entries[n]) for n, p in state.parameters.items())
    elements = state.fence.layout.elements
    connection.send(Turn(seconds, cpu_seconds, peak_bytes, elements, found))
