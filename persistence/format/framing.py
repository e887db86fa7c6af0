"""Framing of staging chunks and segments: one file header, then framed records.

``docs/format.md`` specifies every field. A record counts only if both of its checksums hold and its
identity (incarnation, rank, lap) is that of the file. A torn tail, or a stale record of a reused
chunk, is therefore simply the end of the file.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from crc32c import crc32c

from lowdiff.errors import DamagedFile, OtherFormat

FORMAT_VERSION = 4
HEADER_BYTES = 64

_FILE = struct.Struct("<8sHHIIIQ16s12xI")
_FILE_MAGIC = b"LOWDIFF\n"
_RECORD = struct.Struct("<4sIHHIQIIQIIQ8x")
RECORD_MAGIC = b"LDRC"
assert _FILE.size == _RECORD.size == HEADER_BYTES


class FileKind(IntEnum):
    """Kind of a framed file."""

    CHUNK = 1
    SEGMENT = 2


class RecordKind(IntEnum):
    """Kind of a record's body."""

    DIFFERENTIAL = 1
    #: First record of an incarnation: names the residual slot that the incarnation starts from.
    BASE = 2


_KINDS = frozenset(map(int, RecordKind))


@dataclass(frozen=True, slots=True)
class FileHeader:
    """The first 64 bytes of a chunk or segment.

    Attributes:
        sequence: Lap of a staging chunk; first step of a segment.
    """

    kind: FileKind
    run_id: str
    incarnation: int
    rank: int
    world_size: int
    sequence: int

    @property
    def owner(self) -> tuple[str, int, int]:
        """Return run, incarnation and rank of the file."""
        return self.run_id, self.incarnation, self.rank

    def owns(self, record: RecordHeader) -> bool:
        """Return whether a record's header has the identity of this file."""
        identity = (record.incarnation, record.rank, record.world_size)
        return (
            padded(record.meta_bytes) <= record.body_bytes
            and identity == (self.incarnation, self.rank, self.world_size)
            and (self.kind is not FileKind.CHUNK or record.lap == self.sequence)
        )

    def pack(self) -> bytes:
        """Return 64 bytes; the last four are a CRC-32C over the others."""
        head = _FILE.pack(
            _FILE_MAGIC,
            FORMAT_VERSION,
            self.kind,
            self.incarnation,
            self.rank,
            self.world_size,
            self.sequence,
            bytes.fromhex(self.run_id),
            0,
        )
        return head[:-4] + struct.pack("<I", crc32c(head[:-4]))

    @classmethod
    def unpack(cls, data: bytes | memoryview, path: Path) -> FileHeader:
        """Parse and check a header.

        Raises:
            DamagedFile: If the bytes are not a header of lowdiff.
            OtherFormat: If a lowdiff of another format version wrote the file.
        """
        if len(data) < HEADER_BYTES:
            raise DamagedFile(path, f"{len(data)} bytes are too few for a header", offset=0)
        head = bytes(data[:HEADER_BYTES])
        magic, version, kind, incarnation, rank, world_size, sequence, run_id, crc = _FILE.unpack(
            head
        )
        if magic != _FILE_MAGIC or crc != crc32c(head[:-4]):
            raise DamagedFile(path, "the file header fails its checksum", offset=0)
        if version != FORMAT_VERSION:
            raise OtherFormat(path, version, FORMAT_VERSION)
        if kind not in (FileKind.CHUNK, FileKind.SEGMENT):
            raise DamagedFile(path, f"unknown file kind {kind}", offset=0)
        return cls(FileKind(kind), run_id.hex(), incarnation, rank, world_size, sequence)


