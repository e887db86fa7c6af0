"""Every byte of a framed file counts: what is read back is what was written, or less of it."""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
from crc32c import crc32c
from hypothesis import given
from hypothesis import strategies as st

from lowdiff.errors import DamagedFile, OtherFormat
from lowdiff.persistence.format.framing import (
    FORMAT_VERSION,
    HEADER_BYTES,
    FileHeader,
    FileKind,
    RecordHeader,
    RecordKind,
    RecordRef,
    padded,
    read_record,
    read_records,
)

PATH = Path("some.file")
RUN_ID = "00112233445566778899aabbccddeeff"
CHUNK = FileHeader(FileKind.CHUNK, RUN_ID, incarnation=2, rank=1, world_size=3, sequence=7)
SEGMENT = dataclasses.replace(CHUNK, kind=FileKind.SEGMENT, sequence=100)

u32 = st.integers(0, 2**32 - 1)
u64 = st.integers(0, 2**64 - 1)
file_headers = st.builds(
    FileHeader,
    st.sampled_from(FileKind),
    st.binary(min_size=16, max_size=16).map(bytes.hex),
    incarnation=u32,
    rank=u32,
    world_size=u32,
    sequence=u64,
)
record_headers = st.builds(
    RecordHeader,
    kind=st.sampled_from(RecordKind),
    coded=st.booleans(),
    meta_bytes=u32,
    body_bytes=u64,
    body_checksum=u32,
    step=u64,
    incarnation=u32,
    rank=u32,
    world_size=u32,
    lap=u64,
    rebases=st.booleans(),
    meta_coded=st.booleans(),
)


def header_of(file: FileHeader, step: int, body: bytes, meta_bytes: int) -> RecordHeader:
    in_chunk = file.kind is FileKind.CHUNK
    return RecordHeader(
        kind=RecordKind.DIFFERENTIAL,
        coded=not in_chunk,
        meta_bytes=meta_bytes,
        body_bytes=len(body),
        body_checksum=crc32c(body),
        step=step,
        incarnation=file.incarnation,
        rank=file.rank,
        world_size=file.world_size,
        lap=file.sequence if in_chunk else 0,
    )


def record(file: FileHeader, step: int, meta: bytes, sections: bytes = b"") -> bytes:
    body = sections + meta.ljust(padded(len(meta)), b"\0")
    return header_of(file, step, body, len(meta)).pack() + body


def framed(file: FileHeader, *records: bytes) -> bytes:
    return file.pack() + b"".join(records)


def contents(data: bytes) -> list[tuple[int, bytes, bytes]]:
    """Step, meta and sections of what a reader finds."""
    header = FileHeader.unpack(data, PATH)
    return [
        (r.header.step, bytes(r.meta), bytes(r.sections))
        for r in read_records(memoryview(data), header)
    ]


# Golden bytes


def test_the_bytes_of_a_file_header_are_pinned() -> None:
    assert CHUNK.pack().hex(" ", 4) == (
        "4c4f5744 4946460a"  # "LOWDIFF\n"
        " 04000100"  # format version, file kind
        " 02000000 01000000 03000000"  # incarnation, rank, world size
        " 07000000 00000000"  # sequence
        " 00112233 44556677 8899aabb ccddeeff"  # run id
        " 00000000 00000000 00000000"  # reserved
        " 17c490f9"  # CRC-32C of the 60 bytes before
    )


def test_the_bytes_of_a_record_header_are_pinned() -> None:
    header = RecordHeader(
        kind=RecordKind.DIFFERENTIAL,
        coded=True,
        meta_bytes=5,
        body_bytes=40,
        body_checksum=0xA1B2C3D4,
        step=101,
        incarnation=2,
        rank=1,
        world_size=3,
        lap=7,
    )
    assert header.pack().hex(" ", 4) == (
        "4c445243"  # "LDRC"
        " c1a7fd92"  # CRC-32C of the 56 bytes after
        " 01000100"  # record kind, coded
        " 05000000"  # meta bytes
        " 28000000 00000000"  # body bytes
        " d4c3b2a1"  # CRC-32C of the body
        " 03000000"  # world size
        " 65000000 00000000"  # step
        " 02000000 01000000"  # incarnation, rank
        " 07000000 00000000"  # lap
        " 00000000 00000000"  # reserved
    )


