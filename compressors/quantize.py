"""Gradients in 8 or 4 bits with a scale per block."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
import torch.distributed as dist

from lowdiff.compressors.consumed import corrected
from lowdiff.compressors.feedback import is_used
from lowdiff.compressors.represented import RepresentedReducer
from lowdiff.compressors.sections import floats, listed, numbers
from lowdiff.compressors.settings import Settings, checked_seed
from lowdiff.core import devices
from lowdiff.core.memory import array_of, bits
from lowdiff.errors import ConfigError, ReplayMismatch
from lowdiff.protocols import Decoder, ResidualStore
from lowdiff.types import Block, Layout, Payload, Section

_BITS = (4, 8)
_ROUNDINGS = ("stochastic", "nearest")
#: Elements per scale. The first block begins with the parameter.
_SCALED = 256
#: Elements processed at a time, a multiple of ``_SCALED``: their float32 values fit in a core's
#: cache, and a large parameter needs no second copy.
_PIECE = 1 << 17

#: Codes, int8 ``[blocks, 256]``, and scales, float32 ``[blocks]``, of one rank and parameter.
Codes = tuple[torch.Tensor, torch.Tensor]
#: Codes and scales of one rank and parameter, and the rank's range of the average.
_Held = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Quantize(Settings):
    """Rounds gradients to a few levels between minus and plus the largest magnitude of a block.

    A block has 256 elements. Every rank quantises its gradient plus residual. One all-gather per
    bucket exchanges the codes, and the ranks' values are averaged in rank order. Per rank and step:
    ``bits / 8 + 1 / 64`` bytes an element sent, ``world_size`` times as much received and held
    until the sum is done, as much stored as sent (before coding), one residual kept. For each peer,
    until the next step: its codes, ``1 + 1 / 64`` bytes an element, and its range of the average.

    Reference: Alistarh et al., "QSGD: Communication-Efficient SGD via Gradient Quantization and
    Encoding", NeurIPS 2017, section 3.1, with a block's maximum norm in place of the 2-norm (its
    section 4). We add error feedback, because few bits with nearest rounding need not converge
    without it.

    Attributes:
        bits: 8 or 4.
        rounding: ``"stochastic"`` rounds up or down at random, correct on average; the random
            numbers depend on seed, step, rank and parameter. ``"nearest"`` rounds to the nearest
            level.
        seed: Seed of stochastic rounding.

    Raises:
        ConfigError: If a setting is out of range.
    """

    name: ClassVar[str] = "quantize"
    bits: int = 8
    rounding: str = "stochastic"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.bits not in _BITS:
            raise ConfigError(f"bits is 8 or 4, got {self.bits!r}; Cast takes 16")
        if self.rounding not in _ROUNDINGS:
            raise ConfigError(f"rounding is one of {_ROUNDINGS}, got {self.rounding!r}")
        checked_seed(self.seed, 31)

    @property
    def levels(self) -> int:
        """Return the largest code: 127 or 7."""
        return int((1 << (self.bits - 1)) - 1)

    def bind(
        self,
        layout: Layout,
        residual: ResidualStore,
        group: dist.ProcessGroup | None,
        peers: Sequence[int] = (),
    ) -> QuantizeReducer:
        """Make the reducer of one run."""
        return QuantizeReducer(self, layout, residual, group, peers)

    def decoder(self, payloads: Sequence[Payload], layout: Layout) -> Decoder:
        """Return a decoder that averages the ranks' values in rank order, as the hook did."""
        codes = [_read(payload, layout, self.bits) for payload in payloads]

        def rebuild(block: Block, out: torch.Tensor) -> None:
            own = [of_rank[block.parameter] for of_rank in codes if block.parameter in of_rank]
            if len(own) < len(codes):
                raise ReplayMismatch("a rank's payload lacks its codes of a gradient")
            start, stop = block.start // _SCALED, -(-block.stop // _SCALED)
            cut = [(c[start:stop], s[start:stop]) for c, s in own]
            first = block.start - start * _SCALED
            mean = _mean(cut, self.levels, len(codes))
            out.copy_(mean[first : first + out.numel()])

        return corrected(payloads, layout, rebuild)


