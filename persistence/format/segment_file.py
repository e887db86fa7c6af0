"""A segment as a file: read record by record, a piece in memory at a time, and sealed with a footer."""

from __future__ import annotations

import logging
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

from lowdiff.errors import DamagedFile
from lowdiff.persistence.files.checked_copy import checksum_of
from lowdiff.persistence.files.durable import write_at
from lowdiff.persistence.format.framing import (
    HEADER_BYTES,
    FileHeader,
    RecordHeader,
    RecordRef,
)

_logger = logging.getLogger(__name__)

_MAGIC = b"LDSEALED"
_TRAILER = struct.Struct("<QQQ28x8sI")
_TRAILER_BYTES = 64
assert _TRAILER.size == _TRAILER_BYTES

#: Recovery of a run with many ranks holds one of each.
_PIECE_BYTES = 256 << 10
#: A longer body is checked a piece at a time before it is loaded: its length may be a stranger's.
_WHOLE_BYTES = 16 << 20
#: More than a machine stages; a file with holes may claim any length.
_MAX_BODY_BYTES = 1 << 38


@dataclass(frozen=True, slots=True)
class Footer:
    """What a sealed segment ends with: it finds a step without the records before it.

    Attributes:
        offsets: Where the record of each step starts, in order of the steps.
        rebases: Steps that cannot be replayed, ascending.
        end: Where the records end, and the footer starts.
    """

    offsets: Sequence[int]
    rebases: Sequence[int]
    end: int

    def pack(self, header: FileHeader) -> bytes:
        """The footer as it stands in the segment of this header; its checksum covers both."""
        numbers = b"".join(np.array(n, "<u8").tobytes() for n in (self.offsets, self.rebases))
        trailer = _TRAILER.pack(len(self.offsets), len(self.rebases), self.end, _MAGIC, 0)
        body = numbers + trailer[:-4]
        return body + struct.pack("<I", crc32c(header.pack()[:-4] + body))


class SegmentFile:
    """One segment. Read, not mapped: processes may map some 65,000 files, and runs have more.

    Every record that it hands out has passed its checksums. Read in order, a record whose step is not
    above that of the one before it is none: there the file ends. In a sealed segment a single step is
    found by the footer, without what is before it.
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
            self.size = os.fstat(file.fileno()).st_size
            self._piece = memoryview(file.read(HEADER_BYTES))
        self.header = FileHeader.unpack(self._piece, path)
        self._steps, self._offsets, self._rebases = array("q"), array("q"), array("q")
        #: Whether the file ends within its footer: whoever sealed it was killed.
        self.is_cut_in_footer = False
        self._newest: RecordRef | None = None
        self._is_read = False
        #: Where the records read so far end; whoever has read some before may go on from there.
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
        if record.header.rebases:
            self._rebases.append(record.header.step)
        self._newest, self.end = record, record.end
        return record

    def damage(self) -> DamagedFile | None:
        """What lies behind its last record; None if nothing does, or a footer that is right."""
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
            what = "its footer is not that of its records, which can all be read"
        return DamagedFile(self.path, what, offset=self.end)

    def footer_to_write(self) -> bytes | None:
        """The footer of its records; None if these are not one unbroken sequence. Reads them all."""
        while self.next() is not None:
            pass
        first, steps = self.header.sequence, self._steps
        if not steps or steps[0] != first or steps[-1] != first + len(steps) - 1:
            return None
        return Footer(self._offsets, self._rebases, self.end).pack(self.header)

    def record(self, step: int) -> RecordRef | None:
        """The record of a step, if the file holds it; cheap for ascending steps, or once sealed."""
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
        """The footer that it ends with; None if it was not sealed, or its footer is damaged."""
        trailer = self._apart(self.size - _TRAILER_BYTES)
        if len(trailer) < _TRAILER_BYTES:
            return None
        num_steps, num_rebases, end, _, _ = _TRAILER.unpack(trailer)
        if not num_steps or end + 8 * (num_steps + num_rebases) + _TRAILER_BYTES != self.size:
            return None
        data = self._apart(end)
        if len(data) + end != self.size:  # its writer took back what it could not write
            return None
        numbers = array("Q", data[:-_TRAILER_BYTES])
        found = Footer(numbers[:num_steps], numbers[num_steps:], end)
        return found if found.pack(self.header) == data else None

    def _apart(self, offset: int) -> bytes:
        """The file from here on, without forgetting the piece in memory."""
        with _reading(self.path) as file:
            file.seek(max(0, offset))
            return file.read(self.size - offset)

    def _by_footer(self, step: int) -> RecordRef | None:
        """A record where the footer says that it is; None if that does not say, or is wrong."""
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
                wanted = max(size, min(_PIECE_BYTES, self.size - offset))
                self._piece, self._at = memoryview(file.read(wanted)), offset
            start = 0
        part = self._piece[start : start + size]
        return part if len(part) == size else None


def write_footer(path: Path, footer: bytes, end: int) -> bool:
    """Put a footer behind the records of a segment; whether that went well.

    A segment without one counts like any other, so trouble is not worth more than a line in the log.
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
        _logger.info("%s is not sealed: %s", path, error)
        return False
    return True


def seal_left(path: Path, owner: tuple[str, int, int]) -> bool:
    """Seal a segment whose writer died before it could, unless anything else is wrong with it.

    Bytes that are no piece of its footer stay: they may be records behind a damaged one.

    Args:
        path: The segment, which no other process writes to.
        owner: Run, incarnation and rank that it must be of.

    Returns:
        Whether it was sealed now.
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
    """Fsync a segment that somebody else has written, whose own fsync may have failed.

    When bytes do not reach the disk, Linux says so once, and takes their pages for clean from then
    on: the next fsync, in whichever process, writes nothing and succeeds. So what may have met that
    is written once more first, in its place.

    Args:
        path: The segment. Nobody is adding to it.
        header: Its header.
        doubtful: Those of its records of which nobody knows that they are durable. They passed
            their checksums and are in memory: mapped pages could change when they are read again.
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
