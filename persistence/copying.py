"""Copying into memory that outlives the process, and its checksum, in one pass."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from crc32c import crc32c

from lowdiff.persistence.framing import RecordRef

Bytes: TypeAlias = "bytes | memoryview | npt.NDArray[Any]"

#: As much as stays, with its source, in a core's second-level cache from the copy to its checksum.
#: A checksum over all of a large copy reads it from memory again, half as long as the copy itself.
_PIECE_BYTES = 1 << 18
#: Less than this is not worth a thread's start.
_SHARE_BYTES = 8 << 20

_POLYNOMIAL = 0x82F63B78


class CheckedCopy:
    """Puts one thing after the other into a target.

    Attributes:
        size: Bytes so far.
        checksum: CRC-32C of them.
    """

    def __init__(self, target: memoryview) -> None:
        self._target = np.frombuffer(target, np.uint8)
        self.size = 0
        self.checksum = 0

    def add(self, data: Bytes) -> None:
        """Copy bytes, or those of a contiguous array."""
        source = np.frombuffer(data, np.uint8)
        for start in range(0, source.size, _PIECE_BYTES):
            piece = source[start : start + _PIECE_BYTES]
            copied = self._target[self.size : self.size + piece.size]
            np.copyto(copied, piece)
            self.checksum = crc32c(copied.data, self.checksum)
            self.size += piece.size


def copy_in_parallel(
    target: memoryview, parts: Sequence[memoryview], num_threads: int
) -> tuple[int, int]:
    """Copy parts one after the other into a target, by several threads at once.

    Returns:
        Their bytes, and the CRC-32C of all of them.
    """
    total = sum(part.nbytes for part in parts)
    num_threads = max(1, min(num_threads, total // _SHARE_BYTES))
    edges = [total * share // num_threads for share in range(num_threads + 1)]

    def copy(start: int, stop: int) -> CheckedCopy:
        own = CheckedCopy(target[start:stop])
        offset = 0
        for part in parts:
            first, last = max(start - offset, 0), min(stop - offset, part.nbytes)
            if first < last:
                own.add(part[first:last])
            offset += part.nbytes
        return own

    if num_threads == 1:
        copied = [copy(0, total)]
    else:
        with ThreadPoolExecutor(num_threads) as pool:
            copied = list(pool.map(copy, edges[:-1], edges[1:]))
    checksum = 0
    for share in copied:
        checksum = joined_checksum(checksum, share.checksum, share.size)
    return total, checksum


def own_copy(record: RecordRef) -> RecordRef | None:
    """A staged record in memory of its own; None if it was overwritten meanwhile.

    While storage is slow a trainer may drop what it staged, at any moment: nothing of a record may
    be believed that was not copied before it was checked.
    """
    own = replace(record, body=memoryview(bytes(record.body)))
    return own if own.is_intact() else None


def joined_checksum(first: int, second: int, second_bytes: int) -> int:
    """CRC-32C of two byte strings, one after the other, from theirs and the second's length.

    As zlib's ``crc32_combine``: the first is moved on by as many zero bytes, which is a product of
    polynomials over GF(2).
    """
    shift, square, bits = 1 << 31, 1 << 23, second_bytes  # x^0, and x^8: one byte
    while bits:
        if bits & 1:
            shift = _product(square, shift)
        square = _product(square, square)
        bits >>= 1
    return _product(shift, first) ^ second


def _product(a: int, b: int) -> int:
    """Product modulo the polynomial; the highest bit of a number is the coefficient of x^0."""
    found = 0
    while a:
        if a & 1 << 31:
            found ^= b
        a = a << 1 & 0xFFFFFFFF
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
    return found
