"""Gradients averaged in half width."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from lowdiff.compressors.consumed import Corrections
from lowdiff.compressors.lane import Lane, share, shares_in
from lowdiff.compressors.ranges import half_width, refuse_other_half
from lowdiff.compressors.represented import RepresentedReducer
from lowdiff.compressors.sections import floats, pieces, shared_parts
from lowdiff.core.layout import dtype_name
from lowdiff.errors import ReplayMismatch
from lowdiff.protocols import Decoder, ResidualStore
from lowdiff.types import Block, Layout, Payload, Section


@dataclass(frozen=True, slots=True)
class Cast:
    """Rounds gradients to half width, divides by the world size and averages them so.

    With two ranks the result equals that of PyTorch's ``bf16_compress_hook`` or
    ``fp16_compress_hook`` bit for bit; with more, those depend on DDP's buckets, and this one is a
    reproducible sum, added in float32 and rounded once. Per rank and step: 2 bytes an element,
    sent twice ``(world_size - 1) / world_size`` times, ``2 / world_size`` bytes an element stored.
    No error feedback, no residual: what rounding loses is lost, as in mixed precision.

    Reference: Micikevicius et al., "Mixed Precision Training", ICLR 2018, for float16 gradients
    (scale the loss: small ones underflow); Kalamkar et al., "A Study of BFLOAT16 for Deep Learning
    Training", 2019, for bfloat16.

    Attributes:
        dtype: ``torch.bfloat16`` or ``torch.float16``, or its name.

    Raises:
        ConfigError: If it is another.
    """

    name: ClassVar[str] = "cast"
    dtype: torch.dtype | str = torch.bfloat16

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", half_width("dtype", self.dtype))

    @property
    def half(self) -> torch.dtype:
        """The dtype gradients are rounded to."""
        assert isinstance(self.dtype, torch.dtype)
        return self.dtype

    def settings(self) -> Mapping[str, Any]:
        """The constructor's arguments."""
        return {"dtype": dtype_name(self.half)}

    def residual_layout(self, layout: Layout) -> Layout:
        """Nothing is kept.

        Raises:
            UnsupportedModel: If a parameter has the other half-width dtype.
        """
        refuse_other_half(layout, self.half, f"Cast({self.half})")
        return Layout(())

    def bind(
        self, layout: Layout, residual: ResidualStore, group: dist.ProcessGroup | None
    ) -> RepresentedReducer:
        """Make the reducer of one run."""
        return RepresentedReducer(_Cast(self.half, layout), layout, group)

    def decoder(self, payloads: Sequence[Payload], layout: Layout) -> Decoder:
        """Widens each rank's range of the half-width average."""
        corrections = Corrections(payloads, layout)
        halves = shared_parts("cast", payloads, layout, lambda i: layout.parameters[i].numel)

        def rebuild(block: Block, out: torch.Tensor) -> None:
            numel = layout.parameters[block.parameter].numel
            if not all(block.parameter in own for own in halves):
                raise ReplayMismatch("a rank's payload lacks its part of a gradient")
            for rank, there, here in shares_in(block, numel, len(halves)):
                out[here] = floats(halves[rank][block.parameter][there], self.half)

        return lambda block, out: corrections.apply(block, out, rebuild)


class _Cast:
    """The method behind `Cast`; see ``Method``."""

    def __init__(self, dtype: torch.dtype, layout: Layout) -> None:
        self._dtype = dtype
        self._layout = layout
        self._own: dict[int, torch.Tensor] = {}
        self._wide: dict[int, torch.dtype] = {}
        self._kept: dict[int, torch.Tensor] = {}

    def begin(self, step: int) -> None:
        self._own.clear()
        self._kept.clear()

    def sent_bytes(self, gradients: Mapping[int, torch.Tensor]) -> int:
        return 2 * sum(g.numel() for g in gradients.values())

    def average(self, gradients: Mapping[int, torch.Tensor], lane: Lane) -> None:
        halves = torch.cat([g.to(self._dtype) for g in gradients.values()])
        lane.mean(halves)
        sizes = [g.numel() for g in gradients.values()]
        for (i, gradient), own in zip(gradients.items(), halves.split(sizes), strict=True):
            gradient.copy_(own)
            self._wide[i] = gradient.dtype
            self._own[i] = own[slice(*share(own.numel(), lane.rank, lane.world_size))].clone()

    def represents(self, parameter: int) -> bool:
        return parameter in self._own

    def rebuilt(self, parameter: int, share: slice) -> torch.Tensor:
        return self._own[parameter].to(self._wide[parameter])

    def keep(self, parameter: int) -> None:
        self._kept[parameter] = self._own[parameter]

    def sections(self, parameters: Sequence[int]) -> list[Section]:
        return pieces("cast", self._layout, {i: self._kept[i] for i in parameters})