@dataclass(frozen=True, slots=True)
class RecordHeader:
    """The 64 bytes before a record's body.

    Attributes:
        coded: True when the sections are compressed, as in segments.
        meta_bytes: Stored length of the body's last part, the differential's scalars, without
            padding.
        body_bytes: Length of the whole body, a multiple of 8.
        lap: Sequence of the staging chunk that the record was written to.
        rebases: True when the step cannot be replayed, because something other than the optimizer
            changed the state; only a snapshot leads to this step.
        meta_coded: True when the scalars are compressed.
    """

    kind: RecordKind
    coded: bool
    meta_bytes: int
    body_bytes: int
    body_checksum: int
    step: int
    incarnation: int
    rank: int
    world_size: int
    lap: int
    rebases: bool = False
    meta_coded: bool = False

    def pack(self) -> bytes:
        """Return 64 bytes; the CRC-32C covers everything after itself."""
        head = _RECORD.pack(
            RECORD_MAGIC,
            0,
            self.kind,
            self.coded | self.rebases << 1 | self.meta_coded << 2,
            self.meta_bytes,
            self.body_bytes,
            self.body_checksum,
            self.world_size,
            self.step,
            self.incarnation,
            self.rank,
            self.lap,
        )
        return head[:4] + struct.pack("<I", crc32c(head[8:])) + head[8:]

    @classmethod
    def unpack(cls, data: bytes | memoryview) -> RecordHeader | None:
        """Parse 64 bytes; None if they are no record header."""
        head = bytes(data)
        if len(head) < HEADER_BYTES:
            return None
        magic, crc, kind, flags, meta, body, body_crc, world, step, incarnation, rank, lap = (
            _RECORD.unpack(head)
        )
        if magic != RECORD_MAGIC or crc != crc32c(head[8:]) or kind not in _KINDS:
            return None
        return cls(
            kind=RecordKind(kind),
            coded=bool(flags & 1),
            meta_bytes=meta,
            body_bytes=body,
            body_checksum=body_crc,
            step=step,
            incarnation=incarnation,
            rank=rank,
            world_size=world,
            lap=lap,
            rebases=bool(flags & 2),
            meta_coded=bool(flags & 4),
        )


@dataclass(frozen=True, slots=True)
class RecordRef:
    """A record inside a mapped file.

    Attributes:
        offset: Offset of the record's header in the file.
        body: View of the body; valid as long as its mapping.
    """

    header: RecordHeader
    offset: int
    body: memoryview

    @property
    def meta(self) -> memoryview:
        """Return the encoded scalars."""
        start = len(self.sections)
        return self.body[start : start + self.header.meta_bytes]

    @property
    def sections(self) -> memoryview:
        """Return the encoded payload sections."""
        return self.body[: len(self.body) - padded(self.header.meta_bytes)]

    @property
    def end(self) -> int:
        """Return the offset of the next record in the file."""
        return self.offset + HEADER_BYTES + self.header.body_bytes

    def is_intact(self) -> bool:
        """Return whether the body has its checksum; reads the whole body."""
        return crc32c(self.body) == self.header.body_checksum


@dataclass(frozen=True, slots=True, eq=False)
class StoredRecord:
    """A differential and the file that holds it.

    Attributes:
        record: The differential.
        path: The file.
        may_change: Whether a live trainer may write something else to its place at any moment.
    """

    record: RecordRef
    path: Path
    may_change: bool

    @property
    def framed_bytes(self) -> int:
        """Return the record's length in the file."""
        return HEADER_BYTES + self.record.header.body_bytes


def padded(size: int) -> int:
    """Return ``size`` rounded up to 8, the alignment of records and sections."""
    return size + (-size % 8)


def listed_record(view: memoryview, offset: int, file: FileHeader) -> RecordRef | None:
    """Return the record that the header at ``offset`` announces; None without a header of this file."""
    header = RecordHeader.unpack(view[offset : offset + HEADER_BYTES])
    if header is None or not file.owns(header):
        return None
    start = offset + HEADER_BYTES
    body = view[start : start + header.body_bytes]
    return None if len(body) < header.body_bytes else RecordRef(header, offset, body)


def read_record(view: memoryview, offset: int, file: FileHeader) -> RecordRef | None:
    """Return the record at ``offset``, or None if no valid record of this file starts there."""
    record = listed_record(view, offset, file)
    return record if record is not None and record.is_intact() else None


def read_records(
    view: memoryview, file: FileHeader, *, check: bool = True, past_damage: bool = False
) -> Iterator[RecordRef]:
    """Yield every valid record from the start of a file up to the first place without one.

    Args:
        view: The file.
        file: Header of the file.
        check: Whether to compare bodies with their checksums, too.
        past_damage: Whether to skip a record whose body fails its checksum instead of ending there.
            Its header has a checksum of its own and says where the next record begins.
    """
    offset = HEADER_BYTES
    while (record := listed_record(view, offset, file)) is not None:
        if not check or record.is_intact():
            yield record
        elif not past_damage:
            return
        offset = record.end


def sound_end(view: memoryview, file: FileHeader) -> int:
    """Return the offset at which the valid records from the start of a file end."""
    return max((record.end for record in read_records(view, file)), default=HEADER_BYTES)
