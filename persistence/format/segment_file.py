"""A segment file: read record by record, with one piece in memory, and sealed with a footer."""

from __future__ import annotations

import os
import struct
from array import array
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import IO

import numpy as np
from crc32c import crc32c

from lowdiff.core.events import inform
from lowdiff.errors import DamagedFile
from lowdiff.persistence.files.checked_copy import checksum_of
from lowdiff.persistence.files.durable import write_at
from lowdiff.persistence.format.framing import (
    HEADER_BYTES,
    FileHeader,
    RecordHeader,
    RecordRef,
)

_MAGIC = b"LDSEALED"
_TRAILER = struct.Struct("<QQQ28x8sI")
_TRAILER_BYTES = 64
assert _TRAILER.size == _TRAILER_BYTES

#: Bytes read at a time. Recovery of a run with many ranks holds one piece per rank.
_PIECE_BYTES = 256 << 10
#: A longer body is checked piece by piece before it is loaded, because its length may be wrong.
_WHOLE_BYTES = 16 << 20
#: Longest body: more than a machine can stage. A sparse file may claim any length.
_MAX_BODY_BYTES = 1 << 38


@dataclass(frozen=True, slots=True)
class Footer:
    """Footer of a sealed segment: finds a step's record without reading the records before it.

    Attributes:
        offsets: Offset of each step's record, in order of the steps.
        rebases: Steps that cannot be replayed, ascending.
        end: Offset at which the records end and the footer starts.
    """

    offsets: Sequence[int]
    rebases: Sequence[int]
    end: int

    def pack(self, header: FileHeader) -> bytes:
        """Return the footer's bytes for a segment of this header; the checksum covers both."""
        numbers = b"".join(np.array(n, "<u8").tobytes() for n in (self.offsets, self.rebases))
        trailer = _TRAILER.pack(len(self.offsets), len(self.rebases), self.end, _MAGIC, 0)
        body = numbers + trailer[:-4]
        return body + struct.pack("<I", crc32c(header.pack()[:-4] + body))


class SegmentFile:
    """One segment. It is read, not mapped: a process may map some 65,000 files, and runs have more.

    Every returned record has passed its checksums. Reading in order ends at a record whose step is
    not above the step before. In a sealed segment, the footer finds a single step without reading
    the records before it.
    """

    def __init__(self, path: Path) -> None:
        """Read the header.

        Raises:
            FileNotFoundError: If the file is not there.
            DamagedFile: If the file cannot be read, or is no segment.
        """
        self.path = path
        self._piece, self._at = memoryview(b""), 0
        with _reading(path) as file:
            self.size = os.fstat(file.fileno()).st_size
            self._piece = memoryview(file.read(HEADER_BYTES))
        self.header = FileHeader.unpack(self._piece, path)
        self._steps, self._offsets, self._rebases = array("q"), array("q"), array("q")
        #: Whether the file ends inside its footer, because the sealing process was killed.
        self.is_cut_in_footer = False
        self._newest: RecordRef | None = None
        self._is_read = False
        #: Offset at which the records read so far end. A reader of a growing file continues here.
        self.end = HEADER_BYTES

    def next(self) -> RecordRef | None:
        """Return the first record that was not read yet, or None at the end of the file.

        Raises:
            DamagedFile: If the file cannot be read, or the record does not fit in memory.
        """
        record = None if self._is_read else self._read(self.end)
        if record is None or (self._steps and record.header.step <= self._steps[-1]):
            self._is_read = True
            return None
        self._steps.append(record.header.step)
        self._offsets.append(record.offset)
        if record.header.rebases:
            self._rebases.append(record.header.step)
        self._newest, self.end = record, record.end
        return record

    def damage(self) -> DamagedFile | None:
        """Describe what follows the last record; None for nothing, or for the right footer."""
        while self.next() is not None:
            pass
        rest = self.size - self.end
        if rest == 0:
            return None
        what, footer = f"{rest} bytes are no record", self.footer_to_write() or b""
        begins = bytes(self._bytes(self.end, min(rest, len(footer))) or b"")
        if footer and footer.startswith(begins):
            if rest == len(footer):
                return None
            self.is_cut_in_footer = rest < len(footer)
            what = "its footer is cut short" if self.is_cut_in_footer else what
        elif self.footer is not None:
            what = "its footer lists other records than can be read before it"
        return DamagedFile(self.path, what, offset=self.end)

    def footer_to_write(self) -> bytes | None:
        """Return the footer of the records; None if their steps have a gap. Reads all records."""
        while self.next() is not None:
            pass
        first, steps = self.header.sequence, self._steps
        if not steps or steps[0] != first or steps[-1] != first + len(steps) - 1:
            return None
        return Footer(self._offsets, self._rebases, self.end).pack(self.header)

    def record(self, step: int) -> RecordRef | None:
        """Return a step's record, if it is in the file; cheap for ascending steps and if sealed."""
        if self._newest is not None and self._newest.header.step == step:
            return self._newest
        read_to = self._steps[-1] if self._steps else self.header.sequence - 1
        if step > read_to + 1:
            found = self._by_footer(step)
            if found is not None:
                return found
        while (not self._steps or self._steps[-1] < step) and self.next() is not None:
            pass
        if self._newest is not None and self._newest.header.step == step:
            return self._newest
        index = bisect_left(self._steps, step)
        if index == len(self._steps) or self._steps[index] != step:
            return None
        return self._read(self._offsets[index])

    @cached_property
    def footer(self) -> Footer | None:
        """Return the footer; None if the segment was not sealed, or if its footer is damaged."""
        trailer = self._apart(self.size - _TRAILER_BYTES)
        if len(trailer) < _TRAILER_BYTES:
            return None
        num_steps, num_rebases, end, _, _ = _TRAILER.unpack(trailer)
        if not num_steps or end + 8 * (num_steps + num_rebases) + _TRAILER_BYTES != self.size:
            return None
        data = self._apart(end)
        if len(data) + end != self.size:  # the writer truncated a batch that it could not write
            return None
        numbers = array("Q", data[:-_TRAILER_BYTES])
        found = Footer(numbers[:num_steps], numbers[num_steps:], end)
        return found if found.pack(self.header) == data else None

    def _apart(self, offset: int) -> bytes:
        """Return the rest of the file from an offset on, and keep the piece in memory."""
        with _reading(self.path) as file:
            file.seek(max(0, offset))
            return file.read(self.size - offset)

    def _by_footer(self, step: int) -> RecordRef | None:
        """Return the record where the footer places it; None if the footer lacks it or is wrong."""
        footer, index = self.footer, step - self.header.sequence
        if footer is None or not 0 <= index < len(footer.offsets):
            return None
        found = self._read(footer.offsets[index]) if footer.offsets[index] < footer.end else None
        if found is None or found.header.step != step:
            return None
        self._newest = found
        return found

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
        """Return the checksum of a part of the file, read in pieces; None if the file ends before."""
        if offset + size > self.size:
            return None
        with _reading(self.path) as file, suppress(EOFError):
            return checksum_of(file.fileno(), offset, size)
        return None

    def _bytes(self, offset: int, size: int) -> memoryview | None:
        """Return a part of the file; None if the file ends before."""
        start = offset - self._at
        if start < 0 or start + size > len(self._piece):
            if offset + size > self.size:
                return None
            with _reading(self.path) as file:
                file.seek(offset)
                wanted = max(size, min(_PIECE_BYTES, self.size - offset))
                self._piece, self._at = memoryview(file.read(wanted)), offset
            start = 0
        part = self._piece[start : start + size]
        return part if len(part) == size else None


