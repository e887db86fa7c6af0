"""Arrays shrink without loss, and damaged ones are noticed."""

from __future__ import annotations

import struct
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from lowdiff.errors import ConfigError
from lowdiff.persistence.format.codec import CODINGS, Codec
from lowdiff.persistence.format.values import BadEncoding
from lowdiff.types import Bits

CODEC = Codec()
INT64 = np.dtype("<i8")
UNSIGNED = [np.dtype(t) for t in ("<u1", "<u2", "<u4", "<u8")]
LARGEST = 2**63 - 1


def positions(*values: int) -> npt.NDArray[np.int64]:
    return np.array(values, np.int64)


def round_trip(coding: str, data: Bits) -> Bits:
    return CODEC.decode(coding, data.dtype, data.size, CODEC.encode(coding, data))


def assert_same(found: Bits, expected: Bits) -> None:
    assert found.dtype == expected.dtype
    np.testing.assert_array_equal(found, expected)


def selected_entries() -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    """The largest 1 % of each of 40 normal layers whose scales differ: positions and values."""
    rng = np.random.default_rng(0)
    layers = rng.standard_normal((40, 50_000), np.float32)
    kept = np.argpartition(-np.abs(layers), 500, axis=1)[:, :500]
    layers *= np.exp(rng.normal(-7, 1.5, (40, 1))).astype(np.float32)
    indices = np.sort((kept + 50_000 * np.arange(40)[:, None]).ravel())
    return indices, layers.ravel()[indices]


@given(st.data(), st.sampled_from(UNSIGNED), st.sampled_from(["raw", "planes"]))
def test_any_bit_patterns_come_back(data: st.DataObject, dtype: Any, coding: str) -> None:
    bits = data.draw(hnp.arrays(dtype, st.integers(0, 300)))
    assert_same(round_trip(coding, bits), bits)


@given(st.data(), st.sampled_from(UNSIGNED), st.integers(2, 60))
def test_patterns_that_shrink_to_frames_come_back(data: st.DataObject, dtype: Any, n: int) -> None:
    bits = np.tile(data.draw(hnp.arrays(dtype, st.integers(1, 100))), n)
    assert_same(round_trip("planes", bits), bits)


@given(st.lists(st.integers(0, LARGEST), unique=True, max_size=300).map(sorted))
def test_any_ascending_positions_come_back(values: list[int]) -> None:
    assert_same(round_trip("ascending", positions(*values)), positions(*values))


WIDE_GAPS = st.sampled_from([1, 2, 256, 257, 2**16, 2**31, 2**32, 2**32 + 1, 2**40, 2**56, 2**62])


@given(st.lists(st.integers(1, 2**62) | st.integers(1, 70_000) | WIDE_GAPS, max_size=200))
def test_gaps_of_every_width_come_back(gaps: list[int]) -> None:
    values = [v for v in np.cumsum(np.array(gaps, object)).tolist() if v <= LARGEST]
    assert_same(round_trip("ascending", positions(*values)), positions(*values))


@pytest.mark.parametrize(
    "values",
    [
        positions(),
        positions(0),
        positions(LARGEST),
        positions(0, LARGEST),
        positions(LARGEST - 1, LARGEST),
        positions(0, 2**62, 2**62 + 1),
        positions(255, 512, 513),
        positions(256, 65_792),
        np.arange(100_000),
    ],
    ids=lambda v: f"{v.size}",
)
def test_edges_of_the_address_space_come_back(values: Bits) -> None:
    assert_same(round_trip("ascending", values), values)


@pytest.mark.parametrize(
    ("largest_gap", "num_planes"),
    [(0, 1), (255, 1), (256, 2), (2**16, 3), (2**24, 4), (2**32, 5), (2**55, 7), (2**56, 8)],
)
def test_gaps_take_only_the_planes_the_largest_one_needs(largest_gap: int, num_planes: int) -> None:
    assert CODEC.encode("ascending", positions(0, largest_gap + 1))[0] == num_planes


