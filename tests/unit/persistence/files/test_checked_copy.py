"""Copying and checksumming in one pass."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from crc32c import crc32c
from hypothesis import given
from hypothesis import strategies as st

from lowdiff.persistence.files.checked_copy import (
    CheckedCopy,
    copy_in_parallel,
    read_in_parallel,
)

LARGE = np.random.default_rng(0).integers(0, 1 << 16, 1_400_001, dtype=np.uint16)


@given(st.lists(st.binary(max_size=20) | st.integers(0, LARGE.size).map(lambda n: LARGE[:n])))
def test_what_is_added_stands_in_order_and_has_the_checksum_of_all(
    parts: list[bytes | np.ndarray],
) -> None:
    expected = b"".join(p if isinstance(p, bytes) else p.tobytes() for p in parts)
    target = bytearray(len(expected) + 5)
    copy = CheckedCopy(memoryview(target))
    for part in parts:
        copy.add(part)
    assert bytes(target) == expected + bytes(5)
    assert (copy.size, copy.checksum) == (len(expected), crc32c(expected))


@pytest.mark.parametrize("num_threads", [1, 2, 3, 16])
def test_several_threads_copy_the_same_bytes(num_threads: int, limits: Callable[..., None]) -> None:
    limits(copy_share_bytes=1000)
    whole = memoryview(LARGE.tobytes())
    parts = [whole[:7], whole[:0], whole[7:1_500_000], whole[1_500_000:], memoryview(b"end")]
    target = bytearray(len(whole) + 3)
    assert copy_in_parallel(memoryview(target), parts, num_threads) == (
        len(target),
        crc32c(bytes(whole) + b"end"),
    )
    assert bytes(target) == bytes(whole) + b"end"


@pytest.mark.parametrize("num_threads", [1, 2, 3, 16])
def test_several_threads_read_the_same_bytes(
    num_threads: int, limits: Callable[..., None], tmp_path: Path
) -> None:
    limits(copy_share_bytes=1000)
    expected = LARGE.tobytes()
    (tmp_path / "file").write_bytes(b"before" + expected + b"after")
    parts = [bytearray(size) for size in (7, 0, 1_500_000, len(expected) - 1_500_007)]
    descriptor = os.open(tmp_path / "file", os.O_RDONLY)
    try:
        views = [memoryview(part) for part in parts]
        found = read_in_parallel(descriptor, 6, views, num_threads)
        assert b"".join(parts) == expected
        assert found == [crc32c(bytes(part)) for part in parts]
        with pytest.raises(EOFError, match=f"ends at byte {len(expected) + 11}"):
            read_in_parallel(descriptor, 12, views, num_threads)
    finally:
        os.close(descriptor)
