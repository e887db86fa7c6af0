from __future__ import annotations

from crc32c import crc32c
from hypothesis import given
from hypothesis import strategies as st

from lowdiff.core.crc import joined


@given(st.binary(max_size=300), st.binary(max_size=300))
def test_checksums_are_joined(first: bytes, second: bytes) -> None:
    assert joined(crc32c(first), crc32c(second), len(second)) == crc32c(first + second)
