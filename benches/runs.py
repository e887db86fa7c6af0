"""Runs that benches make and read back."""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import torch

import lowdiff
from lowdiff.compressors import TopK
from lowdiff.persistence.files.paths import RunFolder
from lowdiff.persistence.run.catalog import Catalog, scan
from lowdiff.recovery.plan import RecoveryPlan, plan_recovery

_Task = TypeVar("_Task")


@dataclass(frozen=True, slots=True)
class Places:
    """Where a bench's run lives.

    Attributes:
        run: Run folder, on the disk of the bench's output folder; its parent may hold more.
        staging: Staging folder, in memory.
    """

    run: Path
    staging: Path


@contextmanager
def places(out: Path) -> Iterator[Places]:
    """Folders for one run, removed at the end."""
    out.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(prefix="files-", dir=out) as files,
        tempfile.TemporaryDirectory(prefix="lowdiff-bench-", dir="/dev/shm") as staging,
    ):
        yield Places(Path(files).absolute() / "run", Path(staging))


def plan_from(where: Places, base_step: int) -> tuple[Catalog, RecoveryPlan]:
    """The way to the run's newest step from an older snapshot than recovery would choose.

    ``close`` takes a snapshot of the last step, from which there would be nothing to replay.
    """
    catalog = scan(RunFolder(where.run), [where.staging])
    only_base = tuple(s for s in catalog.snapshots if s.step == base_step)
    assert only_base, f"{where.run} holds no snapshot of step {base_step}"
    catalog = replace(catalog, snapshots=only_base)
    return catalog, plan_recovery(catalog)


def logged_steps(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    where: Places,
    *,
    density: float,
    until: int,
) -> Iterator[int]:
    """Step a model with synthetic gradients under a checkpointer, before each step yielding the number done.

    One step with a dense gradient comes before, because second moments of exactly 0 are the mark
    of a run's first steps: MKL's square root takes six times as long for them.
    """

    def step() -> None:
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()

    step()
    checkpointer = lowdiff.Checkpointer(
        where.run,
        compressor=TopK(density=density),
        snapshot_every=1 << 40,
        staging=where.staging,
        retention=None,
        on_error="raise",
    )
    with checkpointer:
        checkpointer.attach(model, optimizer)
        for done in checkpointer.steps(until):
            yield done
            step()


def in_new_process(work: Callable[[_Task, Connection], None], task: _Task) -> Any:
    """What ``work`` sends of a task, run as after a crash: nothing is warm but the files' pages."""
    # Not a fork of this process, which has threads. What every arm would import, and what torch
    # imports when the first optimizer is made, is imported once.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([work.__module__, "torch._dynamo"])
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=work, args=(task, theirs), daemon=True)
    process.start()
    theirs.close()  # so that the end of the process is the end of the pipe
    found = ours.recv()
    process.join()
    return found
