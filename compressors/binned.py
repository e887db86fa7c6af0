"""Selected entries whose values travel and are stored as a sign and a magnitude bin.

A rank cuts the magnitudes of a parameter's selected entries into bins of equal width on a
logarithmic scale and sends each entry as the mean of its bin. Error feedback keeps the difference.
Each rank stores its own positions, codes and means; recovery adds what all ranks sent in rank
order, as the hook did.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.distributed as dist

from lowdiff.compressors.consumed import corrected
from lowdiff.compressors.feedback import is_used
from lowdiff.compressors.represented import RepresentedReducer
from lowdiff.compressors.sections import floats, listed, pieces
from lowdiff.compressors.settings import SparseSettings
from lowdiff.compressors.sparse import MagnitudeSelector
from lowdiff.core import devices
from lowdiff.core.layout import INT_OF_BYTES, torch_dtype
from lowdiff.core.memory import array_of
from lowdiff.errors import ReplayMismatch
from lowdiff.protocols import Decoder, ResidualStore
from lowdiff.types import Block, Layout, Payload, Section


def binned(values: torch.Tensor, value_bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes of some values, and the mean magnitude of each bin.

    The bins have equal widths between the smallest and the largest bit pattern without the sign.
    A bit pattern grows with the logarithm of the magnitude, linearly between powers of two, so the
    bins are exact integer ranges of any dtype. Zero is the smallest pattern: where zeros are
    selected, the lowest bin holds little else.

    Reference: Lin et al., "Deep Gradient Compression", ICLR 2018, for the selected entries;
    Dettmers, "8-Bit Approximations for Parallelism in Deep Learning", ICLR 2016, for magnitudes on a
    logarithmic scale. We use 2 or 4 bits, between the extremes of the entries at hand, and send a
    bin's mean in place of a fixed level.

    Args:
        values: Float tensor ``[k]``, ``k >= 1``, of any width.
        value_bits: Bits of a code, 2 or 4.

    Returns:
        Codes, uint8 ``[k]``: the bin, plus ``2 ** (value_bits - 1)`` if the sign is negative; and means,
        float64 ``[2 ** (value_bits - 1)]``, 0.0 for an empty bin. A bin with NaN or infinity has such a
        mean.
    """
    integer = INT_OF_BYTES[values.element_size()]
    patterns = values.view(integer)
    keys = patterns & torch.iinfo(integer).max
    count = num_bins(value_bits)
    least, most = keys.aminmax()
    width = torch.div(most - least, count, rounding_mode="floor") + 1
    bins = torch.div(keys - least, width, rounding_mode="floor")
    magnitudes = values.abs().double()
    means = []
    for number in range(count):
        inside = bins == number
        total = torch.where(inside, magnitudes, 0.0).sum()
        means.append(total / inside.sum().clamp_(min=1))
    return bins.to(torch.uint8) + (patterns < 0).to(torch.uint8) * count, torch.stack(means)


def restored(codes: torch.Tensor, means: torch.Tensor) -> torch.Tensor:
    """Return the values that codes stand for: ``[k]``, in the dtype of the means."""
    return torch.cat([means, -means]).index_select(0, codes.int())


def num_bins(value_bits: int) -> int:
    """Return the number of magnitude bins: 2 or 8."""
    return 1 << (value_bits - 1)


def packed(codes: torch.Tensor, value_bits: int) -> torch.Tensor:
    """Return codes as bytes, uint8 ``[ceil(k * value_bits / 8)]``, the first in the lowest bits."""
    each = 8 // value_bits
    padded = torch.nn.functional.pad(codes, (0, -codes.numel() % each)).view(-1, each)
    whole = padded[:, 0].clone()
    for i in range(1, each):
        whole |= padded[:, i] << (value_bits * i)
    return whole


def unpacked(whole: torch.Tensor, value_bits: int, count: int) -> torch.Tensor:
    """Undo `packed` for ``count`` codes."""
    shifts = torch.arange(0, 8, value_bits, dtype=torch.uint8, device=whole.device)
    return ((whole[:, None] >> shifts) & ((1 << value_bits) - 1)).flatten()[:count]


@dataclass(frozen=True, slots=True)
class Sent:
    """What one rank sent of one parameter.

    Attributes:
        positions: int32 or int64 ``[k]``, ascending.
        codes: uint8 ``[k]``; see `binned`.
        means: In the gradient's dtype, already divided by the world size; see `binned`.
    """

    positions: torch.Tensor
    codes: torch.Tensor
    means: torch.Tensor


#: What every rank sent of one parameter, in rank order.
_Held = Sequence[Sent]


