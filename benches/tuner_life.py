"""One life of a training whose costs the tuner measures, in a process that is killed."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass

import torch

import lowdiff
from benches.gpt import GPT, GPTConfig
from benches.replay_arms import digest
from benches.runs import Places
from lowdiff.compressors import TopK


@dataclass(frozen=True, slots=True)
class LifePlan:
    """What one life does.

    Attributes:
        model: Size of the model.
        until: Completed steps at which it ends.
        killed: Whether by SIGKILL, or in order.
        checkpoints: Whether there is a Checkpointer at all.
        snapshot_every: Steps between full snapshots.
        batch_size: Steps per durable write.
        rows: Rows of a batch of training data.
    """

    where: Places
    model: GPTConfig
    until: int
    killed: bool
    snapshot_every: int
    batch_size: int
    rows: int
    seed: int
    checkpoints: bool = True


class Diary:
    """When a life did what, line by line, in a file that outlives it."""

    def __init__(self, where: Places) -> None:
        path = where.run.with_name("diary")
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def note(self, what: str, step: int) -> None:
        """Add a line: what happened, at which step, and when (seconds since 1970)."""
        os.write(self._file, f"{what} {step} {time.time()}\n".encode())


def live(plan: LifePlan) -> None:
    """Train; files beside the run's folder say when it did what, and how the parameters ended."""
    diary = Diary(plan.where)
    torch.set_num_threads(1)
    torch.manual_seed(plan.seed)
    model = GPT(plan.model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    shape = (plan.rows, plan.model.context + 1)

    def step(number: int) -> None:
        generator = torch.Generator().manual_seed(number)
        tokens = torch.randint(plan.model.vocabulary, shape, generator=generator)
        optimizer.zero_grad()
        model(tokens[:, :-1], tokens[:, 1:]).backward()
        optimizer.step()

    if not plan.checkpoints:
        for number in range(plan.until):
            diary.note("step", number)
            step(number)
        return
    checkpointer = lowdiff.Checkpointer(
        plan.where.run,
        compressor=TopK(density=0.01),
        snapshot_every=plan.snapshot_every,
        batch_size=plan.batch_size,
        staging=plan.where.staging,
        on_error="raise",
    )
    diary.note("attach", 0)
    diary.note("attached", checkpointer.attach(model, optimizer))
    for number in checkpointer.steps(until=plan.until + plan.killed):
        diary.note("step", number)
        if number == plan.until:
            os.kill(os.getpid(), signal.SIGKILL)
        step(number)
    checkpointer.close()
    found = digest((name, p, {}) for name, p in model.named_parameters())
    plan.where.run.with_name("digest").write_text(found)