class QuantizeReducer(RepresentedReducer[_Held]):
    """Quantize bound to one run; holds codes, scales and ranges of the average, its and its peers'."""

    compressor: Quantize

    def sent_bytes(self, gradients: Mapping[int, torch.Tensor]) -> int:
        """See ``RepresentedReducer``."""
        blocks = sum(-(-g.numel() // _SCALED) for g in gradients.values())
        return blocks * (_SCALED * self.compressor.bits // 8 + 4)

    def average(self, gradients: Mapping[int, torch.Tensor], buffer: torch.Tensor) -> None:
        """See ``RepresentedReducer``."""
        levels, width = self.compressor.levels, self.compressor.bits
        own: dict[int, Codes] = {}
        for i, gradient in gradients.items():
            total = self.feedback.total(i, gradient)
            own[i] = self._quantized(i, total, is_sent=is_used(gradient))
            for piece in _pieces(total.numel()):
                total[piece].sub_(_values(_cut(own[i], piece), levels)[: _length(total, piece)])
            self.feedback.left(i)
        packed = [
            part
            for codes, scales in own.values()
            for part in (_packed(codes, width), scales.view(torch.uint8))
        ]
        everyone = self.lane.gather(torch.cat(packed))
        start = 0
        for i, gradient in gradients.items():
            stop = start + self.sent_bytes({i: gradient})
            of_rank = [_unpacked(wire[start:stop], gradient.numel(), width) for wire in everyone]
            for piece in _pieces(gradient.numel()):
                mean = _mean([_cut(codes, piece) for codes in of_rank], levels, len(of_rank))
                gradient[piece].copy_(mean[: _length(gradient, piece)])
            for stored in self.stored:
                if stored is self.stored.own:
                    steps, scales = own[i]
                else:  # a copy, because a view would hold on to what all ranks sent
                    steps, scales = of_rank[stored.rank][0].clone(), of_rank[stored.rank][1]
                stored.held[i] = steps, scales, gradient[stored.consumed.share(i)].clone()
            start = stop

    def _quantized(self, parameter: int, total: torch.Tensor, *, is_sent: bool) -> Codes:
        """Return the codes of gradient plus residual; all zero if nothing is to be sent."""
        blocks = -(-total.numel() // _SCALED)
        codes = torch.zeros(blocks, _SCALED, dtype=torch.int8, device=total.device)
        scales = torch.zeros(blocks, dtype=torch.float32, device=total.device)
        if is_sent:
            noise = self._noise(parameter, total.device)
            for piece in _pieces(total.numel()):
                into, scale_into = _cut((codes, scales), piece)
                self._quantize(total[piece], noise, into, scale_into)
        return codes, scales

    def _quantize(
        self,
        values: torch.Tensor,
        noise: torch.Generator | None,
        codes: torch.Tensor,
        scales: torch.Tensor,
    ) -> None:
        """Write the codes and scales of some values: whole blocks, except at a parameter's end."""
        levels = self.compressor.levels
        padded = torch.zeros(codes.shape, dtype=torch.float32, device=values.device)
        padded.view(-1)[: values.numel()] = values
        largest = padded.abs().amax(1)
        steps = padded.mul_((levels / largest)[:, None])
        if noise is None:
            steps.round_()
        else:
            steps.add_(torch.rand(steps.shape, generator=noise, device=values.device)).floor_()
        # A block of zeros gets no scale. A block with NaN or Inf becomes NaN as a whole.
        codes.copy_(steps.nan_to_num_(0.0, 0.0, 0.0).clamp_(-levels, levels))
        scales.copy_(torch.where(largest.isfinite(), largest, torch.nan))

    def _noise(self, parameter: int, device: torch.device) -> torch.Generator | None:
        """Return the random numbers that round a parameter in this step; None rounds to the nearest."""
        if self.compressor.rounding == "nearest":
            return None
        words = (self.compressor.seed, self.step, self.lane.rank, parameter)
        seed = int(np.random.SeedSequence(words).generate_state(1, np.uint64)[0])
        return torch.Generator(device).manual_seed(seed)

    def rebuilt(self, parameter: int, held: _Held, share: slice) -> torch.Tensor:
        """See ``RepresentedReducer``."""
        return held[2]

    def sections(self, kept: Mapping[int, _Held], rank: int) -> list[Section]:
        """See ``RepresentedReducer``."""
        if not kept:
            return []
        codes = torch.cat([_packed(own, self.compressor.bits) for own, _, _ in kept.values()])
        scales = torch.cat([own for _, own, _ in kept.values()])
        codes, scales = devices.on_host([codes, scales])
        return [
            Section("quantized/parameters", "ascending", numbers(list(kept))),
            Section("quantized/codes", "planes", array_of(codes)),
            Section("quantized/scales", "planes", bits(scales)),
        ]


def _pieces(numel: int) -> Iterator[slice]:
    """Yield ranges of whole blocks; the last range may end earlier."""
    for start in range(0, numel, _PIECE):
        yield slice(start, start + _PIECE)


def _cut(codes: Codes, piece: slice) -> Codes:
    """Return the codes and scales of a range's blocks."""
    blocks = slice(piece.start // _SCALED, piece.stop // _SCALED)
    return codes[0][blocks], codes[1][blocks]


def _length(values: torch.Tensor, piece: slice) -> int:
    return min(values.numel(), int(piece.stop)) - int(piece.start)


def _values(codes: Codes, levels: int) -> torch.Tensor:
    """Return one rank's dequantised values: float32, flat, padded to whole blocks."""
    steps, scales = codes
    return steps.float().mul_((scales * (1.0 / levels))[:, None]).flatten()


def _mean(codes: Sequence[Codes], levels: int, world_size: int) -> torch.Tensor:
    """Return the mean over ranks in float32, added in rank order.

    The arithmetic is element-wise, so the result does not depend on the block. The code multiplies
    by reciprocals and never divides: CUDA would replace a division by a number with that product,
    the CPU would not.
    """
    total, *others = (_values(own, levels).mul_(1.0 / world_size) for own in codes)
    for other in others:
        total.add_(other)
    return total


def _packed(codes: torch.Tensor, width: int) -> torch.Tensor:
    """Return codes as bytes: one code per byte for 8 bits, two for 4 bits."""
    flat = codes.flatten().view(torch.uint8)
    return flat if width == 8 else (flat[::2] & 15) | (flat[1::2] << 4)


def _unpacked(wire: torch.Tensor, numel: int, width: int) -> Codes:
    """Undo ``_packed`` for one parameter: codes, followed by their scales."""
    blocks = -(-numel // _SCALED)
    split = blocks * _SCALED * width // 8
    # The scales are copied, because they may be unaligned in a bucket of several parameters.
    scales = wire[split:].clone().view(torch.float32)
    return _codes(wire[:split], width).view(blocks, _SCALED), scales


def _codes(packed: torch.Tensor, width: int) -> torch.Tensor:
    if width == 8:
        return packed.view(torch.int8)
    low, high = packed << 4, packed & 0xF0
    return torch.stack([low, high], 1).flatten().view(torch.int8) >> 4


def _read(payload: Payload, layout: Layout, width: int) -> dict[int, Codes]:
    """Return the codes and scales that a rank stored, by layout index."""
    codes, scales = payload.section("quantized/codes"), payload.section("quantized/scales")
    if codes is None or scales is None:
        return {}
    found: dict[int, Codes] = {}
    block = 0
    packed = floats(codes.data, torch.uint8)
    factors = floats(scales.data, torch.float32)
    for i in listed("quantized", payload, layout):
        stop = block - (-layout.parameters[i].numel // _SCALED)
        size = _SCALED * width // 8
        own = _codes(packed[block * size : stop * size], width)
        found[i] = own.view(-1, _SCALED), factors[block:stop]
        block = stop
    if block != factors.numel() or block * _SCALED * width // 8 != packed.numel():
        raise ReplayMismatch(f"a quantised payload holds {factors.numel()} scales, not {block}")
    return found
