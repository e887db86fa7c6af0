"""Exact top-k with error feedback over some parameters of a bucket, in a fixed number of operations.

What it does to one parameter, `lowdiff.compressors.sparse` says: gradient plus residual is the total; its k largest
magnitudes are sent, NaN first, ties to the lowest index; the rest is the residual. Entries, residual and cleared bucket have
the bits that the CPU's selector makes of the same input.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import torch


@dataclass(frozen=True, slots=True)
class Segment:
    """One parameter's part of a bucket.

    Attributes:
        parameter: Layout index.
        start: Its first element's place in the bucket.
        length: Number of elements, at least 1.
        owed: Its first element's place in the flat residual.
        kept: Entries that are sent of it, at least 1; all of them leave the residual alone.
    """

    parameter: int
    start: int
    length: int
    owed: int
    kept: int

    @property
    def is_whole(self) -> bool:
        """Whether all of it is sent."""
        return self.kept == self.length


@dataclass(frozen=True, slots=True, eq=False)
class Table:
    """Segments as kernels read them.

    Attributes:
        segments: In the order of their entries.
        values: int64: of each block its segment and first element in it; then, each for all segments, `Segment`'s
            ``start``, ``length``, ``owed`` and ``kept``, the place of its first entry, its first block, and its number of blocks.
        state: int32 ``[3, segments]``, as every selection begins: what is wanted, the digits found, whether it is used.
        num_blocks: Number of blocks.
        num_entries: Number of entries of all segments.
    """

    segments: tuple[Segment, ...]
    values: torch.Tensor
    state: torch.Tensor
    num_blocks: int
    num_entries: int

    @property
    def counts(self) -> list[int]:
        """Number of entries of each segment."""
        return [segment.kept for segment in self.segments]


def table_of(segments: Sequence[Segment], block: int, device: torch.device) -> Table:
    """Make the table of some segments, in two small copies to the device.

    Args:
        segments: In the order of their entries.
        block: Elements of a block.
        device: Where the bucket is.
    """
    num_blocks = [-(-segment.length // block) for segment in segments]
    first_blocks = [0, *accumulate(num_blocks)]
    entries = [0, *accumulate(segment.kept for segment in segments)]
    count = torch.tensor(num_blocks, device="cpu")
    of_block = torch.repeat_interleave(torch.arange(len(segments), device="cpu"), count)
    begun = torch.tensor(first_blocks[:-1], device="cpu")
    first = (torch.arange(first_blocks[-1], device="cpu") - begun[of_block]) * block
    rows = [
        [segment.start for segment in segments],
        [segment.length for segment in segments],
        [segment.owed for segment in segments],
        [segment.kept for segment in segments],
        entries[:-1],
        first_blocks[:-1],
        num_blocks,
    ]
    values = torch.cat([of_block, first, torch.tensor(rows, device="cpu").flatten()])
    zeros = [0] * len(segments)
    state = torch.tensor([rows[3], zeros, zeros], dtype=torch.int32, device="cpu")
    return Table(
        tuple(segments),
        values.to(device, non_blocking=True),
        state.to(device, non_blocking=True),
        first_blocks[-1],
        entries[-1],
    )


@dataclass(frozen=True, slots=True, eq=False)
class Entries:
    """What is sent of some segments, one after the other, each ascending.

    Attributes:
        positions: int32 ``[entries]``, in the bucket.
        values: ``[entries]``, dtype of the bucket, or of the residual.
    """

    positions: torch.Tensor
    values: torch.Tensor

    @classmethod
    def empty(cls, count: int, dtype: torch.dtype, device: torch.device) -> Entries:
        """Make room for so many."""
        return cls(
            torch.empty(count, dtype=torch.int32, device=device),
            torch.empty(count, dtype=dtype, device=device),
        )


@dataclass(frozen=True, slots=True, eq=False)
class Operands:
    """What a selection works on.

    Attributes:
        bucket: Flat gradients; float32, bfloat16 or float16. Its segments are zeros afterwards.
        source: Flat residual; float32 or bfloat16.
        target: Flat residual that is written; may be ``source``.
        scale: float32 ``[]``: by what gradients are multiplied, and the residual is not.
        size: float32 ``[]``: number of ranks; what is sent is divided by it.
    """

    bucket: torch.Tensor
    source: torch.Tensor
    target: torch.Tensor
    scale: torch.Tensor
    size: torch.Tensor


class Selection(Protocol):
    """Selects entries of a bucket."""

    @property
    def block(self) -> int:
        """Elements of a block of its tables."""
        ...

    def __call__(self, operands: Operands, table: Table, entries: Entries) -> None:
        """Take the entries out of a bucket.

        Args:
            operands: The bucket, and what belongs to it.
            table: Where what is.
            entries: Filled.
        """
        ...


class TorchSelection:
    """Selection by PyTorch's own operations: the elements of all segments are sorted by segment and magnitude."""

    #: Of its tables, blocks are not read.
    block = 1 << 30

    def __call__(self, operands: Operands, table: Table, entries: Entries) -> None:
        """See `Selection`."""
        bucket, source, target = operands.bucket, operands.source, operands.target
        segments, device = table.segments, bucket.device
        starts, lengths, _, kept, outs, *_ = (
            table.values[2 * table.num_blocks :].view(7, -1).unbind()
        )
        elements = sum(segment.length for segment in segments)
        number = torch.repeat_interleave(
            torch.arange(len(segments), device=device), lengths, output_size=elements
        )
        gradients = [bucket[s.start : s.start + s.length] for s in segments]
        gradient = torch.cat(gradients)
        # A sum with -0.0 has the other addend's bits, also where that is -0.0.
        nothing = torch.full((), -0.0, dtype=source.dtype, device=device)
        owed = torch.cat(
            [
                nothing.expand(s.length) if s.is_whole else source[s.owed : s.owed + s.length]
                for s in segments
            ]
        )
        # In float32: a device would round the scale to the residual's dtype first.
        total = (owed.float() * operands.scale).to(owed.dtype).add_(gradient)
        is_used = torch.stack(torch._foreach_norm(gradients, torch.inf)) != 0
        torch._foreach_zero_(gradients)
        key = number << 31 | (0x7FFFFFFF - pattern(total))
        order = torch.sort(key, stable=True).indices
        begun = lengths.cumsum(0) - lengths
        of_entry = torch.repeat_interleave(
            torch.arange(len(segments), device=device), kept, output_size=table.num_entries
        )
        rank = torch.arange(table.num_entries, device=device) - outs[of_entry]
        chosen = order[begun[of_entry] + rank].sort().values
        values = total[chosen].to(entries.values.dtype)
        is_sent = (is_used | (kept == lengths))[of_entry]
        values = torch.where(is_sent, values, torch.zeros_like(values))
        total.index_copy_(0, chosen, total[chosen] - values.to(total.dtype))
        total = (total.float() / operands.scale).to(total.dtype).nan_to_num_(0.0, 0.0, 0.0)
        parts = zip(total.split([s.length for s in segments]), segments, strict=True)
        left = [(part, s) for part, s in parts if not s.is_whole]
        if left:
            torch._foreach_copy_(
                [target[s.owed : s.owed + s.length] for _, s in left], [part for part, _ in left]
            )
        own = chosen - begun[of_entry]
        entries.positions.copy_(own + starts[of_entry])
        entries.values.copy_(values.float() / operands.size)


def pattern(values: torch.Tensor) -> torch.Tensor:
    """Magnitudes as int64 of 31 bits that order as magnitudes do, all NaN alike above infinity.

    Args:
        values: float32 or bfloat16.
    """
    if values.element_size() == 2:
        found = values.view(torch.int16).long().bitwise_and_(0x7FFF).bitwise_left_shift_(16)
    else:
        found = values.view(torch.int32).long().bitwise_and_(0x7FFFFFFF)
    return found.masked_fill_(found > 0x7F800000, 0x7FFFFFFF)
