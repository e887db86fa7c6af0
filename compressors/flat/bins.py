"""Values in few bits over whole buckets: what `lowdiff.compressors.binned` does to one parameter, for all in a fixed number of operations.

Each parameter of a bucket has bins of its own. Parameters that are sent whole keep their values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

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
        means: ``[parameters * bins]``, dtype of the bucket: mean magnitudes, divided by the number of ranks.
        whole: Values of parameters sent whole, one after the other; dtype of the bucket, divided by the number of ranks.
    """

    codes: torch.Tensor
    means: torch.Tensor
    whole: torch.Tensor


class Bins:
    """How the entries of one bucket are cut into bins, and sent.

    Exchanges read its tensors on other streams, so it has to live until they are over.

    Args:
        value_bits: Of a code.
        places: Which entries are whose.
        dtype: Of the bucket.
    """

    def __init__(self, value_bits: int, places: Places, dtype: torch.dtype) -> None:
        device, parts = places.device, places.parts
        self._bits, self._dtype, self._parts = value_bits, dtype, parts
        self._count = places.count
        self._counts = _uploaded([part.count for part in parts], device)
        #: Of each entry: which parameter of the bucket it is of.
        self._part = _repeated(self._counts, self._count)
        whole = [part for part in parts if part.is_whole]
        #: Which entries are of parameters sent whole.
        self._whole = _ranges([(part.first, part.count) for part in whole], device)

    def round(
        self, entries: Entries, owed: Sequence[Owed], scale: torch.Tensor, size: torch.Tensor
    ) -> Binned:
        """Cut what was selected into bins, and keep in the residual what that takes away.

        Args:
            entries: What was selected, in the residual's dtype, not divided by the number of ranks.
            owed: The residuals, of which what was selected is taken away already.
            scale: float32 ``[]``: by what gradients are multiplied, and residuals are not.
            size: float32 ``[]``: number of ranks.
        """
        exact, part = entries.values, self._part
        codes, means = self._cut(exact)
        restored = _signed(means, self._bits).index_select(0, self._numbers(codes))
        # Of a parameter that nobody used zeros are sent, and all of it is owed.
        is_used = self._of_parts((exact != 0).double(), "max") != 0
        for own in owed:
            rows = _ranges([(p.first, p.count) for p in own.parts], exact.device)
            of_rows = part.index_select(0, rows)
            begun = dict(zip(own.parts, own.starts, strict=True))
            moves = [begun.get(p, 0) - p.start for p in self._parts]
            places = entries.positions.index_select(0, rows).long()
            places += _uploaded(moves, exact.device).index_select(0, of_rows)
            rest = exact.index_select(0, rows) - restored.index_select(0, rows).to(exact.dtype)
            rest = (rest.float() / scale).to(exact.dtype).nan_to_num_(0.0, 0.0, 0.0)
            used = is_used.index_select(0, of_rows)
            own.slot.index_copy_(0, places, torch.where(used, rest, own.slot[places]))
        whole = exact.index_select(0, self._whole)
        return Binned(codes, self._divided(means, size), self._divided(whole, size))

    def _cut(self, exact: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return codes of all entries, and means of all bins before the division; see `binned`."""
        integer, count = INT_OF_BYTES[exact.element_size()], num_bins(self._bits)
        patterns = exact.view(integer)
        keys = (patterns & torch.iinfo(integer).max).long()
        bounds = keys.double()
        least = self._of_parts(bounds, "min").long()
        width = torch.div(
            self._of_parts(bounds, "max").long() - least, count, rounding_mode="floor"
        )
        width += 1
        keys -= least.index_select(0, self._part)
        bins = torch.div(keys, width.index_select(0, self._part), rounding_mode="floor")
        # In order, because a device adds up in any order where several threads write to one place.
        group, order = torch.sort((self._part * count + bins).int(), stable=True)
        ends = torch.arange(len(self._parts) * count + 1, dtype=torch.int32, device=exact.device)
        sizes = torch.searchsorted(group, ends).diff()
        sums = torch.segment_reduce(
            exact.abs().double().index_select(0, order),
            "sum",
            lengths=sizes,
            unsafe=True,
            initial=0.0,
        )
        means = (sums / sizes.clamp(min=1)).to(self._dtype)
        return (bins + (patterns < 0) * count).to(torch.uint8), means

    def _of_parts(self, values: torch.Tensor, reduction: str) -> torch.Tensor:
        """Return the least or largest of each parameter's entries."""
        return torch.segment_reduce(values, reduction, lengths=self._counts, unsafe=True)

    def _numbers(self, codes: torch.Tensor) -> torch.Tensor:
        """Return which of all bins' signed means codes stand for."""
        return self._part * (1 << self._bits) + codes

    def _divided(self, values: torch.Tensor, size: torch.Tensor) -> torch.Tensor:
        return (values.to(self._dtype).float() / size).to(self._dtype)

    def values(self, binned: Binned) -> torch.Tensor:
        """Return the values that are added up, ``[entries]``; none of a bin is -0.0."""
        signed = _signed(binned.means, self._bits).add_(0.0)
        found = signed.index_select(0, self._numbers(binned.codes))
        return found.index_copy_(0, self._whole, binned.whole) if binned.whole.numel() else found

    def wire(self, positions: torch.Tensor, binned: Binned) -> Wire:
        """Return what is sent: ``[header | positions | whole values | means | codes]``, each padded to 8 bytes.

        Its values are in none of its bytes, and left out; `view` has those of what a rank has sent.
        """
        head = torch.empty(HEADER_BYTES, dtype=torch.uint8, device=positions.device)
        parts = [head, positions, binned.whole, binned.means, packed(binned.codes, self._bits)]
        data = torch.cat([_padded(part.view(torch.uint8)) for part in parts])
        return Wire(data, data[:HEADER_BYTES].view(torch.int64), positions, binned.whole[:0])

    def view(self, data: torch.Tensor) -> Wire:
        """Look at what a rank sent."""
        width, num_means = self._dtype.itemsize, len(self._parts) * num_bins(self._bits)
        sizes = [
            HEADER_BYTES,
            4 * self._count,
            self._whole.numel() * width,
            num_means * width,
            -(-self._count * self._bits // 8),
        ]
        begun = [0, *accumulate(size + -size % 8 for size in sizes)]
        parts = (data[start : start + size] for start, size in zip(begun, sizes, strict=False))
        head, positions, whole, means, codes = parts
        binned = Binned(
            unpacked(codes, self._bits, self._count),
            means.view(self._dtype),
            whole.view(self._dtype),
        )
        return Wire(data, head.view(torch.int64), positions.view(torch.int32), self.values(binned))


def _signed(means: torch.Tensor, value_bits: int) -> torch.Tensor:
    """Return what each parameter's codes stand for, by code."""
    rows = means.view(-1, num_bins(value_bits))
    return torch.cat([rows, -rows], 1).flatten()


def _ranges(ranges: Sequence[tuple[int, int]], device: torch.device) -> torch.Tensor:
    """Return all numbers of some ranges, each given by its first number and their count: int64."""
    counts = [count for _, count in ranges]
    begun = [0, *accumulate(counts)]
    moves = _uploaded(
        [first - start for (first, _), start in zip(ranges, begun, strict=False)], device
    )
    which = _repeated(_uploaded(counts, device), begun[-1])
    return torch.arange(begun[-1], device=device) + moves.index_select(0, which)


def _repeated(counts: torch.Tensor, total: int) -> torch.Tensor:
    """Return the number of each of some groups, as often as it has elements: int64."""
    numbers = torch.arange(counts.numel(), device=counts.device)
    return torch.repeat_interleave(numbers, counts, output_size=total)


def _uploaded(numbers: Sequence[int], device: torch.device) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int64, device="cpu").to(device, non_blocking=True)


def _padded(data: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(data, (0, -data.numel() % 8))
