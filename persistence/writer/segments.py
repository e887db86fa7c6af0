"""Append to a run's segments, and find where a dead writer stopped."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import aiofiles
from aiofiles.threadpool.binary import AsyncBufferedReader
from crc32c import crc32c

from lowdiff.core.events import Code
from lowdiff.errors import DamagedFile, LowDiffError
from lowdiff.persistence.files.durable import fsync_directory, make_directory
from lowdiff.persistence.files.paths import RunFolder
from lowdiff.persistence.format.codec import Codec
from lowdiff.persistence.format.framing import HEADER_BYTES, FileHeader, RecordRef, padded
from lowdiff.persistence.format.sections import encode_sections, read_sections
from lowdiff.persistence.format.segment_file import (
    Footer,
    SegmentFile,
    make_durable,
    seal_left,
    write_footer,
)
from lowdiff.persistence.run.fences import require_run


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Encoded records that are written and fsynced together.

    Attributes:
        sizes: Bytes of each step's record.
        rebases: Steps in the batch that only a snapshot leads to, ascending.
    """

    data: bytes
    first: int
    last: int
    sizes: tuple[int, ...]
    rebases: tuple[int, ...] = ()


class SegmentWriter:
    """Appends batches to segments of one rank; never to a file that another process has written.

    Args:
        folder: The run folder.
        header: Header of its segments; the first step is filled in for each segment.
        max_bytes: Size after which a segment is sealed.
    """

    def __init__(self, folder: RunFolder, header: FileHeader, max_bytes: int) -> None:
        self._folder = folder
        self._header = header
        self._max_bytes = max_bytes
        self._began = 0.0
        self._path: Path | None = None
        self._size = 0
        self._first = self._last = -1
        self._offsets = array("Q")
        self._rebases: list[int] = []

    async def append(self, batch: Batch) -> int:
        """Write and fsync one batch; after a failure, the same batch can be passed again."""
        await asyncio.to_thread(require_run, self._folder, self._header.run_id)
        if batch.first != self._last + 1:
            # Steps of a segment ascend by one; here, some were dropped while storage was slow.
            await self.seal()
        if self._path is not None and not self._path.exists():
            self._path = None  # the run went back, and retention removed this incarnation's steps
        if self._path is None:
            path = self._folder.segment(self._header.incarnation, self._header.rank, batch.first)
            data = replace(self._header, sequence=batch.first).pack() + batch.data
            await asyncio.to_thread(make_directory, path.parent)
            # A file of this name can only hold a dead writer's torn first record.
            async with aiofiles.open(path, "r+b", opener=_created) as file:
                await _put_at_end(file, 0, data)
                await asyncio.to_thread(os.fsync, file.fileno())
            await asyncio.to_thread(fsync_directory, path.parent)
            self._path, self._size = path, len(data)
            self._first, self._offsets, self._rebases = batch.first, array("Q"), []
            self._began = time.monotonic()
            self._remember(batch, HEADER_BYTES)
            return self._size
        async with aiofiles.open(self._path, "r+b") as file:
            await _put_at_end(file, self._size, batch.data)
            await asyncio.to_thread(os.fdatasync, file.fileno())
        self._remember(batch, self._size)
        self._size += len(batch.data)
        if self._size > self._max_bytes:
            await self.seal()
        return len(batch.data)

    @property
    def age_seconds(self) -> float | None:
        """Return the age of the oldest unsealed content; None if there is none."""
        return None if self._path is None else time.monotonic() - self._began

    def _remember(self, batch: Batch, offset: int) -> None:
        """Remember the footer's entries for a durable batch."""
        for size in batch.sizes:
            self._offsets.append(offset)
            offset += size
        self._last = batch.last
        self._rebases += batch.rebases

    async def seal(self) -> None:
        """Seal the segment, which is not changed any more; the next batch starts a new one."""
        if self._path is not None:
            await asyncio.to_thread(self._put_footer, self._path)
        self._path = None

    def _put_footer(self, path: Path) -> None:
        header = replace(self._header, sequence=self._first)
        footer = Footer(self._offsets, self._rebases, self._size).pack(header)
        # The run went back and retention removed the segment, or the folder holds another run now.
        with contextlib.suppress(OSError, LowDiffError):
            require_run(self._folder, header.run_id)
            # Otherwise a failed attempt left whole records, which other processes may have seen.
            if path.stat().st_size == self._size:
                write_footer(path, footer, self._size)


