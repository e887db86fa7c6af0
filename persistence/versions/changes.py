"""What changed of a tensor: positions and their new values.

A change is one byte, 1 for positions and values, 0 for the whole tensor, then for positions their number and the bytes of
their coding (u64 each), the positions ("ascending"), and the values ("planes"); see `lowdiff.persistence.format.codec`. The
whole tensor is its coded values alone, and stored where it is smaller.
"""

from __future__ import annotations

import struct
from typing import cast

import numpy as np

from lowdiff.persistence.format.codec import Codec
from lowdiff.persistence.format.values import BadEncoding
from lowdiff.persistence.versions.weights import Tensor, Words

_WHOLE, _SPARSE = 0, 1
_HEAD = struct.Struct("<BQQ")
#: Above this share of changed elements, positions cost more than they save.
_DENSE_SHARE = 0.5

_codec = Codec()


def changed_positions(old: Words, new: Words) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Return where two tensors of the same size differ in a bit, ascending."""
    return np.flatnonzero(old != new)


def encode(old: Words, new: Words) -> bytes:
    """Return what leads from one content of a tensor to another; empty if nothing changed."""
    positions = changed_positions(old, new)
    if not positions.size:
        return b""
    if positions.size > _DENSE_SHARE * new.size:
        return _whole(new)
    coded = _codec.encode("ascending", positions)
    sparse = _HEAD.pack(_SPARSE, positions.size, len(coded)) + coded
    sparse += _codec.encode("planes", new[positions])
    if len(sparse) < new.nbytes // 2:  # else the whole may be smaller
        return sparse
    return min(sparse, _whole(new), key=len)


def apply(old: Tensor, change: bytes | memoryview) -> Tensor:
    """Return a tensor after a change, in memory of its own.

    Args:
        old: Before.
        change: Of `encode`, or arbitrary bytes. What they decode to is bounded by the tensor.

    Raises:
        BadEncoding: If they are no change of such a tensor.
    """
    data = memoryview(change).cast("B")
    if not len(data):
        raise BadEncoding("an empty change")
    bits = old.bits
    if data[0] == _WHOLE:
        whole = _codec.decode("planes", bits.dtype, bits.size, data[1:])
        return Tensor(old.dtype, old.shape, cast(Words, whole))
    if data[0] != _SPARSE or len(data) < _HEAD.size:
        raise BadEncoding(f"a change of kind {data[0]}")
    _, count, num_bytes = _HEAD.unpack_from(data)
    if not 0 < count <= bits.size:
        raise BadEncoding(f"{count} changed values of {bits.size}")
    body = data[_HEAD.size :]
    positions = _codec.decode("ascending", np.dtype("<i8"), count, body[:num_bytes])
    values = _codec.decode("planes", bits.dtype, count, body[num_bytes:])
    if positions[-1] >= bits.size:
        raise BadEncoding(f"position {positions[-1]} of {bits.size}")
    changed = bits.copy()
    changed[positions] = values
    return Tensor(old.dtype, old.shape, changed)


def _whole(bits: Words) -> bytes:
    return bytes([_WHOLE]) + _codec.encode("planes", bits)
