"""A writer that storage holds up, while its trainer drops and overwrites what it has staged."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from crc32c import crc32c

from lowdiff.persistence.files.mapped_file import read_view
from lowdiff.persistence.format.framing import RecordKind
from lowdiff.persistence.staging.log import StagingLog
from lowdiff.persistence.staging.settings import WriterSettings
from lowdiff.persistence.writer.images import StagedImage
from lowdiff.persistence.writer.main import Writer
from lowdiff.persistence.writer.segments import Batch
from tests.unit.persistence.staged_logs import payload
from tests.unit.persistence.writers import log_of, settings_in, stage_snapshot


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
        stage_snapshot(log, 10, 1000)
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