def write_footer(path: Path, footer: bytes, end: int) -> bool:
    """Append a footer to a segment's records; return whether this succeeded.

    A segment without a footer is valid, so a failure is only logged.
    """
    try:
        with path.open("r+b", buffering=0) as file:
            try:
                write_at(file.fileno(), end, footer)
                os.fdatasync(file.fileno())
            except OSError:
                with suppress(OSError):
                    file.truncate(end)
                raise
    except OSError as error:
        inform(f"{path} is not sealed: {error}")
        return False
    return True


def seal_left(path: Path, owner: tuple[str, int, int]) -> bool:
    """Seal a segment whose writer died before sealing it, unless the segment is damaged.

    Bytes that are not the beginning of its footer stay: they may be records after a damaged one.

    Args:
        path: The segment; no other process writes to it.
        owner: Run, incarnation and rank that the segment must have.

    Returns:
        Whether the segment was sealed now.
    """
    try:
        file = SegmentFile(path)
        if file.header.owner != owner or file.footer is not None:
            return False
        damage, footer = file.damage(), file.footer_to_write()
    except (DamagedFile, FileNotFoundError):
        return False
    if footer is None or (damage is not None and not file.is_cut_in_footer):
        return False
    return write_footer(path, footer, file.end)


def make_durable(path: Path, header: FileHeader, doubtful: Sequence[RecordRef]) -> None:
    """Fsync a segment that another process wrote and whose own fsync may have failed.

    When bytes do not reach the disk, Linux reports this once and then takes their pages for clean.
    The next fsync, in any process, writes nothing and succeeds. Records that such a failure may
    have hit are therefore first written again, in place.

    Args:
        path: The segment; no process appends to it.
        header: Header of the segment.
        doubtful: Records that may not be durable. They passed their checksums and are in memory:
            mapped pages could change when they are read again.
    """
    descriptor = os.open(path, os.O_RDWR if doubtful else os.O_RDONLY)
    try:
        if doubtful:
            write_at(descriptor, 0, header.pack())
        for record in doubtful:
            write_at(descriptor, record.offset, record.header.pack() + record.body)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


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
