"""One life of the training whose costs `bench_tuner` measures, in a process that may kill itself."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass

import torch

import lowdiff
from benches.replay_arms import digest
from benches.runs import Places
from lowdiff.compressors import TopK
from lowdiff.demo.model import GPT, GPTConfig


@dataclass(frozen=True, slots=True)
class LifePlan:
    """What one life does.

    Attributes:
        model: Size of the model.
        until: Completed steps at which it ends.
        killed: Whether by SIGKILL, or in order.
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


def live(plan: LifePlan) -> None:
    """Train; a file in the run's folder says how the parameters ended."""
    torch.set_num_threads(1)
    torch.manual_seed(plan.seed)
    model = GPT(plan.model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    checkpointer = lowdiff.Checkpointer(
        plan.where.run,
        compressor=TopK(density=0.01),
        snapshot_every=plan.snapshot_every,
        batch_size=plan.batch_size,
        staging=plan.where.staging,
        on_error="raise",
    )
    checkpointer.attach(model, optimizer)
    shape = (plan.rows, plan.model.context + 1)
    for step in checkpointer.steps(until=plan.until + plan.killed):
        if step == plan.until:
            os.kill(os.getpid(), signal.SIGKILL)
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(plan.model.vocabulary, shape, generator=generator)
        optimizer.zero_grad()
        model(tokens[:, :-1], tokens[:, 1:]).backward()
        optimizer.step()
    checkpointer.close()
    found = digest((name, p, {}) for name, p in model.named_parameters())
    plan.where.run.with_name("digest").write_text(found)