def test_numbers_of_kinds_and_the_version_are_pinned() -> None:
    assert {kind.name: kind.value for kind in FileKind} == {"CHUNK": 1, "SEGMENT": 2}
    assert {kind.name: kind.value for kind in RecordKind} == {"DIFFERENTIAL": 1, "BASE": 2}
    assert (FORMAT_VERSION, HEADER_BYTES) == (4, 64)


@given(file_headers)
def test_any_file_header_comes_back(header: FileHeader) -> None:
    assert FileHeader.unpack(header.pack(), PATH) == header


@given(record_headers)
def test_any_record_header_comes_back(header: RecordHeader) -> None:
    assert RecordHeader.unpack(header.pack()) == header


# Records in files


RECORDS = [(101, b"one"), (102, b""), (103, b"threefold")]


def sample(file: FileHeader) -> tuple[bytes, list[int]]:
    """A file of three records, and where each of them ends."""
    parts = [
        record(file, step, meta, bytes(range(8 * i))) for i, (step, meta) in enumerate(RECORDS)
    ]
    data = framed(file, *parts)
    ends = [HEADER_BYTES + sum(map(len, parts[: i + 1])) for i in range(len(parts))]
    # A chunk is preallocated; a segment ends with its last record.
    return data + bytes(96 if file.kind is FileKind.CHUNK else 0), ends


@pytest.fixture(params=[CHUNK, SEGMENT], ids=["chunk", "segment"])
def file(request: pytest.FixtureRequest) -> FileHeader:
    header: FileHeader = request.param
    return header


def test_records_come_back_in_order_with_their_padding_removed(file: FileHeader) -> None:
    data, ends = sample(file)
    assert contents(data) == [
        (101, b"one", b""),
        (102, b"", bytes(range(8))),
        (103, b"threefold", bytes(range(16))),
    ]
    found = list(read_records(memoryview(data), file))
    assert [r.end for r in found] == ends
    assert [r.offset % 8 for r in found] == [0, 0, 0]


def test_every_truncation_leaves_the_whole_records_before_the_cut(file: FileHeader) -> None:
    data, ends = sample(file)
    whole = contents(data)
    for length in range(HEADER_BYTES, len(data)):
        assert contents(data[:length]) == whole[: sum(end <= length for end in ends)]


def test_a_file_shorter_than_its_header_is_damaged(file: FileHeader) -> None:
    data, _ = sample(file)
    for length in range(HEADER_BYTES):
        with pytest.raises(DamagedFile, match="too few") as caught:
            contents(data[:length])
        assert caught.value.path == PATH


def flips(data: bytes, start: int, stop: int) -> Iterator[tuple[int, bytes]]:
    for position in range(start, stop):
        for mask in (1, 2, 4, 8, 16, 32, 64, 128, 255):
            changed = bytearray(data)
            changed[position] ^= mask
            yield position, bytes(changed)


def test_every_flip_in_a_record_ends_the_file_right_before_that_record(file: FileHeader) -> None:
    data, ends = sample(file)
    whole = contents(data)
    for position, changed in flips(data, HEADER_BYTES, ends[-1]):
        assert contents(changed) == whole[: sum(end <= position for end in ends)], position


def test_every_flip_after_the_last_record_changes_nothing() -> None:
    data, ends = sample(CHUNK)
    for position, changed in flips(data, ends[-1], len(data)):
        assert contents(changed) == contents(data), position


def test_every_flip_in_the_file_header_is_damage_and_never_a_later_format(
    file: FileHeader,
) -> None:
    data, _ = sample(file)
    for _, changed in flips(data, 0, HEADER_BYTES):
        with pytest.raises(DamagedFile, match="file header fails its checksum"):
            contents(changed)