@pytest.mark.parametrize("coding", ["raw", "planes"])
@pytest.mark.parametrize("dtype", UNSIGNED, ids=str)
def test_arrays_with_steps_between_their_entries_come_back(coding: str, dtype: Any) -> None:
    every_third = np.arange(999, dtype=dtype)[::3]
    assert_same(round_trip(coding, every_third), every_third)


@pytest.mark.parametrize("coding", CODINGS)
def test_an_array_without_entries_takes_no_bytes(coding: str) -> None:
    empty = np.empty(0, INT64 if coding == "ascending" else np.uint32)
    assert CODEC.encode(coding, empty) == b""
    assert_same(round_trip(coding, empty), empty)


@pytest.mark.parametrize("coding", ["raw", "planes"])
def test_decoded_arrays_own_their_memory_and_can_be_written(coding: str) -> None:
    stored = bytearray(CODEC.encode(coding, np.arange(50, dtype=np.uint16)))
    decoded = CODEC.decode(coding, np.dtype(np.uint16), 50, memoryview(stored))
    stored[:] = bytes(len(stored))
    assert_same(decoded, np.arange(50, dtype=np.uint16))
    decoded += 1


def test_noise_is_stored_as_it_is() -> None:
    noise = np.random.default_rng(0).integers(0, 2**32, 10_000, dtype=np.uint32)
    assert len(CODEC.encode("planes", noise)) == noise.nbytes + 1 + 4 * 8


def test_a_float32_entry_takes_at_most_4_4_bytes_at_a_density_of_one_percent() -> None:
    indices, values = selected_entries()
    stored = CODEC.encode("ascending", indices) + CODEC.encode("planes", values.view(np.uint32))
    assert len(stored) / indices.size <= 4.4


def test_a_bfloat16_entry_takes_at_most_2_4_bytes_at_a_density_of_one_percent() -> None:
    indices, values = selected_entries()
    high_halves = (values.view(np.uint32) >> 16).astype(np.uint16)
    stored = CODEC.encode("ascending", indices) + CODEC.encode("planes", high_halves)
    assert len(stored) / indices.size <= 2.4


@pytest.mark.parametrize(
    "values",
    [
        positions(3, 3),
        positions(0, 0),
        positions(5, 4),
        positions(-1, 0),
        positions(-5),
        positions(2**62, -(2**63)),
        positions(1, 2, 2, 3),
    ],
    ids=lambda v: str(v.tolist()),
)
def test_positions_that_do_not_ascend_are_refused(values: Bits) -> None:
    with pytest.raises(ConfigError, match="sort them"):
        CODEC.encode("ascending", values)


@given(
    st.lists(st.integers(-3, 12) | WIDE_GAPS | WIDE_GAPS.map(lambda v: -2 * v), max_size=5)
    | st.lists(st.integers(0, LARGEST), unique=True, max_size=5).map(sorted)
)
def test_exactly_what_ascends_from_0_up_is_encoded(values: list[int]) -> None:
    if values == sorted(set(values)) and (not values or values[0] >= 0):
        assert_same(round_trip("ascending", positions(*values)), positions(*values))
    else:
        with pytest.raises(ConfigError, match="sort them"):
            CODEC.encode("ascending", positions(*values))


@pytest.mark.parametrize(
    ("coding", "data"),
    [
        ("ascending", np.arange(4, dtype=np.uint64)),
        ("ascending", np.arange(4, dtype=np.int32)),
        ("planes", np.arange(4)),
        ("planes", np.zeros(4, np.float32)),
        ("raw", np.arange(4)),
        ("planes", np.arange(4, dtype=">u4")),
        ("planes", np.zeros((2, 2), np.uint32)),
        ("zip", np.zeros(4, np.uint32)),
    ],
)
def test_arrays_of_the_wrong_kind_are_refused(coding: str, data: Any) -> None:
    with pytest.raises(ConfigError):
        CODEC.encode(coding, data)


