"""A writer that storage holds up, while its trainer drops and overwrites what it has staged."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from crc32c import crc32c

from lowdiff.persistence.framing import RecordKind
from lowdiff.persistence.images import StagedImage
from lowdiff.persistence.memory import read_view
from lowdiff.persistence.segments import Batch
from lowdiff.persistence.snapshot_writing import staged_image
from lowdiff.persistence.staging import LogTail, StagingLog
from lowdiff.persistence.writer import Writer
from lowdiff.persistence.writer_settings import WriterSettings
from tests.persistence.made_runs import tear
from tests.persistence.staged_logs import payload
from tests.persistence.writers import log_of, settings_in, stage_snapshot


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A pipe from a trainer that lives and says nothing, in the place of stdin."""
    reads, writes = os.pipe()
    with os.fdopen(reads) as pipe:
        monkeypatch.setattr(sys, "stdin", pipe)
        yield
    os.close(writes)


def short_log(settings: WriterSettings) -> StagingLog:
    """Of four chunks of 4096 bytes."""
    return log_of(settings, cap_bytes=4 * 4096)


def put(log: StagingLog, step: int) -> None:
    """Stage a step, whatever that drops."""
    meta = b"step %d" % step
    kind = RecordKind.DIFFERENTIAL
    assert log.append(kind, step, meta, payload(step), durable_step=0, drop=True)


def test_a_mark_is_taken_before_the_writer_waits_for_the_disk(tmp_path: Path, told: None) -> None:
    settings = settings_in(tmp_path, trainer_pid=os.getppid())
    log = short_log(settings)

    async def stall() -> StagedImage:
        writer = Writer(settings)
        for step in range(1, 11):
            put(log, step)
        stage_snapshot(log, 10, 1000, durable=0)
        put(log, 11)
        encoding = asyncio.create_task(writer._encode())
        while writer._queue.qsize() < 2 or writer._marked < 10:  # nobody takes from it
            await asyncio.sleep(0.01)
        for step in range(12, 400):
            put(log, step)
        while True:
            work = await asyncio.wait_for(writer._queue.get(), 20.0)
            assert isinstance(work, Batch | StagedImage)
            if isinstance(work, StagedImage):
                break
        encoding.cancel()
        return work

    image = asyncio.run(stall())
    assert image.step == 10
    found = read_view(image.image)
    assert (image.bytes, image.checksum) == (len(found), crc32c(found))


def test_a_mark_that_was_overwritten_is_found_again_in_a_later_chunk(tmp_path: Path) -> None:
    settings = settings_in(tmp_path)
    log, tail = short_log(settings), LogTail(settings.staging)
    put(log, 1)
    stage_snapshot(log, 1, 1000, durable=0)
    _, old = iter(tail.next, None)
    assert staged_image(old, settings.staging.snapshot) is not None
    for step in range(2, 400):
        put(log, step)
    assert staged_image(old, settings.staging.snapshot) is None
    records = iter(tail.next, None)
    again = next(r for r in records if r.header.kind is RecordKind.SNAPSHOT)
    mark = staged_image(again, settings.staging.snapshot)
    assert isinstance(mark, StagedImage)
    assert (mark.step, mark.bytes) == (1, settings.staging.snapshot.stat().st_size)


def test_a_damaged_copy_of_a_mark_that_was_taken_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = settings_in(tmp_path)
    log = short_log(settings)
    stage_snapshot(log, 40, 1000, durable=0)
    for step in range(41, 60):  # a new chunk begins with the mark
        put(log, step)
    tear(settings.staging, 40, RecordKind.SNAPSHOT, copy=1)

    async def encode() -> tuple[str, list[object]]:
        writer = Writer(settings)
        writer._queue = asyncio.Queue()
        await writer._encode()
        queued: list[object] = []
        while not writer._queue.empty():
            queued.append(writer._queue.get_nowait())
        return writer._status.status.error, queued

    with open(os.devnull) as nothing:
        monkeypatch.setattr(sys, "stdin", nothing)  # the trainer is gone
        error, queued = asyncio.run(encode())
    assert [work.step for work in queued if isinstance(work, StagedImage)] == [40]
    assert not error