def _created(path: str, flags: int) -> int:
    """Open a file as it is, or create an empty one."""
    return os.open(path, flags | os.O_CREAT, 0o666)


async def _put_at_end(file: AsyncBufferedReader, offset: int, data: bytes) -> None:
    """Write data as the rest of a file, from an offset on.

    A failed attempt may have left a beginning of the same data, or all of it. It is overwritten and
    not truncated, because a later incarnation on another machine may have continued from there.
    """
    await file.seek(offset)
    await file.write(data)
    await file.truncate()
    await file.flush()


def coded_record(record: RecordRef, codec: Codec) -> bytes:
    """Return a staged record in the form of a segment."""
    header = record.header
    sections = encode_sections(read_sections(record.sections, codec, coded=False), codec)
    frame = codec.shrink(record.meta)
    meta = bytes(record.meta) if frame is None else frame
    body = sections + meta.ljust(padded(len(meta)), b"\0")
    coded = replace(
        header,
        coded=True,
        meta_coded=frame is not None,
        meta_bytes=len(meta),
        body_bytes=len(body),
        body_checksum=crc32c(body),
        lap=0,
    )
    return coded.pack() + body


def batches_of(records: Sequence[RecordRef], codec: Codec) -> list[Batch]:
    """Encode records in batches of consecutive steps, without records that were overwritten."""
    runs: list[list[RecordRef]] = []
    for record in records:
        # Copy before checking: while storage is slow, a trainer may overwrite staged records.
        own = replace(record, body=memoryview(bytes(record.body)))
        step = own.header.step
        if not own.is_intact():
            Code.STEP_OVERWRITTEN.warn(f"step {step} was dropped before it was durable")
        elif runs and runs[-1][-1].header.step + 1 == step:
            runs[-1].append(own)
        else:
            runs.append([own])
    coded = ((run, [coded_record(record, codec) for record in run]) for run in runs)
    return [
        Batch(
            b"".join(records),
            run[0].header.step,
            run[-1].header.step,
            tuple(map(len, records)),
            _rebases(run),
        )
        for run, records in coded
    ]


def durable_step(
    folder: RunFolder,
    run_id: str,
    incarnation: int,
    rank: int,
    base_step: int,
    known_step: int = -1,
) -> int:
    """Return the last step of one rank's records in segments, or ``base_step``.

    The step is durable on return. A killed writer, or one whose fsync failed, may have left its
    last batch in the page cache only. If the fsync here fails as well, the result is the last step
    that the writer knew to be durable, and later steps must be written elsewhere. The segment is
    sealed.

    Args:
        folder: The run folder.
        run_id: Identity of the run.
        incarnation: Incarnation of the records.
        rank: Rank of the records.
        base_step: Step that the records begin from.
        known_step: Last step that the writer knew to be durable.

    Raises:
        StorageError: If the folder holds no run.
        RunMismatch: If the folder holds another run.
    """
    require_run(folder, run_id)
    own = [p for number, *_, p in folder.segments(lambda r: r == rank) if number == incarnation]
    for path in reversed(own):
        try:
            file = SegmentFile(path)
        except (DamagedFile, FileNotFoundError):
            continue  # a dead writer's torn first record, or a removal by a live run's retention
        doubtful, step = list[RecordRef](), base_step
        while (record := file.next()) is not None:
            step = record.header.step
            if step > known_step:
                doubtful.append(record)
        if file.end > HEADER_BYTES:
            break
    else:
        return base_step
    try:
        make_durable(path, file.header, doubtful)
        fsync_directory(path.parent)
    except OSError as error:
        Code.SEGMENT_NOT_DURABLE.warn(f"{path} cannot be made durable: {error}")
        return max(base_step, min(step, known_step))
    seal_left(path, file.header.owner)
    return step


def _rebases(records: Sequence[RecordRef]) -> tuple[int, ...]:
    return tuple(record.header.step for record in records if record.header.rebases)
