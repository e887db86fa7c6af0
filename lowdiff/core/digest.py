"""Checksums of tensors and optimizer state, whole or combined from blocks.

The live run computes the checksum of every parameter. Replay holds a parameter only block by block
and combines the same number. A CRC-32C is linear, so each block adds its own checksum, shifted by the
number of bytes that follow the block in the parameter. The sums of an accelerator (`lowdiff.core.sums`)
go by places, so each block adds its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import xor
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from crc32c import crc32c

from lowdiff.core.crc import BITS, power_of_x, times_x
from lowdiff.core.layout import flat_like, is_dense
from lowdiff.core.memory import byte_view
from lowdiff.core.sums import MODULUS
from lowdiff.core.sums.host import host_sum
from lowdiff.types import ParameterSpec


@dataclass(frozen=True, slots=True)
class Kind:
    """What checksums are.

    Attributes:
        of_bytes: Takes that of memory of the host, the second argument being the memory's place in its tensor.
        merge: Puts those of two blocks of a tensor together.
        number: How one is encoded.
        is_placed: Whether a block's goes by the block's place; else it has to be shifted.
    """

    of_bytes: Callable[[memoryview, int], int]
    merge: Callable[[int, int], int]
    number: str
    is_placed: bool


CRC32C = Kind(lambda data, _: int(crc32c(data)), xor, "<u4", is_placed=False)
SUM64 = Kind(host_sum, lambda left, right: (left + right) % MODULUS, "<u8", is_placed=True)
#: By their names in fences, `types.DIGESTS`.
KINDS = {"crc32c": CRC32C, "sum64": SUM64}


class Looker:
    """Takes checksums of the same tensors repeatedly, on the host.

    The memory of each tensor is looked up once, and again only if the tensor has moved, because for
    small tensors the lookup costs more than the checksum. If the order of a tensor's elements
    changes in place (``p.data = p.data.T`` need not move it), it is still read in its old order.
    """

    def __init__(
        self,
        tensors: Mapping[int, torch.Tensor],
        kind: Kind = CRC32C,
        starts: Mapping[int, int] | None = None,
    ) -> None:
        """Note the tensors, each with its number; see `sums.Sums` for ``starts``."""
        self._tensors = dict(tensors)
        self._of_bytes = kind.of_bytes
        places = starts or dict.fromkeys(tensors, 0)
        self._starts = {i: places[i] * tensor.element_size() for i, tensor in tensors.items()}
        self._strides = {i: tensor.stride() for i, tensor in tensors.items()}
        self._places = dict.fromkeys(tensors, -1)
        self._views = dict.fromkeys(tensors, memoryview(b""))

    def look(self, numbers: Iterable[int] | None = None) -> dict[int, int]:
        """Return the current checksum of each of these tensors, by number; None for all."""
        wanted = self._tensors if numbers is None else numbers
        return {i: self._of_bytes(self._view(i), self._starts[i]) for i in wanted}

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


def state_digest(checksums: Mapping[str, int], kind: Kind = CRC32C) -> int:
    """Return the checksum of what an optimizer keeps of one parameter; 0 if that is nothing.

    Args:
        checksums: Key of each entry -> its checksum, see `entries_of`.
        kind: Of these.
    """
    ordered = sorted(checksums.items())
    return join((n for key, value in ordered for n in (crc32c(key.encode()), value)), kind)


def entries_of(
    entries: Mapping[Any, object], spec: ParameterSpec
) -> dict[str, torch.Tensor] | None:
    """Return each tensor that an optimizer keeps of a parameter, or of a block of one, as checksums are taken of it.

    What is no tensor is passed over.

    Args:
        entries: Its state of the parameter. Tensors of the parameter's shape are summed in
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
        found[key] = flat_like(value.detach(), spec) if is_like else value.detach().contiguous()
    return found


def entry_digests(
    entries: Mapping[Any, object], spec: ParameterSpec, kind: Kind = CRC32C, start: int = 0
) -> dict[str, int] | None:
    """Return the checksum of each tensor of `entries_of`, all on the host, or None as that does.

    Args:
        entries: See `entries_of`.
        spec: The parameter.
        kind: Of the checksums.
        start: Place of the first element of a block in the parameter.
    """
    tensors = entries_of(entries, spec)
    if tensors is None:
        return None
    return {k: kind.of_bytes(byte_view(t), start * t.element_size()) for k, t in tensors.items()}


def join(checksums: Iterable[int], kind: Kind = CRC32C) -> int:
    """Return one CRC-32C of several checksums, in this order."""
    return int(crc32c(np.fromiter(checksums, dtype=kind.number).tobytes()))


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
