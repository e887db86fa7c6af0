"""The self-check each differential carries: a checksum of one rotating slice of the parameters.

It finds what nothing else can see: a parameter written through ``.data``, an embedding
renormalised in the forward pass, a kernel that rounds differently on another machine. Every step
checks another slice, so a difference is found within ``NUM_SLICES`` steps.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from lowdiff.layout import bits, flat, shard_owners
from lowdiff.types import Digest, Layout

NUM_SLICES = 64
#: Bounds the cost for very large models; their slices then take more steps to come round.
_LONGEST_SLICE = 1 << 22
_MODULUS = 1 << 64


class Digester:
    """Computes digests over flat parameters of one layout."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._length = max(1, min(-(-layout.elements // NUM_SLICES), _LONGEST_SLICE))
        self._slices = max(1, -(-layout.elements // self._length))
        # Any mixing of positions will do; without one, +1 here and -1 there would cancel.
        positions = np.arange(1, self._length + 1, dtype=np.uint64)
        mixed = positions * np.uint64(0x9E3779B97F4A7C15)
        self._weights = (mixed ^ (mixed >> np.uint64(29))) | np.uint64(1)

    def slice_of(self, step: int, rank: int, world_size: int) -> tuple[int, int]:
        """The slice ``[start, stop)`` of the layout that a rank checks after a step."""
        start = (step * world_size + rank) % self._slices * self._length
        return start, min(start + self._length, self._layout.elements)

    def digest(
        self, parameters: Sequence[torch.Tensor], step: int, rank: int, world_size: int
    ) -> Digest:
        """Digest of the slice due at this step.

        Args:
            parameters: Dense CPU tensors in layout order.
            step: The step whose result they hold.
            rank: The rank that checks.
            world_size: Number of ranks, each of which checks another slice.
        """
        start, stop = self.slice_of(step, rank, world_size)
        return Digest(start, stop, self.value(parameters, start, stop))

    def pieces_of(self, rank: int, world_size: int) -> list[tuple[int, int]]:
        """Ranges ``[start, stop)`` of the layout that hold only parameters that a rank owns."""
        owners = shard_owners(self._layout, world_size)
        owned: list[tuple[int, int]] = []
        for spec, owner in zip(self._layout.parameters, owners, strict=True):
            if owner == rank and owned and owned[-1][1] == spec.offset:
                owned[-1] = owned[-1][0], spec.stop
            elif owner == rank:
                owned.append((spec.offset, spec.stop))
        return [
            (first, min(first + self._length, stop))
            for start, stop in owned
            for first in range(start, stop, self._length)
        ]

    def digest_of(
        self, parameters: Sequence[torch.Tensor], pieces: Sequence[tuple[int, int]], step: int
    ) -> Digest | None:
        """Digest of the piece due at this step; None if there are none.

        A replica holds one rank's share of the parameters and can check no other.
        """
        if not pieces:
            return None
        start, stop = pieces[step % len(pieces)]
        return Digest(start, stop, self.value(parameters, start, stop))

    def value(self, tensors: Sequence[torch.Tensor | None], start: int, stop: int) -> int:
        """Sum over elements ``[start, stop)`` of the layout.

        Args:
            tensors: Dense CPU tensors in layout order; None adds nothing.
            start: First element.
            stop: Last element, exclusive.
        """
        total = 0
        for spec, tensor in zip(self._layout.parameters, tensors, strict=True):
            if tensor is not None and spec.offset < stop and start < spec.stop:
                total += self.partial(flat(tensor), spec.offset, start, stop)
        return total % _MODULUS

    def partial(self, values: torch.Tensor, offset: int, start: int, stop: int) -> int:
        """What ``values`` (flat, first element at layout ``offset``) add to a digest."""
        first, last = max(start, offset), min(stop, offset + values.numel())
        if first >= last:
            return 0
        pattern = bits(values[first - offset : last - offset].cpu()).astype(np.uint64)
        return int(np.dot(pattern, self._weights[first - start : last - start]))

    @staticmethod
    def add(left: int, right: int) -> int:
        """Sum of two partial digests."""
        return (left + right) % _MODULUS
