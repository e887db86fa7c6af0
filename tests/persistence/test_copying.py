"""Copying and checksumming in one pass."""

from __future__ import annotations

import numpy as np
from crc32c import crc32c
from hypothesis import given
from hypothesis import strategies as st

from lowdiff.persistence.copying import CheckedCopy

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
