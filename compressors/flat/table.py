"""Where each parameter of a bucket lies, and how much of it is kept: the table that kernels go by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

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
