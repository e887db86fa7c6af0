"""The Triton kernels as operators of PyTorch, and the selection that calls them in turn.

An operator is one launch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from lowdiff.compressors.flat import kernels
from lowdiff.compressors.flat.selection import Entries, Operands, Table
from lowdiff.core import devices
from lowdiff.core.operators import operator

#: Bits of the three digits of a pattern; a parameter's counts have room for each.
_DIGITS = 9, 11, 11
_WIDTH = 1 << max(_DIGITS)
#: No product and sum become one operation that rounds once: the bits are those of PyTorch's operations in turn.
_LAUNCH: dict[str, Any] = {"num_warps": 8, "enable_fp_fusion": False}

_BLOCKS = "Tensor table, int num_blocks, int num_segments, int block, int chunk"
_ROOMS = "Tensor{} rooms, Tensor{} totals, Tensor{} sizes, int room"


def _roomy(marks: str = "") -> str:
    return _ROOMS.format(*(f"({mark}!)" for mark in marks) if marks else ("", "", ""))


def _launch_add_up(*given: Any) -> None:
    *tensors, table, num_blocks, num_segments, block, chunk = given
    kernels.add_up[(num_blocks,)](
        *tensors, table, num_blocks, num_segments,
        BLOCK=block, CHUNK=chunk, WIDTH=_WIDTH, SHIFT=31 - _DIGITS[0], BITS=_DIGITS[0], **_LAUNCH,
    )  # fmt: skip


def _launch_find(counts: Any, state: Any, num_segments: int, bits: int) -> None:
    kernels.find[(num_segments,)](counts, state, num_segments, BITS=bits, WIDTH=_WIDTH, **_LAUNCH)


def _launch_gather(*given: Any) -> None:
    target, state, rooms, totals, sizes, room, table, *numbers = given
    num_blocks, num_segments, block, chunk = numbers
    kernels.gather[(num_blocks,)](
        target, state, rooms, totals, sizes, table, num_blocks, num_segments,
        BLOCK=block, CHUNK=chunk, ROOM=room, SHIFT=31 - _DIGITS[0], **_LAUNCH,
    )  # fmt: skip


def _launch_count(*given: Any) -> None:
    target, state, counts, rooms, totals, sizes, room, table, *numbers, shift, bits = given
    num_blocks, num_segments, block, chunk = numbers
    kernels.count[(num_blocks,)](
        target, state, counts, rooms, totals, sizes, table, num_blocks, num_segments,
        BLOCK=block, CHUNK=chunk, ROOM=room, WIDTH=_WIDTH, SHIFT=shift, BITS=bits, **_LAUNCH,
    )  # fmt: skip


def _launch_tally(*given: Any) -> None:
    target, state, above, equal, rooms, totals, sizes, room, table, *numbers = given
    num_blocks, num_segments, block, chunk = numbers
    kernels.tally[(num_blocks,)](
        target, state, rooms, totals, sizes, above, equal, table, num_blocks, num_segments,
        BLOCK=block, CHUNK=chunk, ROOM=room, **_LAUNCH,
    )  # fmt: skip


def _launch_place(*given: Any) -> None:
    state, above, equal, table, num_blocks, num_segments, _, chunk = given
    kernels.place[(num_segments,)](
        state, above, equal, table, num_blocks, num_segments, CHUNK=chunk, **_LAUNCH
    )


def _launch_write(*given: Any) -> None:
    target, size, state, above, equal, positions, values, *rest = given
    rooms, totals, sizes, room, table, num_blocks, num_segments, block, chunk = rest
    kernels.write[(num_blocks,)](
        target, size, state, rooms, totals, sizes, above, equal, positions, values, table, num_blocks, num_segments,
        BLOCK=block, CHUNK=chunk, ROOM=room, **_LAUNCH,
    )  # fmt: skip


def _launch_unscale(*given: Any) -> None:
    target, scale, table, num_blocks, num_segments, block, chunk = given
    kernels.unscale[(num_blocks,)](
        target, scale, table, num_blocks, num_segments, BLOCK=block, CHUNK=chunk, **_LAUNCH
    )


_ENTRIES = "Tensor({}!) positions, Tensor({}!) values"
_add_up = operator(
    "topk_add_up(Tensor(a!) bucket, Tensor source, Tensor(b!) target, Tensor scale, Tensor size, Tensor(c!) state, "
    f"Tensor(d!) counts, {_ENTRIES.format(*'ef')}, {_BLOCKS})",
    _launch_add_up,
)
_find = operator(
    "topk_find(Tensor(a!) counts, Tensor(b!) state, int num_segments, int bits)", _launch_find
)
_gather = operator(
    f"topk_gather(Tensor target, Tensor state, {_roomy('abc')}, {_BLOCKS})", _launch_gather
)
_count = operator(
    f"topk_count(Tensor target, Tensor state, Tensor(a!) counts, {_roomy()}, {_BLOCKS}, int shift, int bits)",
    _launch_count,
)
_tally = operator(
    f"topk_tally(Tensor target, Tensor state, Tensor(a!) above, Tensor(b!) equal, {_roomy()}, {_BLOCKS})",
    _launch_tally,
)
_place = operator(
    f"topk_place(Tensor state, Tensor(a!) above, Tensor(b!) equal, {_BLOCKS})", _launch_place
)
_write = operator(
    "topk_write(Tensor(a!) target, Tensor size, Tensor state, Tensor above, Tensor equal, "
    f"{_ENTRIES.format(*'bc')}, {_roomy()}, {_BLOCKS})",
    _launch_write,
)
_unscale = operator(f"topk_unscale(Tensor(a!) target, Tensor scale, {_BLOCKS})", _launch_unscale)


@dataclass(frozen=True, slots=True)
class Sizes:
    """How work is divided.

    Attributes:
        block: Elements of a block.
        chunk: Of these, how many a program takes at once; a power of two that divides the block.
        room: Candidates of a block that are kept apart.
        few: Of these, how many a program takes at once; a power of two.
    """

    block: int = 8192
    chunk: int = 2048
    room: int = 1024
    few: int = 512


@dataclass(slots=True, eq=False)
class _Rooms:
    """Scratch memory, kept from bucket to bucket: they are worked on one after the other."""

    counts: torch.Tensor
    places: torch.Tensor
    totals: torch.Tensor
    of_block: torch.Tensor


@dataclass(slots=True, eq=False)
class TritonSelection:
    """Selection by kernels of Triton; see `lowdiff.compressors.flat.kernels`.

    Attributes:
        sizes: How work is divided.
    """

    sizes: Sizes = field(default_factory=Sizes)
    #: By dtype of the residual, and by stream.
    _rooms: dict[tuple[torch.dtype, int], _Rooms] = field(default_factory=dict)

    @property
    def block(self) -> int:
        """See `Selection`."""
        return self.sizes.block

    def __call__(self, operands: Operands, table: Table, entries: Entries) -> None:
        """See `Selection`."""
        try:
            self._select(operands, table, entries)
        except BaseException:
            self._rooms.clear()  # counts that were not cleared again
            raise

    def _select(self, operands: Operands, table: Table, entries: Entries) -> None:
        bucket, source, target = operands.bucket, operands.source, operands.target
        scale, size = operands.scale, operands.size
        of_entries = entries.positions, entries.values
        num_segments, state = len(table.segments), table.state.clone()
        rooms = self._rooms_for(target, table)
        counts = rooms.counts[: num_segments * _WIDTH]
        sizes, above, equal = rooms.of_block[:, : table.num_blocks].unbind()
        numbers = table.values, table.num_blocks, num_segments, self.sizes.block
        of_blocks, of_few = (*numbers, self.sizes.chunk), (*numbers, self.sizes.few)
        filled = table.num_blocks * self.sizes.room
        candidates = rooms.places[:filled], rooms.totals[:filled], sizes, self.sizes.room
        _add_up(bucket, source, target, scale, size, state, counts, *of_entries, *of_blocks)
        _find(counts, state, num_segments, _DIGITS[0])
        _gather(target, state, *candidates, *of_blocks)
        left = 31 - _DIGITS[0]
        for bits in _DIGITS[1:]:
            left -= bits
            _count(target, state, counts, *candidates, *of_few, left, bits)
            _find(counts, state, num_segments, bits)
        _tally(target, state, above, equal, *candidates, *of_few)
        _place(state, above, equal, *of_blocks)
        _write(target, size, state, above, equal, *of_entries, *candidates, *of_few)
        _unscale(target, scale, *of_blocks)

    def _rooms_for(self, target: torch.Tensor, table: Table) -> _Rooms:
        """Return scratch memory that is large enough."""
        key = target.dtype, devices.queue_of(target.device)
        rooms = self._rooms.get(key)
        blocks, counts = table.num_blocks, len(table.segments) * _WIDTH
        if rooms is not None:
            blocks = max(blocks, rooms.of_block.shape[1])
            counts = max(counts, rooms.counts.numel())
        if rooms is None or (blocks, counts) != (rooms.of_block.shape[1], rooms.counts.numel()):
            size, device = blocks * self.sizes.room, target.device
            rooms = self._rooms[key] = _Rooms(
                torch.zeros(counts, dtype=torch.int32, device=device),
                torch.empty(size, dtype=torch.int32, device=device),
                torch.empty(size, dtype=target.dtype, device=device),
                torch.empty(3, blocks, dtype=torch.int32, device=device),
            )
        return rooms
