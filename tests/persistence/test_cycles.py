"""Rolling snapshots' files: slices cover all there is once, and a lost one is never passed over."""

from __future__ import annotations

from pathlib import Path

import pytest
from crc32c import crc32c
from hypothesis import given
from hypothesis import strategies as st

from lowdiff.errors import DamagedFile
from lowdiff.persistence.cycles import (
    Cuttable,
    CycleMark,
    SliceRef,
    complete,
    cut,
    encode_slices,
    slice_checksum,
    write_slices,
)
from lowdiff.persistence.framing import RecordHeader, RecordKind, RecordRef, padded

THINGS = st.lists(
    st.builds(Cuttable, st.integers(0, 5000), st.integers(1, 24), st.sampled_from([1, 64, 5000])),
    max_size=12,
)


@given(THINGS, st.integers(1, 40))
def test_a_cycle_covers_every_element_once_and_in_order(things: list[Cuttable], parts: int) -> None:
    ranges = [found for part in cut(things, parts) for found in part]
    for index, thing in enumerate(things):
        own = [(start, stop) for i, start, stop in ranges if i == index]
        ends = [0, *(stop for _, stop in own)]
        assert [start for start, _ in own] == ends[:-1]
        assert ends[-1] == thing.elements
        assert all(stop % thing.atom == 0 for _, stop in own[:-1])
    assert [i for i, _, _ in ranges] == sorted(i for i, _, _ in ranges)


@given(THINGS, st.integers(1, 40))
def test_no_slice_is_longer_than_the_mean_and_one_atom(things: list[Cuttable], parts: int) -> None:
    slices = cut(things, parts)
    assert len(slices) == parts
    total = sum(thing.elements * thing.element_bytes for thing in things)
    atom = max((t.element_bytes * min(t.atom, t.elements) for t in things), default=0)
    for part in slices:
        assert (
            sum(things[i].element_bytes * (b - a) for i, a, b in part) <= total / parts + atom + 1
        )


# An image of 64 bytes in three slices, of which the last one holds the list of the others

IMAGE = bytes(range(64))
SLICES = (((8, 20), (40, 4)), ((28, 12),))


def staged(number: int, ranges: tuple[tuple[int, int], ...], data: bytes) -> RecordRef:
    meta = SliceRef(30, number, ranges).encode()
    body = meta.ljust(padded(len(meta)), b"\0") + data
    header = RecordHeader(
        RecordKind.SLICE, False, len(meta), len(body), crc32c(body), 28 + number, 0, 0, 1, 0
    )
    return RecordRef(header, 0, memoryview(body))


def cycle() -> tuple[list[tuple[SliceRef, RecordRef]], CycleMark, bytes]:
    records = [
        staged(number, ranges, b"".join(IMAGE[o : o + n] for o, n in ranges))
        for number, ranges in enumerate(SLICES)
    ]
    listed = encode_slices([(bytes(r.meta), r.header.body_checksum) for r in records])
    tail = IMAGE[44:] + listed
    ranges = ((0, 8), (44, len(tail)))
    last = staged(len(records), ranges, IMAGE[:8] + tail)
    mark = CycleMark(
        30,
        28,
        44 + len(tail),
        (64, len(listed)),
        bytes(last.meta),
        last.header.body_checksum,
    )
    found = [(SliceRef.decode(bytes(r.meta)), r) for r in [*records, last]]
    return found, mark, IMAGE + listed


def test_slices_make_the_image_whatever_was_there_before(tmp_path: Path) -> None:
    records, mark, image = cycle()
    path = tmp_path / "partial"
    path.write_bytes(b"x" * 1000)
    for record in records:
        write_slices(path, [record])
    assert complete(path, mark) == crc32c(image)
    assert path.read_bytes() == image


def test_slices_that_a_new_writer_finds_again_change_nothing(tmp_path: Path) -> None:
    records, mark, image = cycle()
    path = tmp_path / "partial"
    write_slices(path, records[:2])
    write_slices(path, records[1:])
    assert complete(path, mark) == crc32c(image)


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_a_cycle_that_lacks_a_slice_is_never_complete(tmp_path: Path, missing: int) -> None:
    records, mark, _ = cycle()
    path = tmp_path / "partial"
    write_slices(path, [record for n, record in enumerate(records) if n != missing])
    with pytest.raises(DamagedFile, match=rf"slice {missing} of the cycle that ends at 30 is lost"):
        complete(path, mark)


def test_a_flipped_bit_anywhere_is_found(tmp_path: Path) -> None:
    records, mark, image = cycle()
    path = tmp_path / "partial"
    write_slices(path, records)
    for offset in range(len(image)):
        path.write_bytes(image[:offset] + bytes([image[offset] ^ 4]) + image[offset + 1 :])
        with pytest.raises(DamagedFile):
            complete(path, mark)


def test_a_cycle_of_which_nothing_was_written_is_not_complete(tmp_path: Path) -> None:
    _, mark, _ = cycle()
    with pytest.raises(DamagedFile, match="no slice"):
        complete(tmp_path / "partial", mark)


def test_a_mark_comes_back_from_its_record() -> None:
    _, mark, _ = cycle()
    body = mark.encode()
    header = RecordHeader(RecordKind.CYCLE, False, len(body), len(body), 0, 30, 0, 0, 1, 0)
    assert CycleMark.of(RecordRef(header, 0, memoryview(body))) == mark


def test_the_checksum_of_a_slice_is_that_of_its_record() -> None:
    record = staged(0, SLICES[0], b"some bytes, 24 of them..")
    assert slice_checksum(bytes(record.meta), [b"some bytes, ", b"24 of them.."]) == (
        record.header.body_checksum
    )
