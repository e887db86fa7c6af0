"""Reading a segment record by record, a piece of the file in memory at a time."""

from __future__ import annotations

import os
from array import array
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from lowdiff.errors import DamagedFile
from lowdiff.persistence.copying import checksum_of
from lowdiff.persistence.framing import (
    HEADER_BYTES,
    FileHeader,
    RecordHeader,
    RecordRef,
    padded,
)

#: Recovery of a run with many ranks holds one of each.
_PIECE_BYTES = 256 << 10
#: A longer body is checked a piece at a time before it is loaded: its length may be a stranger's.
_WHOLE_BYTES = 16 << 20
#: More than a machine stages; a file with holes may claim any length.
_MAX_BODY_BYTES = 1 << 38


class SegmentFile:
    """One segment. Read, not mapped: processes may map some 65,000 files, and runs have more.

    Every record that it hands out, and every one before, has passed its checksums. A record whose
    step is not above that of the one before it is none: there the file ends.
    """

    def __init__(self, path: Path) -> None:
        """Read the header.

        Raises:
            FileNotFoundError: If the file is not there.
            DamagedFile: If it cannot be read, or is no file of ours.
        """
        self.path = path
        self._piece, self._at = memoryview(b""), 0
        with _reading(path) as file:
            found = os.fstat(file.fileno())
            self.size, self.mtime_ns = found.st_size, found.st_mtime_ns
            self._piece = memoryview(file.read(min(_PIECE_BYTES, self.size)))
        self.header = FileHeader.unpack(self._piece, path)
        self._steps, self._offsets = array("q"), array("q")
        self._newest: RecordRef | None = None
        self._is_read = False
        #: Where the records read so far end.
        self.end = HEADER_BYTES

    def next(self) -> RecordRef | None:
        """The first record that was not read yet, or None at the end of the file.

        Raises:
            DamagedFile: If the file cannot be read, or the record does not fit in memory.
        """
        record = None if self._is_read else self._read(self.end)
        if record is None or (self._steps and record.header.step <= self._steps[-1]):
            self._is_read = True
            return None
        self._steps.append(record.header.step)
        self._offsets.append(record.offset)
        self._newest, self.end = record, record.end
        return record

    def damage(self) -> DamagedFile | None:
        """What lies behind its last record; None if nothing does."""
        while self.next() is not None:
            pass
        if self.end == self.size:
            return None
        what = f"{self.size - self.end} bytes are no record"
        return DamagedFile(self.path, what, offset=self.end)

    def record(self, step: int) -> RecordRef | None:
        """The record of a step, if the file holds it; cheap for ascending steps."""
        while (not self._steps or self._steps[-1] < step) and self.next() is not None:
            pass
        if self._newest is not None and self._newest.header.step == step:
            return self._newest
        index = bisect_left(self._steps, step)
        if index == len(self._steps) or self._steps[index] != step:
            return None
        return self._read(self._offsets[index])

    def _read(self, offset: int) -> RecordRef | None:
        head = self._bytes(offset, HEADER_BYTES)
        header = None if head is None else RecordHeader.unpack(head)
        if header is None or header.step >= 1 << 63 or not self.header.owns(header):
            return None
        start, size = offset + HEADER_BYTES, header.body_bytes
        if size > _MAX_BODY_BYTES:
            return None
        if size > _WHOLE_BYTES and self._checksum(start, size) != header.body_checksum:
            return None
        body = self._bytes(start, size)
        record = None if body is None else RecordRef(header, offset, body)
        return record if record is not None and record.is_intact() else None

    def _checksum(self, offset: int, size: int) -> int | None:
        """Of a part of the file, which is not kept; None if the file ends before."""
        if offset + size > self.size:
            return None
        with _reading(self.path) as file, suppress(EOFError):
            return checksum_of(file.fileno(), offset, size)
        return None

    def _bytes(self, offset: int, size: int) -> memoryview | None:
        """A part of the file; None if it ends before."""
        start = offset - self._at
        if start < 0 or start + size > len(self._piece):
            if offset + size > self.size:
                return None
            with _reading(self.path) as file:
                file.seek(offset)
                wanted = max(padded(size), min(_PIECE_BYTES, self.size - offset))
                self._piece, self._at = memoryview(file.read(wanted)), offset
            start = 0
        part = self._piece[start : start + size]
        return part if len(part) == size else None


@contextmanager
def _reading(path: Path) -> Iterator[IO[bytes]]:
    try:
        with path.open("rb") as file:
            yield file
    except FileNotFoundError:
        raise
    except OSError as error:
        raise DamagedFile(path, f"it cannot be read ({error})") from error
    except (MemoryError, OverflowError) as error:
        raise DamagedFile(path, "one of its records does not fit in memory") from error
