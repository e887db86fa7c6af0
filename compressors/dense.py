"""No compression: gradients are averaged as DDP averages them, and logged whole (LowDiff+)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from lowdiff.compressors.exchange import Notes
from lowdiff.compressors.futures import completed
from lowdiff.compressors.reproducible import reproducible_mean
from lowdiff.errors import UsageError
from lowdiff.host_copy import fetch_now
from lowdiff.layout import bits, shard_owners, torch_dtype
from lowdiff.protocols import Decoder, Fetch, ResidualStore
from lowdiff.types import Block, Layout, Payload, Section


@dataclass(frozen=True, slots=True)
class Dense:
    """Leaves the gradient as it is; each rank logs its share of the parameters.

    The average has the bits of DDP without a communication hook: every rank's gradient times
    ``1 / world_size``, then one all-reduce per bucket. (DDP divides instead of multiplying where
    gradients are views of its buckets and are kept from step to step; that differs in the last
    place, and only where the world size is no power of two.) With three ranks or more the
    all-reduce itself adds in an order that depends on DDP's buckets, which a restart changes.
    ``reproducible`` adds in rank order instead, whatever shares a bucket: an all-to-all and an
    all-gather, the bytes of a ring all-reduce.

    Reference: Yao et al., "LowDiff", arXiv 2509.04084, LowDiff+ (layer-wise reuse of gradients
    without compression). We read gradients when the optimizer is about to, after unscaling and
    clipping, and divide them over ranks by parameter.

    Attributes:
        reproducible: Whether the sum's bits may not depend on the buckets.
    """

    reproducible: bool = False

    @property
    def name(self) -> str:
        """``"dense"``."""
        return "dense"

    def settings(self) -> Mapping[str, Any]:
        """The constructor's arguments."""
        return asdict(self)

    def residual_layout(self, layout: Layout) -> Layout:
        """See ``Compressor.residual_layout``: nothing is left out, so nothing is kept."""
        return replace(layout, parameters=())

    def bind(
        self, layout: Layout, residual: ResidualStore, group: dist.ProcessGroup | None
    ) -> DenseReducer:
        """Make the reducer of one run; there is no residual."""
        rank = 0 if group is None else dist.get_rank(group)
        world_size = 1 if group is None else group.size()
        return DenseReducer(self, layout, group, rank=rank, world_size=world_size)

    def decoder(self, payloads: Sequence[Payload], layout: Layout) -> Decoder:
        """Copies from the share of the rank that owns the block's parameter."""
        shares = [
            self.share_decoder(payload, layout, rank, len(payloads))
            for rank, payload in enumerate(payloads)
        ]
        owners = shard_owners(layout, len(payloads))

        def decode(block: Block, out: torch.Tensor) -> None:
            shares[owners[block.parameter]](block, out)

        return decode

    def share_decoder(
        self, payload: Payload, layout: Layout, rank: int, world_size: int
    ) -> Decoder:
        """The decoder of one rank's payload, for blocks of the parameters that this rank owns."""
        places = _places(layout, rank, world_size)
        values = {
            dtype: section.data
            for dtype in layout.dtypes
            if (section := payload.section(f"values/{dtype}"))
        }

        def decode(block: Block, out: torch.Tensor) -> None:
            place = places[block.parameter]
            source = values[layout.parameters[block.parameter].dtype]
            np.copyto(bits(out), source[place + block.start : place + block.stop])

        return decode


