"""A writer process, what a trainer stages for it, and what it left in segments."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TextIO

import numpy as np
import pytest

from lowdiff.errors import WriterFailed
from lowdiff.persistence.files.locks import FileLock
from lowdiff.persistence.files.mapped_file import ImageMark, read_view
from lowdiff.persistence.files.paths import RunFolder, StagingFolder
from lowdiff.persistence.format.codec import Codec
from lowdiff.persistence.format.framing import FileHeader, RecordKind, RecordRef, read_records
from lowdiff.persistence.format.image import ImageTensor, stage_image
from lowdiff.persistence.format.sections import read_sections
from lowdiff.persistence.run.fences import create_run
from lowdiff.persistence.staging.log import StagingLog
from lowdiff.persistence.staging.settings import WriterSettings
from lowdiff.persistence.staging.status import StatusPage, TrainerStatus, WriterStatus
from lowdiff.persistence.writer.handle import WriterProcess
from lowdiff.persistence.writer.main import Writer
from lowdiff.types import Section

ROOT = Path(__file__).parents[3]
RUN_ID = "00112233445566778899aabbccddeeff"
PATIENCE_SECONDS = 40.0


def settings_in(root: Path, run: Path | None = None, **changes: object) -> WriterSettings:
    settings = WriterSettings(
        run=str(run or root / "run"),
        staging_root=str(root / "staging"),
        run_id=RUN_ID,
        incarnation=0,
        rank=0,
        world_size=1,
        base_step=0,
        trainer_pid=os.getpid(),
        batch_size=4,
        flush_seconds=1000.0,
        retention=None,
    )
    settings = replace(settings, **changes)  # type: ignore[arg-type]
    earlier = (
        stage.root.name
        for stage in StagingFolder.all_of_run(root / "staging", RUN_ID)
        if stage.incarnation < settings.incarnation
    )
    settings = replace(settings, adopts=list(earlier))
    create_run(settings.folder, RUN_ID)
    settings.staging.root.mkdir(parents=True)
    return settings


def log_of(settings: WriterSettings, cap_bytes: int = 1 << 20) -> StagingLog:
    return StagingLog(
        settings.staging,
        run_id=RUN_ID,
        world_size=settings.world_size,
        chunk_bytes=4096,
        cap_bytes=cap_bytes,
    )


def noise(step: int, num_items: int) -> np.ndarray:
    return np.random.default_rng(step).integers(0, 2**32, num_items, dtype=np.uint32)


def append(log: StagingLog, step: int, durable: int = -1, num_items: int = 50) -> int | None:
    sections = [
        Section("indices/float32", "ascending", np.arange(num_items) * step),
        Section("values/float32", "planes", noise(step, num_items)),
    ]
    kind, meta = RecordKind.DIFFERENTIAL, b"step %d" % step
    return log.append(kind, step, meta, sections, durable_step=durable)


def stage_snapshot(log: StagingLog, step: int, num_items: int) -> None:
    data = noise(step, num_items)
    image = ImageTensor("model/w", "U32", (num_items,), data.data.cast("B"))
    mark = ImageMark(step, *stage_image(log.folder.snapshot, [image]))
    trainer = TrainerStatus(os.getpid(), step, step, image=mark)
    StatusPage(log.folder.trainer_status, trainer)


@contextmanager
def writing(settings: WriterSettings) -> Iterator[WriterProcess]:
    writer = WriterProcess(settings)
    try:
        yield writer
    finally:
        with suppress(WriterFailed):
            writer.finish(PATIENCE_SECONDS)


def write_here(settings: WriterSettings, orders: TextIO, monkeypatch: pytest.MonkeyPatch) -> None:
    """Do the writer's work in this process, until the trainer behind a pipe is gone and all is done."""
    lock = FileLock(settings.staging.writer_lock)
    assert lock.acquire("its writer")
    monkeypatch.setattr(sys, "stdin", orders)
    asyncio.run(asyncio.wait_for(Writer(settings).run(lock), PATIENCE_SECONDS))


def attended(writer: WriterProcess) -> WriterStatus:
    """What a writer reports; one that died is started again."""
    writer.tend()
    return writer.read_status()


def wait_until(writer: WriterProcess, condition: Callable[[WriterStatus], object]) -> WriterStatus:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition(status := attended(writer)):
        assert time.monotonic() < deadline, status
        time.sleep(0.002)
    return status


def stored_records(folder: RunFolder, incarnation: int = 0, rank: int = 0) -> list[RecordRef]:
    """Every valid record in every segment, in the order of the files."""
    found = []
    for number, owner, _, path in folder.segments():
        if (number, owner) == (incarnation, rank):
            view = read_view(path)
            if len(view) >= 64:
                found += list(read_records(view, FileHeader.unpack(view, path)))
    return found


def stored(
    folder: RunFolder, incarnation: int = 0, rank: int = 0, num_items: int = 50
) -> list[int]:
    """Their steps, after comparing each with what was staged."""
    records = stored_records(folder, incarnation, rank)
    for record in records:
        step = record.header.step
        assert bytes(record.meta) == b"step %d" % step
        indices, values = read_sections(record.sections, Codec(), coded=True)
        np.testing.assert_array_equal(indices.data, np.arange(num_items) * step)
        np.testing.assert_array_equal(values.data, noise(step, num_items))
    return [record.header.step for record in records]
