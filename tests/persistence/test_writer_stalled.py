"""A writer that storage holds up, while its trainer drops and overwrites what it has staged."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from crc32c import crc32c

from lowdiff.persistence.assembly import Assembly
from lowdiff.persistence.cycles import CycleMark, SliceRef
from lowdiff.persistence.framing import RecordKind, RecordRef
from lowdiff.persistence.images import StagedImage
from lowdiff.persistence.memory import read_view
from lowdiff.persistence.segments import Batch
from lowdiff.persistence.snapshot_writing import staged_mark
from lowdiff.persistence.staging import LogTail, StagingLog, staged_records
from lowdiff.persistence.writer import Writer
from lowdiff.persistence.writer_settings import WriterSettings
from tests.persistence.made_runs import tear
from tests.persistence.staged_logs import payload
from tests.persistence.writers import log_of, settings_in, stage_snapshot

CYCLE = CycleMark(40, 30, 1000, (900, 100), b"meta of the last slice", 7)


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


def put_slice(log: StagingLog, step: int, number: int, data: bytes) -> None:
    meta = SliceRef(40, number, ((number * 64, len(data)),)).encode()
    pieces = [memoryview(data)]
    assert log.append(RecordKind.SLICE, step, meta, (), pieces=pieces, durable_step=0, drop=True)


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
        while writer._queue.qsize() < 2 or writer._marked[0] < 10:  # nobody takes from it
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


def marks(log: StagingLog) -> list[tuple[int, RecordKind]]:
    kinds = (RecordKind.SNAPSHOT, RecordKind.CYCLE)
    found = (record.header for _, record in staged_records(log.folder))
    return [(header.step, header.kind) for header in found if header.kind in kinds]


def test_a_mark_that_was_overwritten_is_found_again_in_a_later_chunk(tmp_path: Path) -> None:
    settings = settings_in(tmp_path)
    log, tail = short_log(settings), LogTail(settings.staging)
    put(log, 1)
    stage_snapshot(log, 1, 1000, durable=0)
    _, old = iter(tail.next, None)
    assert staged_mark(old, settings.staging.snapshot) is not None
    for step in range(2, 400):
        put(log, step)
    assert staged_mark(old, settings.staging.snapshot) is None
    records = iter(tail.next, None)
    again = next(r for r in records if r.header.kind is RecordKind.SNAPSHOT)
    mark = staged_mark(again, settings.staging.snapshot)
    assert isinstance(mark, StagedImage)
    assert (mark.step, mark.bytes) == (1, settings.staging.snapshot.stat().st_size)


def test_an_images_mark_outlives_that_of_a_rolling_snapshot_after_it(tmp_path: Path) -> None:
    """Its memory is held until it is durable, so a writer that comes late must hear of it."""
    settings = settings_in(tmp_path)
    log = short_log(settings)
    stage_snapshot(log, 10, 1000, durable=0)
    assert log.append(RecordKind.CYCLE, 40, CYCLE.encode(), (), durable_step=0)
    for step in range(41, 400):
        put(log, step)
    assert marks(log) == 4 * [(10, RecordKind.SNAPSHOT), (40, RecordKind.CYCLE)]
    found = {r.header.step: r for _, r in staged_records(log.folder)}
    assert staged_mark(found[40], settings.staging.snapshot) == CYCLE
    stage_snapshot(log, 399, 1000, durable=0)
    for step in range(400, 800):
        put(log, step)
    assert marks(log) == 4 * [(399, RecordKind.SNAPSHOT)]


def test_a_slice_that_was_overwritten_is_left_out_and_ends_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = settings_in(tmp_path)
    log = short_log(settings)
    put_slice(log, 31, 0, b"a" * 64)
    put_slice(log, 32, 1, b"b" * 64)
    (_, first), (_, second) = list(staged_records(log.folder))
    overwritten = replace(first, body=memoryview(bytes(reversed(bytes(first.body)))))
    assembly = Assembly(settings, durable_snapshot=-1)
    with caplog.at_level(logging.WARNING):
        assert assembly.add([overwritten, second]) == (-1, "")
    assert "a slice of step 31 was dropped before it was written" in caplog.text
    assert assembly.partial(40).read_bytes() == bytes(64) + b"b" * 64


def test_slices_dropped_under_a_stalled_writer_do_not_end_it(tmp_path: Path) -> None:
    settings = settings_in(tmp_path)
    log = short_log(settings)
    held: list[RecordRef] = []
    tail = LogTail(settings.staging)
    for number in range(30):
        put_slice(log, 31, number, bytes([number]) * 64)
        held += iter(tail.next, None)
    for step in range(41, 400):
        put(log, step)
    assembly = Assembly(settings, durable_snapshot=-1)
    assert assembly.add(held) == (-1, "")
    assembly.discard()
    assert not list(settings.folder.root.rglob("*.partial"))


def test_a_damaged_copy_of_a_mark_that_was_taken_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = settings_in(tmp_path)
    log = short_log(settings)
    assert log.append(RecordKind.CYCLE, 40, CYCLE.encode(), (), durable_step=0)
    for step in range(41, 60):  # a new chunk begins with the mark
        put(log, step)
    tear(settings.staging, 40, RecordKind.CYCLE, copy=1)

    async def encode() -> tuple[int, list[object]]:
        writer = Writer(settings)
        writer._queue = asyncio.Queue()
        await writer._encode()
        queued: list[object] = []
        while not writer._queue.empty():
            queued.append(writer._queue.get_nowait())
        return writer._status.status.lost_snapshot, queued

    with open(os.devnull) as nothing:
        monkeypatch.setattr(sys, "stdin", nothing)  # the trainer is gone
        lost, queued = asyncio.run(encode())
    assert queued.count(CYCLE) == 1
    assert lost == -1
