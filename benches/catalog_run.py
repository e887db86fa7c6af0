"""A run of a million tiny differentials, in the format of a real one, made in minutes.

A trainer makes its first two steps, with a learning rate of 0. All further records are that of the
second step with another number, which only the record's header holds; so every one of them replays, to
the parameters that there were at the start. They go through the writer process's own code.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from unittest.mock import patch

import torch

import lowdiff
from benches.runs import Places
from lowdiff.compressors import TopK
from lowdiff.persistence.files.paths import RunFolder
from lowdiff.persistence.format.document import write_json
from lowdiff.persistence.format.framing import FileHeader, FileKind, RecordRef
from lowdiff.persistence.format.image import Manifest, manifest_file
from lowdiff.persistence.run.catalog import scan
from lowdiff.persistence.writer.segments import Batch, SegmentWriter

_FIRST_STEPS = 2


@dataclass(frozen=True, slots=True)
class Shape:
    """How a synthetic run looks.

    Attributes:
        steps: Differentials of its only rank.
        batch_size: Differentials per segment.
        snapshot_every: Steps between snapshots; the newest is half of it behind the last step.
    """

    steps: int
    batch_size: int
    snapshot_every: int


def trainer(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """The model that every process of the bench attaches, and its optimizer."""
    torch.manual_seed(seed)
    model = torch.nn.Linear(8, 8)
    return model, torch.optim.SGD(model.parameters(), lr=0.0)


def checkpointer(where: Places) -> lowdiff.Checkpointer:
    """As a trainer of the run would make it."""
    return lowdiff.Checkpointer(
        where.run,
        compressor=TopK(density=0.1),
        snapshot_every=1 << 40,
        staging=where.staging,
        retention=None,
        on_error="raise",
    )


def make_run(where: Places, shape: Shape, seed: int) -> None:
    """Write the whole run; what is in staging is gone at the end, as after a restart."""
    model, optimizer = trainer(seed)
    # Not the default generator: its state would be in every record.
    generator = torch.Generator().manual_seed(seed)
    with checkpointer(where) as opened:
        opened.attach(model, optimizer)
        for _ in opened.steps(_FIRST_STEPS):
            for parameter in model.parameters():
                parameter.grad = torch.randn(parameter.shape, generator=generator)
            optimizer.step()
    shutil.rmtree(where.staging)
    where.staging.mkdir()
    folder = RunFolder(where.run)
    record = scan(folder).records[0, 0][_FIRST_STEPS].record
    with _without_fsync():
        asyncio.run(_write_segments(folder, shape, record))
        _write_snapshots(folder, shape)


async def _write_segments(folder: RunFolder, shape: Shape, record: RecordRef) -> None:
    header = record.header
    run_id = scan(folder).run_id
    writer = SegmentWriter(
        folder,
        FileHeader(FileKind.SEGMENT, run_id, header.incarnation, header.rank, 1, 0),
        max_bytes=256 << 20,
    )
    body = bytes(record.body) + bytes(-len(record.body) % 8)
    for first in range(_FIRST_STEPS + 1, shape.steps + 1, shape.batch_size):
        last = min(first + shape.batch_size - 1, shape.steps)
        records = [replace(header, step=step).pack() + body for step in range(first, last + 1)]
        await writer.append(Batch(b"".join(records), first, last, tuple(map(len, records))))
        await writer.seal()


def _write_snapshots(folder: RunFolder, shape: Shape) -> None:
    """That of the last step that was trained, under other numbers: no parameter has changed since."""
    trained = folder.snapshot(0, _FIRST_STEPS)
    manifest = Manifest.read(manifest_file(trained, 0))
    for step in range(shape.steps - shape.snapshot_every // 2, 0, -shape.snapshot_every):
        target = folder.snapshot(0, step)
        shutil.copytree(trained, target)
        manifest_file(target, 0).unlink()
        write_json(manifest_file(target, 0), replace(manifest, step=step).document())


@contextmanager
def _without_fsync() -> Iterator[None]:
    """Nothing here must survive a power failure, and 100,000 syncs would take an hour."""
    with patch("os.fsync"), patch("os.fdatasync"):
        yield