def add(sent: Sequence[Sent], first: int, out: torch.Tensor) -> None:
    """Add every rank's entries to a range of a parameter's gradient, in rank order.

    An element gets at most one value from each rank, so its bits do not depend on the range.

    Args:
        sent: What each rank sent of the parameter.
        first: Position of the range's first element.
        out: The range: flat, zeros.
    """
    for own in sent:
        ends = own.positions.new_tensor([first, first + out.numel()])
        begin, end = torch.searchsorted(own.positions, ends).tolist()
        values = restored(own.codes[begin:end], own.means)
        out.index_add_(0, own.positions[begin:end] - first, values)


class BinnedReducer(RepresentedReducer[_Held], ABC):
    """Sends selected entries in few bits; holds what all ranks sent.

    Parameters that are exchanged whole keep their values, which are averaged in rank order.

    Attributes:
        is_shared: Whether all ranks choose the same positions, so that these need not be gathered.
    """

    compressor: SparseSettings
    is_shared: ClassVar[bool] = True

    def __init__(
        self,
        compressor: SparseSettings,
        layout: Layout,
        residual: ResidualStore,
        group: dist.ProcessGroup | None,
        peers: Sequence[int] = (),
    ) -> None:
        super().__init__(compressor, layout, residual, group, peers)
        self.selector = MagnitudeSelector()

    @abstractmethod
    def choose(self, totals: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """Return ascending positions, int64 ``[kept]``, for each parameter.

        Args:
            totals: Layout index -> gradient plus residual of this rank.
        """

    @abstractmethod
    def position_sections(self, kept: Mapping[int, _Held], rank: int) -> list[Section]:
        """Return a rank's part of the positions; see ``RepresentedReducer.sections``."""

    def kept(self, numel: int) -> int:
        """Return how many entries of a parameter are exchanged in this step."""
        return self.compressor.kept(numel, self.step)

    @property
    def value_bits(self) -> int:
        """Return the bits of a value."""
        assert self.compressor.value_bits is not None
        return self.compressor.value_bits

    def sent_bytes(self, gradients: Mapping[int, torch.Tensor]) -> int:
        """See ``RepresentedReducer``."""
        total = 0
        for gradient in gradients.values():
            k = self.kept(gradient.numel())
            if k == gradient.numel():
                total += gradient.nbytes
            else:
                total += num_bins(self.value_bits) * gradient.element_size()
                total += -(-k * self.value_bits // 8) + (0 if self.is_shared else 4 * k)
        return total

    def average(self, gradients: Mapping[int, torch.Tensor], buffer: torch.Tensor) -> None:
        """See ``RepresentedReducer``."""
        totals = {
            i: self.feedback.total(i, gradient)
            for i, gradient in gradients.items()
            if self.kept(gradient.numel()) < gradient.numel()
        }
        chosen = self.choose(totals)
        own = {i: self._send(i, gradients[i], total, chosen[i]) for i, total in totals.items()}
        whole = {i: gradient for i, gradient in gradients.items() if i not in own}
        everyone = [own]
        if self.lane.world_size > 1:
            everyone = self._gather(own, whole)
        for i in own:
            sent = [of_rank[i] for of_rank in everyone]
            add(sent, 0, gradients[i].zero_())
            for stored in self.stored:
                stored.held[i] = sent

    def _send(
        self, parameter: int, gradient: torch.Tensor, total: torch.Tensor, chosen: torch.Tensor
    ) -> Sent:
        """Return what this rank sends of a parameter, and leave the rest in the residual."""
        values = total.index_select(0, chosen)
        used = is_used(gradient)
        if not used:
            values.zero_()
        codes, exact = binned(values, self.value_bits)
        means = exact.to(gradient.dtype)
        # A rank that chooses by itself chooses the largest entries: if these are finite, all are. Zeros in their place
        # say nothing.
        is_told = used and not self.is_shared and devices.may_look(means)
        is_finite = is_told and bool(means.isfinite().all())
        # Else an overflow among unsent entries must not go unnoticed: NaN makes a scaler skip the
        # step.
        hidden = total.sum(dtype=torch.float64) * 0 if self.is_shared else 0.0
        sent = restored(codes, means)
        self.feedback.sent_at(parameter, chosen, sent, is_finite=is_finite)
        return Sent(chosen, codes, (means + hidden) / self.lane.world_size)

    def _gather(
        self, own: Mapping[int, Sent], whole: Mapping[int, torch.Tensor]
    ) -> list[dict[int, Sent]]:
        """Return what every rank sent, and overwrite tensors that are exchanged whole."""
        parts = [values / self.lane.world_size for values in whole.values()]
        for sent in own.values():
            parts += [packed(sent.codes, self.value_bits), sent.means]
            if not self.is_shared:
                parts.append(sent.positions.int())
        for values in whole.values():
            values.zero_()
        everyone = []
        for of_rank in self.lane.gather_each(parts):
            unread = iter(of_rank)
            for values in whole.values():
                values.add_(next(unread))
            found = {}
            for i, sent in own.items():
                codes, means = next(unread), next(unread)
                positions = sent.positions if self.is_shared else next(unread)
                count = positions.numel()
                found[i] = Sent(positions, unpacked(codes, self.value_bits, count), means)
            everyone.append(found)
        return everyone

    def rebuilt(self, parameter: int, held: _Held, share: slice) -> torch.Tensor:
        """See ``RepresentedReducer``."""
        out = held[0].means.new_zeros(share.stop - share.start)
        add(held, share.start, out)
        return out

    def sections(self, kept: Mapping[int, _Held], rank: int) -> list[Section]:
        """See ``RepresentedReducer``."""
        if not kept:
            return []
        codes = torch.cat([sent[rank].codes for sent in kept.values()])
        (codes,) = devices.on_host([packed(codes, self.value_bits)])
        return [
            *pieces("binned", self.layout, {i: sent[rank].means for i, sent in kept.items()}),
            *self.position_sections(kept, rank),
            Section("binned/codes", "planes", array_of(codes)),
        ]


def positions_section(layout: Layout, positions: Mapping[int, torch.Tensor]) -> Section:
    """Return positions inside parameters, by ascending layout index, as positions in the layout."""
    there = [own.long() + layout.parameters[i].offset for i, own in positions.items()]
    (values,) = devices.on_host([torch.cat(there)])
    return Section("binned/positions", "ascending", array_of(values))


def stored_positions(payload: Payload, layout: Layout) -> dict[int, torch.Tensor]:
    """Undo `positions_section`: layout index -> positions inside the parameter, int64.

    Raises:
        ReplayMismatch: If a position is in no parameter that the payload lists.
    """
    section = payload.section("binned/positions")
    if section is None:
        return {}
    found = {}
    for i in listed("binned", payload, layout):
        spec = layout.parameters[i]
        begin, end = section.data.searchsorted((spec.offset, spec.offset + spec.numel))
        found[i] = floats(section.data[begin:end], torch.int64) - spec.offset
    count = sum(own.numel() for own in found.values())
    if count != section.data.size:
        raise ReplayMismatch(
            f"{section.data.size - count} of {section.data.size} positions of a payload are in no "
            "parameter that it lists"
        )
    return found


def binned_decoder(
    payloads: Sequence[Payload],
    layout: Layout,
    value_bits: int,
    positions: Sequence[Mapping[int, torch.Tensor]],
) -> Decoder:
    """Return a decoder that adds what the ranks sent in rank order, as the hook did.

    Args:
        payloads: Payloads of all ranks, in rank order.
        layout: The layout that the payloads were made for.
        value_bits: Bits of a code.
        positions: Of each rank: layout index -> ascending positions of its codes.

    Raises:
        ReplayMismatch: If the sections of a payload do not fit together.
    """
    everyone = [
        _sent(payload, layout, value_bits, own)
        for payload, own in zip(payloads, positions, strict=True)
    ]

    def rebuild(block: Block, out: torch.Tensor) -> None:
        sent = [of_rank[block.parameter] for of_rank in everyone if block.parameter in of_rank]
        if len(sent) < len(everyone):
            raise ReplayMismatch("a rank's payload lacks its entries of a gradient")
        add(sent, block.start, out)

    return corrected(payloads, layout, rebuild)


def _sent(
    payload: Payload, layout: Layout, value_bits: int, positions: Mapping[int, torch.Tensor]
) -> dict[int, Sent]:
    """Return what a rank sent, by layout index."""
    parameters, section = listed("binned", payload, layout), payload.section("binned/codes")
    if not parameters or section is None:
        return {}
    counts = [positions[i].numel() if i in positions else 0 for i in parameters]
    if section.data.size != -(-sum(counts) * value_bits // 8):
        raise ReplayMismatch(f"a payload holds {section.data.size} bytes of {sum(counts)} codes")
    codes = unpacked(floats(section.data, torch.uint8), value_bits, sum(counts))
    taken: dict[str, int] = {}
    found = {}
    for i, own in zip(parameters, codes.split(counts), strict=True):
        dtype = layout.parameters[i].dtype
        means = payload.section(f"binned/{dtype}")
        start = taken.get(dtype, 0)
        stop = taken[dtype] = start + num_bins(value_bits)
        if means is None or stop > means.data.size or i not in positions:
            raise ReplayMismatch(
                f"a payload lacks means or positions of parameter {layout.parameters[i].name!r}"
            )
        found[i] = Sent(positions[i], own, floats(means.data[start:stop], torch_dtype(dtype)))
    return found