def damaged(stored: bytes) -> list[bytes]:
    """Every truncation, every flipped bit, and a byte too many."""
    cut = [stored[:n] for n in range(len(stored))]
    flipped = []
    for i in range(8 * len(stored)):
        copy = bytearray(stored)
        copy[i // 8] ^= 1 << i % 8
        flipped.append(bytes(copy))
    return [*cut, *flipped, stored + b"\0"]


SAMPLES: list[tuple[str, Bits]] = [
    ("ascending", np.arange(0, 30_000, 300)),
    ("ascending", positions(5, 7, 2**40, LARGEST)),
    ("planes", np.arange(1_000, 1_120, dtype=np.uint32)),
    ("planes", np.array([1, 2**63], np.uint64)),
    ("raw", np.arange(20, dtype=np.uint16)),
]


#: Long enough for frames: gaps of one byte and of three, planes of noise between planes that shrink.
LONG_SAMPLES: list[tuple[str, Bits]] = [
    ("ascending", np.arange(4000) * 100),
    ("ascending", np.concatenate([np.arange(2000) * 300, 2**20 + np.arange(2000)])),
    ("planes", np.arange(4000, dtype=np.uint32) // 3),
    ("planes", np.arange(3000, dtype=np.uint64) % 7),
]


@pytest.mark.parametrize(("coding", "data"), SAMPLES)
def test_damage_decodes_to_a_good_array_or_raises_bad_encoding(coding: str, data: Bits) -> None:
    for stored in damaged(CODEC.encode(coding, data)):
        try:
            decoded = CODEC.decode(coding, data.dtype, data.size, stored)
        except BadEncoding:
            continue
        assert decoded.size == data.size
        if coding == "ascending":
            assert decoded[0] >= 0
            assert (np.diff(decoded) > 0).all()


@pytest.mark.parametrize(("coding", "data"), SAMPLES)
def test_missing_and_surplus_bytes_raise_bad_encoding(coding: str, data: Bits) -> None:
    stored = CODEC.encode(coding, data)
    for wrong in [stored[:length] for length in range(len(stored))] + [stored + b"\0"]:
        with pytest.raises(BadEncoding):
            CODEC.decode(coding, data.dtype, data.size, wrong)


@pytest.mark.parametrize("num_planes", [0, 9])
def test_a_number_of_planes_that_no_integer_has_raises_bad_encoding(num_planes: int) -> None:
    stored = struct.pack(f"<B{num_planes}Q", num_planes, *[1] * num_planes) + bytes(num_planes)
    with pytest.raises(BadEncoding):
        CODEC.decode("ascending", INT64, 1, stored)


@pytest.mark.parametrize(("coding", "data"), SAMPLES)
@pytest.mark.parametrize("wrong", [-1, 1, 2**20, 2**40, 2**63])
def test_a_wrong_count_raises_bad_encoding(coding: str, data: Bits, wrong: int) -> None:
    with pytest.raises(BadEncoding):
        CODEC.decode(coding, data.dtype, data.size + wrong, CODEC.encode(coding, data))


@given(st.binary(max_size=200), st.sampled_from(CODINGS), st.integers(0, 2**64))
def test_noise_decodes_or_raises_bad_encoding(stored: bytes, coding: str, count: int) -> None:
    dtype = INT64 if coding == "ascending" else np.dtype(np.uint32)
    try:
        assert CODEC.decode(coding, dtype, count, stored).size == count
    except BadEncoding:
        pass


@pytest.mark.parametrize("coding", CODINGS)
def test_the_wrong_item_type_raises_bad_encoding(coding: str) -> None:
    data = positions(1, 2, 3) if coding == "ascending" else np.arange(3, dtype=np.uint32)
    with pytest.raises(BadEncoding):
        CODEC.decode(coding, np.dtype(np.uint16), 3, CODEC.encode(coding, data))


def test_positions_beyond_int64_raise_bad_encoding() -> None:
    for gaps in ([2**63 - 1, 0], [2**62, 2**62], [0, 2**63 - 1], [2**63, 0], [5, 2**64 - 1]):
        stored = CODEC.encode("planes", np.array(gaps, np.uint64))
        with pytest.raises(BadEncoding, match="beyond int64"):
            CODEC.decode("ascending", INT64, 2, stored)


def planes_of(*frames: bytes) -> bytes:
    return struct.pack(f"<B{len(frames)}Q", len(frames), *map(len, frames)) + b"".join(frames)


def test_a_frame_that_claims_more_than_it_can_hold_allocates_nothing() -> None:
    whole = zstandard.ZstdCompressor().compress(bytes(1 << 28))
    tracemalloc.start()
    try:
        for frame, count in [(whole[:1000], 1 << 28), (whole, 1 << 40), (whole, 1 << 27)]:
            with pytest.raises(BadEncoding):
                CODEC.decode("raw", np.dtype(np.uint8), count, frame)
            with pytest.raises(BadEncoding):
                CODEC.decode("planes", np.dtype(np.uint8), count, planes_of(frame))
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@given(st.data())
def test_damage_in_frames_takes_no_more_memory_than_the_entries_do(data: st.DataObject) -> None:
    coding, original = data.draw(st.sampled_from(LONG_SAMPLES))
    stored = bytearray(CODEC.encode(coding, original))
    for _ in range(data.draw(st.integers(1, 3))):
        stored[data.draw(st.integers(0, len(stored) - 1))] ^= data.draw(st.integers(1, 255))
    kept = data.draw(st.just(len(stored)) | st.integers(0, len(stored)))
    tracemalloc.start()
    try:
        found = CODEC.decode(coding, original.dtype, original.size, bytes(stored[:kept]))
        assert found.size == original.size
    except BadEncoding:
        pass
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    # The words, one plane, what undoing the gaps needs besides, and the copy that is decoded here.
    assert peak < 5 * original.nbytes + len(stored) + (16 << 10)


@pytest.mark.parametrize(
    "frame",
    [
        zstandard.ZstdCompressor(write_content_size=False).compress(bytes(1000)),
        zstandard.ZstdCompressor().compress(bytes(999)),
        zstandard.ZstdCompressor().compress(bytes(1000)) + b"x",
        zstandard.ZstdCompressor().compress(bytes(1000))[:-1],
        b"\x50\x2a\x4d\x18\x04\0\0\0abcd",
        b"no frame",
        b"",
    ],
    ids=["no size", "too short", "a byte after", "cut", "skippable", "no frame", "empty"],
)
def test_a_frame_of_another_content_raises_bad_encoding(frame: bytes) -> None:
    with pytest.raises(BadEncoding):
        CODEC.decode("planes", np.dtype(np.uint8), 1000, planes_of(frame))


def test_one_codec_serves_many_threads() -> None:
    arrays = [np.arange(n, dtype=np.uint32) * 3 for n in range(5_000, 5_064)]
    with ThreadPoolExecutor(4) as pool:
        for found, expected in zip(
            pool.map(lambda a: round_trip("planes", a), arrays), arrays, strict=True
        ):
            assert_same(found, expected)


def test_the_format_of_uncompressed_planes_is_pinned() -> None:
    assert CODEC.encode("ascending", positions(3, 4, 1000)) == bytes.fromhex(
        "02030000000000000003000000000000000300e3000003"
    )
    assert CODEC.encode("planes", np.array([0x01020304, 5], np.uint32)) == bytes.fromhex(
        "04" + 4 * "0200000000000000" + "0405030002000100"
    )
    assert CODEC.encode("raw", np.array([1, 0x0203], np.uint16)) == bytes.fromhex("01000302")
    assert CODINGS == ("raw", "ascending", "planes")


def test_the_format_of_compressed_planes_is_pinned() -> None:
    # Decoded, not encoded: another zstd may choose other frames for the same plane.
    stored = bytes.fromhex(
        "02"
        "1300000000000000"
        "1300000000000000"
        "28b52ffd60e8024d000010072b0100e32b8005"
        "28b52ffd60e8024d00001000010100e32b8005"
    )
    assert_same(CODEC.decode("ascending", INT64, 1000, stored), np.arange(1000) * 300 + 7)
