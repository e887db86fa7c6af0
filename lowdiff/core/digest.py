"""Checksums of tensors: CRC-32C of a tensor's memory, whole or put together from blocks.

The live run takes one of every parameter, and replay, which holds a parameter only block by block,
puts the same number together: a CRC is linear, so each block adds its own checksum, shifted by the
bytes that follow it in the parameter.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from crc32c import crc32c

from lowdiff.core.layout import byte_view

#: Castagnoli's polynomial, bits reversed, as the checksum has them.
_POLYNOMIAL = 0x82F63B78
_BITS = 32


class Looker:
    """Takes checksums of the same tensors again and again.

    The memory of each is looked up once, and anew only when the tensor has moved: for small tensors
    that costs more than the checksum. A tensor whose elements lie in another order since (``p.data =
    p.data.T``, which need not move it) is read in its old order.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = list(tensors)
        self._strides = [tensor.stride() for tensor in self._tensors]
        self._places = [-1] * len(self._tensors)
        self._views = [memoryview(b"")] * len(self._tensors)

    def look(self, indices: Iterable[int]) -> list[int]:
        """Checksum of each of these tensors as it is now."""
        return [crc32c(self._view(i)) for i in indices]

    def _view(self, index: int) -> memoryview:
        tensor = self._tensors[index]
        if tensor.stride() != self._strides[index]:
            return _bytes_of(in_order(tensor, self._strides[index]))
        place = tensor.data_ptr()
        if place != self._places[index]:
            self._places[index] = place
            self._views[index] = _bytes_of(tensor)
        return self._views[index]


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return byte_view(tensor) if tensor.numel() else memoryview(b"")


def in_order(tensor: torch.Tensor, strides: Sequence[int]) -> torch.Tensor:
    """A copy of a tensor in memory of another order."""
    copy = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device)
    return copy.copy_(tensor.detach())


def join(checksums: Iterable[int]) -> int:
    """One checksum for several, in this order."""
    return int(crc32c(np.fromiter(checksums, dtype="<u4").tobytes()))


class Shift:
    """Moves checksums past the bytes that follow: what a block adds to its parameter's checksum.

    Reference: Adler, zlib's ``crc32_combine``: appending ``n`` zero bytes multiplies a checksum by
    ``x ** (8 * n)`` modulo the polynomial.
    """

    def __init__(self, num_bytes: int) -> None:
        """Prepare to append ``num_bytes``."""
        images = [_power_of_x(8 * num_bytes)]
        for _ in range(_BITS - 1):
            images.append(_times_x(images[-1]))
        # Bit 31 of a checksum is the coefficient of 1, bit 0 that of x ** 31.
        self._images = np.array(images, dtype=np.uint32)

    def __call__(self, checksums: Sequence[int]) -> npt.NDArray[np.uint32]:
        """Shift many checksums at once."""
        values = np.fromiter(checksums, dtype=np.uint32, count=len(checksums))
        shifted = np.zeros_like(values)
        for place, image in enumerate(self._images):
            bit = (values >> np.uint32(_BITS - 1 - place)) & np.uint32(1)
            shifted ^= bit * image
        return shifted


def _times_x(polynomial: int) -> int:
    return polynomial >> 1 ^ (_POLYNOMIAL if polynomial & 1 else 0)


def _product(left: int, right: int) -> int:
    total = 0
    for place in range(_BITS):
        if left >> (_BITS - 1 - place) & 1:
            total ^= right
        right = _times_x(right)
    return total


def _power_of_x(exponent: int) -> int:
    power, square = 1 << (_BITS - 1), 1 << (_BITS - 2)  # 1 and x
    while exponent:
        if exponent & 1:
            power = _product(power, square)
        square = _product(square, square)
        exponent >>= 1
    return power
