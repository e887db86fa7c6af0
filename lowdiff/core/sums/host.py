"""Sums of memory of the host, in as few passes as NumPy allows; see `lowdiff.core.sums`."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch

from lowdiff.core.memory import bits
from lowdiff.core.sums.plain import ROW, weights

_Numbers = npt.NDArray[np.uint64]
#: Rows at once: with as much scratch they stay in a core's cache.
_ROWS = 8


def host_sum(data: memoryview, start: int = 0) -> int:
    """Return the sum of bytes.

    Args:
        data: The bytes, of a tensor or of a block of one.
        start: Place of the first byte in the tensor.
    """
    lead = start % 4
    if lead or len(data) % 4:
        data = memoryview(bytes(lead) + data + bytes(-(lead + len(data)) % 4))
    words, first = np.frombuffer(data, "<u4"), start // 4
    head = min(-first % ROW, words.size)
    end = words.size - (words.size - head) % ROW
    total = _part(words[:head], first) + _part(words[end:], first + end)
    if head < end:
        total += _whole_rows(words[head:end], (first + head) // ROW)
    return total % (1 << 64)


def _part(words: npt.NDArray[np.uint32], first: int) -> int:
    """Sum words of one row."""
    if not words.size:
        return 0
    column = first % ROW
    summed = np.dot(words.astype(np.uint64), _columns()[0][column : column + words.size])
    return int(summed) * int(_rows(first // ROW, 1)[0])


def _whole_rows(words: npt.NDArray[np.uint32], first: int) -> int:
    """Sum rows from one on.

    Two words are one number of 64 bits, which is multiplied by the weight of the lower word. The upper word has then
    counted with 2 ** 32 times that weight, so it is multiplied by the difference to its own.
    """
    _, of_pairs, of_uppers = _columns()
    pairs = words.view("<u8").reshape(-1, ROW // 2)
    found = np.empty(len(pairs), np.uint64)
    scratch = np.empty((min(_ROWS, len(pairs)), ROW // 2), np.uint64)
    for begin in range(0, len(pairs), _ROWS):
        part = pairs[begin : begin + _ROWS]
        uppers = np.right_shift(part, 32, out=scratch[: len(part)])
        found[begin : begin + _ROWS] = np.dot(part, of_pairs) + np.dot(uppers, of_uppers)
    return int(np.dot(found, _rows(first, len(pairs))))


@lru_cache(1)
def _columns() -> tuple[_Numbers, _Numbers, _Numbers]:
    """Return the weight of each word of a row; of each first one of two; and what is left of the second's."""
    columns = _weights(0, ROW)
    of_pairs, of_seconds = columns[0::2].copy(), columns[1::2].copy()
    return columns, of_pairs, of_seconds - (of_pairs << np.uint64(32))


@lru_cache(4096)  # a recovery sums the same blocks at every step
def _rows(first: int, count: int) -> _Numbers:
    return _weights(ROW + first, count)


def _weights(first: int, count: int) -> _Numbers:
    found: _Numbers = bits(weights(first, count, torch.device("cpu"))).view(np.uint64)
    return found
