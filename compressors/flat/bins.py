"""Values in few bits over whole buckets: what `lowdiff.compressors.binned` does to one parameter, in as many operations for all.

Each parameter of a bucket has bins of its own. Parameters that are sent whole keep their values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lowdiff.compressors.binned import num_bins, packed, unpacked
from lowdiff.compressors.exchange import HEADER_BYTES, Wire
from lowdiff.compressors.flat.selection import Entries
from lowdiff.compressors.flat.sent import Place, Places
from lowdiff.core.layout import INT_OF_BYTES


@dataclass(frozen=True, slots=True, eq=False)
class Owed:
    """Where a slot of residuals has what is owed to some parameters of a bucket.

    Attributes:
        slot: Flat residuals, of one dtype.
        parts: The parameters; none is sent whole.
        starts: Where the residual of each begins in the slot.
    """

    slot: torch.Tensor
    parts: Sequence[Place]
    starts: Sequence[int]


@dataclass(frozen=True, slots=True, eq=False)
class Binned:
    """What is sent of a bucket.

    Attributes:
        codes: uint8 ``[entries]``; see `lowdiff.compressors.binned.binned`. Of parameters sent whole they say nothing.
        means: ``[parameters, bins]``, dtype of the bucket: mean magnitudes, divided by the number of ranks.
    """

    codes: torch.Tensor
    means: torch.Tensor


class Bins:
    """How the entries of one bucket are cut into bins, and sent.

    Args:
        value_bits: Of a code.
        places: Which entries are whose.
    """

    def __init__(self, value_bits: int, places: Places) -> None:
        self._bits = value_bits
        self._parts, self._count = places.parts, places.count
        #: Of each entry: which parameter of the bucket it is of.
        self._part = _repeated([part.count for part in places.parts], places.device)
        #: Where the entries of parameters lie that are sent whole, and how many these are.
        self._whole = [slice(p.first, p.first + p.count) for p in places.parts if p.is_whole]
        self._num_whole = sum(place.stop - place.start for place in self._whole)

    def round(
        self, entries: Entries, owed: Sequence[Owed], scale: torch.Tensor, size: torch.Tensor
    ) -> Binned:
        """Cut what was selected into bins, and keep in the residual what that takes away.

        Args:
            entries: What was selected, not yet divided by the number of ranks. Values of parameters sent whole are then.
            owed: The residuals, of which what was selected is taken away already.
            scale: float32 ``[]``: by what gradients are multiplied, and residuals are not.
            size: float32 ``[]``: number of ranks.
        """
        values, part = entries.values, self._part
        of_part = torch.zeros(len(self._parts), dtype=torch.int32, device=values.device)
        # Of a parameter that nobody used zeros are sent, and all of it is owed.
        is_used = of_part.scatter_reduce(0, part, (values != 0).int(), "amax") != 0
        dtype = owed[0].slot.dtype if owed else values.dtype
        exact, left = values.to(dtype), []
        for own in owed:
            rows, places = _rows(own, entries.positions)
            known = own.slot.index_select(0, places)
            # A value of half the residual's width was rounded when it was selected.
            total = exact[rows].float() + known.float() * scale
            used = is_used[part[rows]]
            exact.index_copy_(0, rows, torch.where(used, total.to(dtype), exact[rows]))
            left.append((own.slot, rows, places, known, used))
        binned, restored = self._cut(exact, values.dtype, size)
        for slot, rows, places, known, used in left:
            rest = exact[rows] - restored[rows].to(dtype)
            rest = (rest.float() / scale).to(dtype).nan_to_num_(0.0, 0.0, 0.0)
            slot.index_copy_(0, places, torch.where(used, rest, known))
        for whole in self._whole:
            values[whole].copy_(values[whole].float() / size)
        return binned

    def _cut(
        self, exact: torch.Tensor, dtype: torch.dtype, size: torch.Tensor
    ) -> tuple[Binned, torch.Tensor]:
        """Return codes and means, and the values that they stand for before the division; see `binned`."""
        integer, count, part = INT_OF_BYTES[exact.element_size()], num_bins(self._bits), self._part
        patterns = exact.view(integer)
        most = torch.iinfo(integer).max
        keys = (patterns & most).long()
        bounds = torch.full((len(self._parts),), most, dtype=torch.int64, device=exact.device)
        least = bounds.scatter_reduce(0, part, keys, "amin")
        largest = torch.zeros_like(bounds).scatter_reduce(0, part, keys, "amax")
        width = torch.div(largest - least, count, rounding_mode="floor") + 1
        bins = torch.div(keys - least[part], width[part], rounding_mode="floor")
        # In order, because a device adds up in an order of its own where several threads write to one place.
        group = part * count + bins
        order = torch.argsort(group, stable=True)
        sizes = torch.zeros(len(self._parts) * count, dtype=torch.int64, device=exact.device)
        sizes.scatter_add_(0, group, torch.ones_like(group))
        magnitudes = exact.abs().double().index_select(0, order)
        sums = torch.segment_reduce(magnitudes, "sum", lengths=sizes, unsafe=True, initial=0.0)
        means = (sums / sizes.clamp(min=1)).to(dtype)
        negative = (patterns < 0).long()
        codes = (bins + negative * count).to(torch.uint8)
        signed = means.view(-1, 1, count) * means.new_tensor([1.0, -1.0]).view(1, 2, 1)
        restored = signed.flatten().index_select(0, part * 2 * count + codes.long())
        divided = (means.float() / size).to(dtype).view(-1, count)
        return Binned(codes, divided), restored

    def wire(self, entries: Entries, binned: Binned) -> Wire:
        """Return what is sent: ``[header | positions | values of whole parameters | means | codes]``, each padded to 8 bytes."""
        dtype = entries.values.dtype
        whole = [entries.values[place] for place in self._whole]
        parts = [
            torch.empty(HEADER_BYTES, dtype=torch.uint8, device=entries.positions.device),
            entries.positions,
            torch.cat(whole) if whole else entries.values[:0],
            binned.means.flatten(),
            packed(binned.codes, self._bits),
        ]
        flat = [_padded(part.view(torch.uint8)) for part in parts]
        return self.view(torch.cat(flat), dtype)

    def view(self, data: torch.Tensor, dtype: torch.dtype) -> Wire:
        """Look at what a rank sent; values are those that its codes stand for."""
        width, count = dtype.itemsize, num_bins(self._bits)
        sizes = [
            HEADER_BYTES,
            4 * self._count,
            self._num_whole * width,
            len(self._parts) * count * width,
            -(-self._count * self._bits // 8),
        ]
        taken = iter(data[: sum(map(_up, sizes))].split([*map(_up, sizes)]))
        head, positions, whole, means, codes = (next(taken)[:size] for size in sizes)
        signed = means.view(dtype).view(-1, 1, count)
        signed = (signed * signed.new_tensor([1.0, -1.0]).view(1, 2, 1)).flatten()
        numbers = unpacked(codes, self._bits, self._count).long()
        values = signed.index_select(0, self._part * 2 * count + numbers)
        kept = whole.view(dtype).split([place.stop - place.start for place in self._whole])
        for place, own in zip(self._whole, kept, strict=True):
            values[place].copy_(own)
        return Wire(data, head.view(torch.int64), positions.view(torch.int32), values)


def _rows(owed: Owed, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return which entries are of some parameters, and the places of their elements in the slot."""
    device, counts = positions.device, [part.count for part in owed.parts]
    part = _repeated(counts, device)
    begun = [0]
    for count in counts[:-1]:
        begun.append(begun[-1] + count)
    moves = zip(owed.parts, owed.starts, begun, strict=True)
    table = torch.tensor(
        [(own.first - first, start - own.start) for own, start, first in moves], device="cpu"
    ).to(device, non_blocking=True)
    to_row, to_place = table[part].unbind(1)
    rows = torch.arange(sum(counts), device=device) + to_row
    return rows, positions.index_select(0, rows).long() + to_place


def _repeated(counts: Sequence[int], device: torch.device) -> torch.Tensor:
    """Return the number of each of some groups, as often as it has elements: int64."""
    sizes = torch.tensor(counts, device="cpu").to(device, non_blocking=True)
    numbers = torch.arange(len(counts), device=device)
    return torch.repeat_interleave(numbers, sizes, output_size=sum(counts))


def _up(size: int) -> int:
    return size + -size % 8


def _padded(data: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(data, (0, -data.numel() % 8))