@given(st.binary(max_size=300), st.booleans())
def test_noise_is_damage_or_holds_no_record(noise: bytes, after_a_header: bool) -> None:
    if after_a_header:
        assert contents(CHUNK.pack() + noise) == []
    else:
        with pytest.raises(DamagedFile):
            contents(noise)


# What a header may not say


def resealed(header: bytes, offset: int, value: bytes) -> bytes:
    """A file header with other content under a good checksum."""
    head = header[:offset] + value + header[offset + len(value) :]
    return head[:60] + struct.pack("<I", crc32c(head[:60]))


@pytest.mark.parametrize("version", [0, 1, 3, 5, 65535])
def test_another_version_is_named_with_what_this_one_reads(version: int) -> None:
    with pytest.raises(OtherFormat, match=f"version {version}, .*version 4 only") as caught:
        FileHeader.unpack(resealed(CHUNK.pack(), 8, struct.pack("<H", version)), PATH)
    assert caught.value.found == version
    assert "recover with the lowdiff that wrote it, or start a new run folder" in str(caught.value)


@pytest.mark.parametrize("kind", [0, 3, 65535])
def test_an_unknown_kind_of_file_is_damage(kind: int) -> None:
    with pytest.raises(DamagedFile, match="unknown file kind"):
        FileHeader.unpack(resealed(CHUNK.pack(), 10, struct.pack("<H", kind)), PATH)


def test_an_unknown_kind_of_record_ends_the_file(file: FileHeader) -> None:
    good = record(file, 1, b"")
    for kind in (0, 6, 65535):
        head = good[:8] + struct.pack("<H", kind) + good[10:64]
        sealed = head[:4] + struct.pack("<I", crc32c(head[8:])) + head[8:]
        assert contents(framed(file, sealed)) == []


@pytest.mark.parametrize("field", ["incarnation", "rank", "world_size"])
def test_a_record_of_another_file_ends_the_file_although_its_checksums_hold(
    file: FileHeader, field: str
) -> None:
    other = dataclasses.replace(file, **{field: getattr(file, field) + 1})
    data = framed(file, record(file, 1, b"a"), record(other, 2, b"b"), record(file, 3, b"c"))
    assert [step for step, _, _ in contents(data)] == [1]


def test_a_record_of_an_earlier_lap_ends_a_chunk() -> None:
    earlier = dataclasses.replace(CHUNK, sequence=CHUNK.sequence - 1)
    data = framed(CHUNK, record(CHUNK, 5, b"new"), record(earlier, 2, b"old"))
    assert [step for step, _, _ in contents(data)] == [5]


def test_meta_longer_than_its_body_ends_the_file(file: FileHeader) -> None:
    body = bytes(8)
    data = framed(file, header_of(file, 1, body, meta_bytes=9).pack() + body)
    assert contents(data) == []


def test_a_body_longer_than_the_file_ends_it_without_being_read(file: FileHeader) -> None:
    header = dataclasses.replace(header_of(file, 1, b"", 0), body_bytes=2**63)
    assert contents(framed(file, header.pack(), bytes(64))) == []


def test_a_record_is_found_by_its_offset_and_borrows_the_memory_of_the_file() -> None:
    data = bytearray(framed(CHUNK, record(CHUNK, 9, b"meta", b"12345678")))
    found = read_record(memoryview(data), HEADER_BYTES, CHUNK)
    assert isinstance(found, RecordRef)
    data[found.offset + HEADER_BYTES] = ord("9")
    assert bytes(found.sections) == b"92345678"
    assert read_record(memoryview(data), 0, CHUNK) is None


@pytest.mark.parametrize(("size", "expected"), [(0, 0), (1, 8), (7, 8), (8, 8), (9, 16)])
def test_padding_goes_up_to_the_next_multiple_of_8(size: int, expected: int) -> None:
    assert padded(size) == expected
