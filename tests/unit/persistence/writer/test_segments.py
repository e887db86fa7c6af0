"""Appending to segments: a batch stands there once, whatever failed."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiofiles
import pytest

from lowdiff.errors import StorageError
from lowdiff.persistence.files.paths import RunFolder
from lowdiff.persistence.format.framing import FileHeader, FileKind
from lowdiff.persistence.run.fences import create_run
from lowdiff.persistence.writer.segments import Batch, SegmentWriter
from tests.unit.persistence.writers import RUN_ID

HEADER = FileHeader(FileKind.SEGMENT, RUN_ID, 0, 0, 1, 0)


def segments_in(path: Path) -> tuple[RunFolder, SegmentWriter]:
    folder = RunFolder(path)
    create_run(folder, RUN_ID)
    return folder, SegmentWriter(folder, HEADER, 256 << 20)


def batch(first: int, last: int) -> Batch:
    records = [bytes([step]) * 104 for step in range(first, last + 1)]
    return Batch(b"".join(records), first, last, tuple(map(len, records)))


@pytest.mark.parametrize("call", ["fsync", "fdatasync"])
def test_a_batch_whose_write_failed_is_given_again_and_stands_there_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    folder, segments = segments_in(tmp_path)
    sync, failures = getattr(os, call), [True]

    def failing(descriptor: int) -> None:
        if failures and ".seg" in os.readlink(f"/proc/self/fd/{descriptor}"):
            failures.pop()
            raise OSError(5, "Input/output error")
        sync(descriptor)

    monkeypatch.setattr(os, call, failing)
    written = 0
    for work in (batch(1, 2), batch(3, 3), batch(4, 6)):
        try:
            written += asyncio.run(segments.append(work))
        except OSError:
            written += asyncio.run(segments.append(work))
    data = folder.segment(0, 0, 1).read_bytes()
    assert data == replace(HEADER, sequence=1).pack() + batch(1, 6).data
    assert written == len(data)
    assert not failures


@pytest.mark.parametrize("call", ["fsync", "fdatasync"])
def test_what_others_have_seen_of_a_batch_stays_while_it_is_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """A later incarnation, on another machine, may have gone on from what never became durable."""
    folder, segments = segments_in(tmp_path)
    open_file = aiofiles.open

    def failing(descriptor: int) -> None:
        if ".seg" in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(5, "Input/output error")

    @asynccontextmanager
    async def full(path: Path, mode: str, **options: Any) -> AsyncIterator[Any]:
        async def refused(data: bytes) -> None:
            raise OSError(28, "No space left on device")

        async with open_file(path, mode, **options) as file:
            monkeypatch.setattr(file, "write", refused)
            yield file

    if call == "fdatasync":
        asyncio.run(segments.append(batch(1, 2)))
    with monkeypatch.context() as broken:
        broken.setattr(os, call, failing)
        with pytest.raises(OSError, match="Input/output"):
            asyncio.run(segments.append(batch(3, 4)))
    (path,) = (path for *_, path in folder.segments())
    seen = path.read_bytes()
    assert seen.endswith(batch(3, 4).data)
    with monkeypatch.context() as broken:
        broken.setattr(aiofiles, "open", full)
        with pytest.raises(OSError, match="No space"):
            asyncio.run(segments.append(batch(3, 4)))
    assert path.read_bytes() == seen
    asyncio.run(segments.append(batch(3, 4)))
    assert path.read_bytes() == seen


def test_nothing_of_a_dead_writers_torn_record_stays(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    create_run(folder, RUN_ID)
    torn = folder.segment(0, 0, 1)
    torn.parent.mkdir(parents=True)
    torn.write_bytes(replace(HEADER, sequence=1).pack() + batch(1, 9).data)
    asyncio.run(SegmentWriter(folder, HEADER, 256 << 20).append(batch(1, 2)))
    assert torn.read_bytes() == replace(HEADER, sequence=1).pack() + batch(1, 2).data


def test_a_long_segment_is_followed_by_another(tmp_path: Path) -> None:
    folder, _ = segments_in(tmp_path)
    segments = SegmentWriter(folder, HEADER, 300)
    for step in range(1, 7):
        asyncio.run(segments.append(batch(step, step)))
    assert [first for _, _, first, _ in folder.segments()] == [1, 4]


def test_segments_are_written_nowhere_but_in_the_run(tmp_path: Path) -> None:
    segments = SegmentWriter(RunFolder(tmp_path / "unmounted"), HEADER, 256 << 20)
    with pytest.raises(StorageError, match="bring the run folder back, or mount it"):
        asyncio.run(segments.append(batch(1, 1)))
    assert not (tmp_path / "unmounted").exists()
