"""Sections come back, raw or coded, and damaged or hostile ones are refused in little memory."""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Sequence

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from lowdiff.persistence.files.checked_copy import CheckedCopy
from lowdiff.persistence.format.codec import Codec
from lowdiff.persistence.format.sections import (
    encode_sections,
    max_payload_bytes,
    read_sections,
    sections_bytes,
    write_sections,
)
from lowdiff.persistence.format.values import BadEncoding
from lowdiff.types import Layout, ParameterSpec, Section

CODEC = Codec()
UNSIGNED = st.sampled_from([np.dtype(t) for t in ("<u1", "<u2", "<u4", "<u8")])

ascending = st.lists(st.integers(0, 2**63 - 1), unique=True, max_size=60).map(
    lambda values: ("ascending", np.array(sorted(values), np.int64))
)
patterns = st.tuples(
    st.sampled_from(["raw", "planes"]),
    UNSIGNED.flatmap(lambda d: hnp.arrays(d, st.integers(0, 60))),
)
some_sections = st.lists(
    st.tuples(st.text(st.characters(exclude_categories=["Cs"]), max_size=12), ascending | patterns),
    max_size=4,
).map(lambda found: tuple(Section(name, coding, data) for name, (coding, data) in found))

SAMPLE = (
    Section("indices/float32", "ascending", np.arange(0, 9000, 30)),
    Section("values/float32", "planes", np.arange(300, dtype=np.uint32) + 2**30),
    Section("scale", "raw", np.array([7], np.uint64)),
)


def assert_same(found: Sequence[Section], expected: Sequence[Section]) -> None:
    assert [(s.name, s.coding, s.data.dtype) for s in found] == [
        (s.name, s.coding, s.data.dtype) for s in expected
    ]
    for left, right in zip(found, expected, strict=True):
        np.testing.assert_array_equal(left.data, right.data)


def peak_bytes(stored: bytes, codec: Codec, *, match: str) -> int:
    """Memory at its most while the sections are refused."""
    tracemalloc.start()
    try:
        with pytest.raises(BadEncoding, match=match):
            read_sections(memoryview(stored), codec, coded=True)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@given(some_sections)
def test_sections_come_back_raw_and_coded(sections: tuple[Section, ...]) -> None:
    raw = bytearray(sections_bytes(sections))
    write_sections(CheckedCopy(memoryview(raw)), sections)
    assert_same(read_sections(memoryview(raw), CODEC, coded=False), sections)
    coded = encode_sections(sections, CODEC)
    assert len(coded) % 8 == 0
    assert_same(read_sections(memoryview(coded), CODEC, coded=True), sections)


@given(st.data(), st.booleans())
def test_damaged_sections_are_other_sections_or_raise_bad_encoding(
    data: st.DataObject, coded: bool
) -> None:
    stored = bytearray(sections_bytes(SAMPLE))
    write_sections(CheckedCopy(memoryview(stored)), SAMPLE)
    if coded:
        stored = bytearray(encode_sections(SAMPLE, CODEC))
    for _ in range(data.draw(st.integers(0, 3))):
        stored[data.draw(st.integers(0, len(stored) - 1))] ^= data.draw(st.integers(1, 255))
    kept = data.draw(st.just(len(stored)) | st.integers(0, len(stored)))
    try:
        found = read_sections(memoryview(stored)[:kept], CODEC, coded=coded)
    except BadEncoding:
        return
    assert len(found) <= len(SAMPLE)


@pytest.mark.parametrize("count", [2**24, 2**40, 2**64 - 1])
@pytest.mark.parametrize("position", range(3))
def test_an_absurd_number_of_items_allocates_nothing(count: int, position: int) -> None:
    stored = bytearray()
    for i, section in enumerate(SAMPLE):
        start = len(stored)
        stored += encode_sections([section], CODEC)
        if i == position:
            struct.pack_into("<Q", stored, start + 8, count)
    assert peak_bytes(bytes(stored), CODEC, match=str(count)) < 1 << 16


def bomb(num_bytes: int) -> bytes:
    """A section of zeros, in far fewer bytes."""
    frame = zstandard.ZstdCompressor().compress(bytes(num_bytes))
    data = struct.pack("<BQ", 1, len(frame)) + frame
    head = struct.pack("<HBBIQQ", 0, 2, 1, 0, num_bytes, len(data))
    return head + data + bytes(-len(data) % 8)


def test_sections_beyond_the_limit_allocate_nothing() -> None:
    limited = Codec(max_payload_bytes=1 << 24)
    (section,) = read_sections(memoryview(bomb(1 << 24)), limited, coded=True)
    assert section.data.nbytes == 1 << 24
    assert peak_bytes(bomb((1 << 24) + 1), limited, match="16777216 are allowed") < 1 << 16
    assert peak_bytes(bomb(1 << 28), limited, match="16777216 are allowed") < 1 << 16


def test_the_limit_is_on_all_sections_together() -> None:
    limited = Codec(max_payload_bytes=1 << 20)
    many = bomb(1 << 19) + bomb(1 << 19)
    assert len(read_sections(memoryview(many), limited, coded=True)) == 2
    assert peak_bytes(1000 * many, limited, match="1048576 are allowed") < 3 << 20


def test_the_limit_leaves_room_for_every_gradient() -> None:
    layout = Layout((ParameterSpec("w", (1_000_000,), (1,), "float64", 0),))
    whole = (
        Section("indices/float64", "ascending", np.arange(1_000_000)),
        Section("values/float64", "planes", np.zeros(1_000_000, np.uint64)),
    )
    limited = Codec(max_payload_bytes=max_payload_bytes(layout))
    stored = encode_sections(whole, limited)
    assert_same(read_sections(memoryview(stored), limited, coded=True), whole)
    assert sum(s.data.nbytes for s in whole) < max_payload_bytes(layout) / 4