class DenseReducer:
    """Dense bound to one run: keeps a copy of what this rank's share of the gradient was."""

    def __init__(
        self,
        compressor: Dense,
        layout: Layout,
        group: dist.ProcessGroup | None,
        *,
        rank: int,
        world_size: int,
    ) -> None:
        self._reproducible = compressor.reproducible
        self._layout = layout
        self._group = group
        self._world_size = world_size
        self._places = _places(layout, rank, world_size)
        self._share = {
            dtype: torch.zeros(
                sum(spec.numel for i, spec in layout.of_dtype(dtype) if i in self._places),
                dtype=torch_dtype(dtype),
            )
            for dtype in layout.dtypes
        }
        self._is_consumed = False
        self._stamp = 0
        self._own_note = 0
        self._notes = Notes()
        self._telling: tuple[torch.futures.Future[Any], torch.Tensor] | None = None

    def begin(self, stamp: int, *, audit: bool, note: int = 0) -> None:
        """See ``Reducer.begin``; nothing is left out, so there is nothing to audit."""
        self._stamp = stamp
        self._own_note = note
        self._notes.begin(note)
        self._telling = None
        self._is_consumed = False

    def close(self) -> None:
        """See ``Reducer.close``: there is nothing to give back."""

    def heard(self) -> tuple[int, ...]:
        """See ``Reducer.heard``.

        Raises:
            UsageError: If another rank is in another step.
        """
        if self._telling is not None:
            future, words = self._telling
            future.wait()
            self._telling = None
            for rank, (stamp, _) in enumerate(words.tolist()):
                if stamp != self._stamp:
                    raise UsageError(
                        f"rank {rank} averaged gradients of another step ({stamp & 0xFFFFFFFFFF}) "
                        f"than this rank ({self._stamp & 0xFFFFFFFFFF}); every rank must attach "
                        "to the same run and commit the same steps"
                    )
            self._notes.hear(words[:, 1].contiguous())
        return self._notes.heard()

    def reduce(
        self, parameters: Sequence[int], gradients: Sequence[torch.Tensor], buffer: torch.Tensor
    ) -> torch.futures.Future[torch.Tensor]:
        """See ``Reducer.reduce``."""
        if self._world_size == 1:
            return completed(buffer)
        if self._telling is None:
            self._tell(buffer.device)
        if self._reproducible:
            return reproducible_mean(buffer, self._group)
        buffer.mul_(1.0 / self._world_size)
        work = dist.all_reduce(buffer, group=self._group, async_op=True)
        assert work is not None

        def first(future: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
            return future.value()[0]

        reduced: torch.futures.Future[torch.Tensor] = work.get_future().then(first)
        return reduced

    def _tell(self, device: torch.device) -> None:
        """Exchange stamps and notes, once a step; read at commit."""
        mine = torch.tensor([self._stamp, self._own_note]).to(device, non_blocking=True)
        words = torch.empty(self._world_size, 2, dtype=mine.dtype, device=device)
        work = dist.all_gather(list(words.unbind()), mine, group=self._group, async_op=True)
        assert work is not None
        self._telling = work.get_future(), words

    def consume(
        self, gradients: Sequence[torch.Tensor | None], *, factors: tuple[float, ...] = ()
    ) -> None:
        """See ``Reducer.consume``: copy this rank's share, unscaled and clipped by now."""
        for i, place in self._places.items():
            gradient = gradients[i]
            if gradient is not None:
                share = self._share[self._layout.parameters[i].dtype]
                share[place : place + gradient.numel()].copy_(gradient)
                self._is_consumed = True

    def payload(self, fetch: Fetch = fetch_now) -> Payload:
        """See ``Reducer.payload``; the share was copied to the CPU when it was consumed.

        Every parameter of the share has its place, also one whose gradient is absent: what
        stands there is then without meaning. The arrays are reused in the next step.
        """
        if not self._is_consumed:
            return Payload(())
        return Payload(
            tuple(
                Section(f"values/{dtype}", "planes", bits(share))
                for dtype, share in self._share.items()
                if share.numel()
            )
        )


def _places(layout: Layout, rank: int, world_size: int) -> dict[int, int]:
    """Layout index of each parameter that a rank owns -> its first element in the share."""
    owners = shard_owners(layout, world_size)
    places = {}
    for dtype in layout.dtypes:
        place = 0
        for i, spec in layout.of_dtype(dtype):
            if owners[i] == rank:
                places[i] = place
                place += spec.numel
    return places
