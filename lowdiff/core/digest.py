"""Checksums of tensors and optimizer state: CRC-32C of their memory, whole or combined from blocks.

The live run computes the checksum of every parameter. Replay holds a parameter only block by block
and combines the same number: a CRC is linear, so each block adds its own checksum, shifted by the
number of bytes that follow the block in the parameter.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from crc32c import crc32c

from lowdiff.core.crc import BITS, power_of_x, times_x
from lowdiff.core.layout import flat_like, is_dense
from lowdiff.core.memory import byte_view
from lowdiff.types import ParameterSpec


class Looker:
    """Takes checksums of the same tensors repeatedly.

    The memory of each tensor is looked up once, and again only if the tensor has moved, because for
    small tensors the lookup costs more than the checksum. If the order of a tensor's elements
    changes in place (``p.data = p.data.T`` need not move it), it is still read in its old order.
    """

    def __init__(self, tensors: Mapping[int, torch.Tensor]) -> None:
        """Note the tensors, each with its number."""
        self._tensors = dict(tensors)
        self._strides = {i: tensor.stride() for i, tensor in tensors.items()}
        self._places = dict.fromkeys(tensors, -1)
        self._views = dict.fromkeys(tensors, memoryview(b""))

    def look(self, numbers: Iterable[int] | None = None) -> dict[int, int]:
        """Return the current checksum of each of these tensors, by number; None for all."""
        return {i: crc32c(self._view(i)) for i in (self._tensors if numbers is None else numbers)}

    def _view(self, index: int) -> memoryview:
        tensor = self._tensors[index]
        if tensor.stride() != self._strides[index]:
            return byte_view(in_order(tensor, self._strides[index]))
        place = tensor.data_ptr()
        if place != self._places[index]:
            self._places[index] = place
            self._views[index] = byte_view(tensor)
        return self._views[index]


def in_order(tensor: torch.Tensor, strides: Sequence[int]) -> torch.Tensor:
    """Return a copy of a tensor in memory of another order."""
    copy = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device)
    return copy.copy_(tensor.detach())


def state_digest(checksums: Mapping[str, int]) -> int:
    """Return the checksum of what an optimizer keeps of one parameter; 0 if that is nothing.

    Args:
        checksums: Key of each entry -> its checksum, see `entry_digests`.
    """
    ordered = sorted(checksums.items())
    return join(number for key, value in ordered for number in (crc32c(key.encode()), value))


def entry_digests(entries: Mapping[Any, object], spec: ParameterSpec) -> dict[str, int] | None:
    """Return the checksum of each tensor that an optimizer keeps of a parameter, or of a block of one.

    What is no tensor is passed over.

    Args:
        entries: Its state of the parameter; tensors on the host. Those of the parameter's shape are summed in
            the memory order of the parameter, as its blocks are, others row by row, as snapshots store them.
        spec: The parameter.

    Returns:
        None where a tensor is of a class of its own or has a key that is no text: its memory need not be
        readable, and replay, whose parameters are plain, may keep another one.
    """
    found = {}
    for key, value in entries.items():
        if not isinstance(value, torch.Tensor):
            continue
        if type(value) not in (torch.Tensor, torch.nn.Parameter) or not isinstance(key, str):
            return None
        is_like = tuple(value.shape) == spec.shape and is_dense(value)
        value = flat_like(value.detach(), spec) if is_like else value.detach().contiguous()
        found[key] = crc32c(byte_view(value))
    return found


def join(checksums: Iterable[int]) -> int:
    """Return one checksum of several, in this order."""
    return int(crc32c(np.fromiter(checksums, dtype="<u4").tobytes()))


class Shift:
    """Moves a block's checksums past the bytes that follow the block in its parameter.

    This works on many checksums at once; for a single one, see `crc.joined`.
    """

    def __init__(self, num_bytes: int) -> None:
        """Prepare to append ``num_bytes``."""
        images = [power_of_x(8 * num_bytes)]
        for _ in range(BITS - 1):
            images.append(times_x(images[-1]))
        self._images = np.array(images, dtype=np.uint32)

    def __call__(self, checksums: Sequence[int]) -> npt.NDArray[np.uint32]:
        """Shift many checksums at once."""
        values = np.fromiter(checksums, dtype=np.uint32, count=len(checksums))
        shifted = np.zeros_like(values)
        for place, image in enumerate(self._images):
            bit = (values >> np.uint32(BITS - 1 - place)) & np.uint32(1)
            shifted ^= bit * image
        return shifted
