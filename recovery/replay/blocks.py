"""Cutting the layout into pieces that replay with the very bits of the live run.

torch's kernels walk a tensor in intra-op chunks, each with a vector body and a scalar tail that
may round differently. A block therefore never spans two parameters or two chunks, and starts at a
multiple of 64 elements from its chunk's start.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lowdiff.types import Block, Layout

_ALIGNMENT = 64
#: Elements below which torch does not split an element-wise kernel over threads.
_GRAIN = 32768


@dataclass(frozen=True, slots=True)
class Unit:
    """Blocks that one worker steps together through all differentials.

    Attributes:
        optimizer: Index of the optimizer that owns them.
        blocks: In layout order.
    """

    optimizer: int
    blocks: tuple[Block, ...]

    @property
    def elements(self) -> int:
        """Number of elements."""
        return sum(block.stop - block.start for block in self.blocks)

    @property
    def scratch_elements(self) -> int:
        """Elements of memory for its gradient; many small blocks need far more than they hold."""
        return sum(aligned(block.stop - block.start) for block in self.blocks)


def aligned(count: int) -> int:
    """Elements of memory for a block's gradient, so that the next one starts on a vector."""
    return count + -count % 16


def chunks(numel: int, num_threads: int, *, fused: bool) -> Iterator[tuple[int, int]]:
    """The live run's intra-op chunks of one parameter, as ``[start, stop)``.

    Fused kernels cut at whole vectors, which is no cut at all as far as bits are concerned.
    """
    parts = 1 if fused else max(1, min(num_threads, -(-numel // _GRAIN)))
    size = -(-numel // parts)
    for start in range(0, numel, max(1, size)):
        yield start, min(start + size, numel)


def parameter_blocks(
    parameter: int, numel: int, *, num_threads: int, fused: bool, block_elements: int
) -> Iterator[Block]:
    """Cut one parameter for an element-wise optimizer.

    Not before its last element: of a block of one nobody could tell a number for the whole parameter
    from the state of that element. Blocks of 64, the smallest, leave no other way.
    """
    assert block_elements % _ALIGNMENT == 0
    if numel == 0:
        yield Block(parameter, 0, 0)  # its optimizer counts steps all the same
    for first, last in chunks(numel, num_threads, fused=fused):
        start = first
        while start < last:
            stop = min(start + block_elements, last)
            if stop == last - 1 and block_elements > _ALIGNMENT:
                stop -= _ALIGNMENT
            yield Block(parameter, start, stop)
            start = stop


def element_units(
    layout: Layout,
    owners: Sequence[tuple[int, bool]],
    *,
    num_threads: int,
    block_elements: int,
) -> list[Unit]:
    """Units of at most ``block_elements`` elements; small parameters share one.

    Args:
        layout: The layout.
        owners: Per parameter: its optimizer, and whether that one runs a fused kernel.
        num_threads: Intra-op threads of the live run.
        block_elements: A multiple of 64.
    """
    units: list[Unit] = []
    for i, spec in enumerate(layout.parameters):
        optimizer, fused = owners[i]
        for block in parameter_blocks(
            i, spec.numel, num_threads=num_threads, fused=fused, block_elements=block_elements
        ):
            last = units[-1] if units else None
            size = block.stop - block.start
            if last and last.optimizer == optimizer and last.elements + size <= block_elements:
                units[-1] = Unit(optimizer, (*last.blocks, block))
            else:
                units.append(Unit(optimizer, (block,)))
    return units


def tensor_units(layout: Layout, owners: Sequence[tuple[int, bool]]) -> list[Unit]:
    """One unit per parameter, for optimizers that couple a tensor's elements."""
    return [
        Unit(owners[i][0], (Block(i, 0, spec.numel),)) for i, spec in enumerate(layout.parameters)
    ]


def optimizer_units(layout: Layout, owners: Sequence[tuple[int, bool]]) -> list[Unit]:
    """One unit per optimizer, for those that couple tensors."""
    blocks: dict[int, list[Block]] = {}
    for i, spec in enumerate(layout.parameters):
        blocks.setdefault(owners[i][0], []).append(Block(i, 0, spec.numel))
    return [Unit(optimizer, tuple(own)) for optimizer, own in blocks.items()]
