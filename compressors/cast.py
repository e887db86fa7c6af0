"""Gradients averaged in half width."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.distributed as dist

from lowdiff.compressors.consumed import corrected
from lowdiff.compressors.lane import shares_in
from lowdiff.compressors.represented import RepresentedReducer
from lowdiff.compressors.sections import floats, pieces, shared_parts
from lowdiff.compressors.settings import Settings, half_width, refuse_other_half
from lowdiff.core.layout import torch_dtype
from lowdiff.errors import ReplayMismatch
from lowdiff.protocols import Decoder, ResidualStore
from lowdiff.types import Block, Layout, Payload, Section


@dataclass(frozen=True, slots=True)
class Cast(Settings):
    """Rounds gradients to half width, divides them by the world size and averages them in half width.

    With two ranks the result equals PyTorch's ``bf16_compress_hook`` or ``fp16_compress_hook`` bit
    for bit. With more ranks, PyTorch's result depends on DDP's buckets, while Cast uses a
    reproducible sum, added in float32 and rounded once. Per rank and step: 2 bytes an element, sent
    twice ``(world_size - 1) / world_size`` times; ``2 / world_size`` bytes an element stored. Cast
    has no error feedback and no residual: rounding errors are lost, as in mixed precision. For each
    peer, until the next step: ``2 / world_size`` bytes an element.

    Reference: Micikevicius et al., "Mixed Precision Training", ICLR 2018, for float16 gradients
    (scale the loss: small gradients underflow); Kalamkar et al., "A Study of BFLOAT16 for Deep
    Learning
    Training", 2019, for bfloat16.

    Attributes:
        dtype: ``torch.bfloat16`` or ``torch.float16``, or its name.

    Raises:
        ConfigError: If ``dtype`` is another dtype.
    """

    name: ClassVar[str] = "cast"
    dtype: torch.dtype | str = torch.bfloat16

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", half_width("dtype", self.dtype))

    def residual_layout(self, layout: Layout) -> Layout:
        """Return an empty layout, as Cast keeps no residual.

        Raises:
            UnsupportedModel: If a parameter has the other half-width dtype.
        """
        refuse_other_half(layout, self.half, f"Cast({self.half})")
        return Layout(())

    def bind(
        self,
        layout: Layout,
        residual: ResidualStore,
        group: dist.ProcessGroup | None,
        peers: Sequence[int] = (),
    ) -> CastReducer:
        """Make the reducer of one run."""
        return CastReducer(self, layout, residual, group, peers)

    def decoder(self, payloads: Sequence[Payload], layout: Layout) -> Decoder:
        """Return a decoder that widens each rank's range of the half-width average."""
        halves = shared_parts("cast", payloads, layout)

        def rebuild(block: Block, out: torch.Tensor) -> None:
            numel = layout.parameters[block.parameter].numel
            if not all(block.parameter in own for own in halves):
                raise ReplayMismatch("a rank's payload lacks its part of a gradient")
            for rank, there, here in shares_in(block, numel, len(halves)):
                out[here] = floats(halves[rank][block.parameter][there], self.half)

        return corrected(payloads, layout, rebuild)

    @property
    def half(self) -> torch.dtype:
        """Return the dtype that gradients are rounded to."""
        assert isinstance(self.dtype, torch.dtype)
        return self.dtype


class CastReducer(RepresentedReducer[torch.Tensor]):
    """Cast bound to one run; holds its and its peers' ranges of the average in half width."""

    compressor: Cast

    def sent_bytes(self, gradients: Mapping[int, torch.Tensor]) -> int:
        """See ``RepresentedReducer``."""
        return 2 * sum(g.numel() for g in gradients.values())

    def average(self, gradients: Mapping[int, torch.Tensor], buffer: torch.Tensor) -> None:
        """See ``RepresentedReducer``."""
        halves = {i: g.to(self.compressor.half) for i, g in gradients.items()}
        self.lane.mean_of(halves)
        for i, gradient in gradients.items():
            gradient.copy_(halves[i])
            for stored in self.stored:
                stored.held[i] = halves[i][stored.consumed.share(i)].clone()

    def rebuilt(self, parameter: int, held: torch.Tensor, share: slice) -> torch.Tensor:
        """See ``RepresentedReducer``."""
        return held.to(torch_dtype(self.layout.parameters[parameter].dtype))

    def sections(self, kept: Mapping[int, torch.Tensor], rank: int) -> list[Section]:
        """See ``RepresentedReducer``."""
        return pieces("cast", self.layout, kept)
