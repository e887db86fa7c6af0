"""Top-k sparsification with error feedback."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.distributed as dist

from lowdiff.compressors.binned import (
    BinnedReducer,
    Sent,
    binned_decoder,
    positions_section,
    stored_positions,
)
from lowdiff.compressors.collectives import chained, completed
from lowdiff.compressors.exchange import exchange
from lowdiff.compressors.flat import DTYPES, reading_on, selection_on
from lowdiff.compressors.settings import (
    SparseSettings,
    checked_size,
    half_width,
    refuse_other_half,
)
from lowdiff.compressors.sparse import IndexedDecoder, SparseReducer
from lowdiff.core import devices
from lowdiff.core.layout import torch_dtype
from lowdiff.errors import ConfigError
from lowdiff.protocols import Decoder, Reducer, ResidualStore
from lowdiff.types import Layout, Payload, Section

#: Density at the start of a warm-up.
_WARMUP_DENSITY = 0.25


@dataclass(frozen=True, slots=True)
class TopK(SparseSettings):
    """Keeps each parameter's largest gradient entries and remembers the rest.

    Every rank selects from its own gradient plus residual. One all-gather per bucket exchanges the
    entries, which are summed in rank order. Per rank and step: ``k`` entries of 4 + itemsize bytes
    sent, ``world_size * k`` received, ``k`` entries stored, one residual of the model's size kept.
    For each peer, until the next step: ``k`` positions of 8 bytes per backward pass, ``k`` values; over whole buckets all
    ranks' positions, of 4 bytes, and values.

    Reference: Aji and Heafield, "Sparse Communication for Distributed Gradient Descent", EMNLP
    2017; error feedback as in Stich et al., "Sparsified SGD with Memory", NeurIPS 2018,
    Algorithm 1. We select per parameter and exactly, never per DDP bucket. The warm-up follows Lin
    et al., "Deep Gradient Compression", ICLR 2018, section 3.3, by steps instead of epochs.

    Attributes:
        density: Share of entries kept, in (0, 1].
        dense_below: Parameters with fewer elements are exchanged whole.
        value_dtype: ``torch.bfloat16`` or ``torch.float16`` (or its name) rounds the average to
            this dtype before the optimizer sees it, which saves 2 bytes per stored float32 entry.
            None does not round.
        warmup: Steps during which the density falls exponentially from 0.25 to ``density``.
        value_bits: 2 or 4 sends and stores a value as its sign and one of 2 or 8 magnitude bins,
            and error feedback keeps the difference. Then a rank sends 4 bytes and so many bits an
            entry. On a CPU it stores both before coding, and holds what all ranks sent until the next
            step; on an accelerator it stores what the optimizer consumed. None keeps the dtype.

    Raises:
        ConfigError: If a setting is out of range, or values are both rounded and binned.
    """

    name: ClassVar[str] = "topk"
    value_dtype: torch.dtype | str | None = None
    warmup: int = 0

    def __post_init__(self) -> None:
        SparseSettings.__post_init__(self)
        checked_size("warmup", "steps", self.warmup)
        if self.value_dtype is not None:
            object.__setattr__(self, "value_dtype", half_width("value_dtype", self.value_dtype))
        if self.value_dtype is not None and self.value_bits is not None:
            raise ConfigError(
                f"value_bits={self.value_bits} leaves nothing for value_dtype={self.narrow} to "
                "round; leave out one of them"
            )

    def density_at(self, step: int | None) -> float:
        """See ``SparseSettings.density_at``."""
        if step is None or step >= self.warmup:
            return self.density
        start = max(self.density, _WARMUP_DENSITY)
        return float(start * (self.density / start) ** (step / self.warmup))

    def residual_layout(self, layout: Layout) -> Layout:
        """Return a layout with one residual per parameter.

        Raises:
            UnsupportedModel: If values cannot be rounded to ``value_dtype``, or a parameter is too large.
        """
        if self.narrow is not None:
            refuse_other_half(layout, self.narrow, f"value_dtype={self.narrow}")
        return SparseSettings.residual_layout(self, layout)

    def bind(
        self,
        layout: Layout,
        residual: ResidualStore,
        group: dist.ProcessGroup | None,
        peers: Sequence[int] = (),
    ) -> Reducer:
        """Make the reducer of one run."""
        dtypes = {torch_dtype(dtype) for dtype in layout.dtypes}
        if devices.takes_whole_buckets(residual.device) and dtypes <= DTYPES:
            from lowdiff.compressors.flat.topk import FlatTopKReducer  # it imports this module

            selection = selection_on(residual.device, dtypes)
            reading = reading_on(residual.device, selection, dtypes)
            return FlatTopKReducer(
                self, layout, residual, group, peers, selection=selection, reading=reading
            )
        if self.value_bits is not None:
            return BinnedTopKReducer(self, layout, residual, group, peers)
        return TopKReducer(self, layout, residual, group, peers)

    def decoder(self, payloads: Sequence[Payload], layout: Layout) -> Decoder:
        """Return a decoder that assigns each rank's entries; ranks agree bit for bit where they overlap.

        With ``value_bits``, it adds what the ranks sent where they stored that; on accelerators they store the values
        that were consumed.
        """
        sections = (section for payload in payloads for section in payload.sections)
        has_codes = any(section.name.startswith("binned/") for section in sections)
        if self.value_bits is not None and has_codes:
            positions = [stored_positions(payload, layout) for payload in payloads]
            return binned_decoder(payloads, layout, self.value_bits, positions)
        return IndexedDecoder(payloads, layout, self.narrow)

    @property
    def narrow(self) -> torch.dtype | None:
        """Return the dtype that averages are rounded to; None does not round."""
        assert not isinstance(self.value_dtype, str)
        return self.value_dtype


class TopKReducer(SparseReducer):
    """TopK bound to one run; remembers its and its peers' selections until the optimizer's step."""

    compressor: TopK

    def reduce(
        self, parameters: Sequence[int], gradients: Sequence[torch.Tensor], buffer: torch.Tensor
    ) -> torch.futures.Future[torch.Tensor]:
        """See ``Reducer.reduce``."""
        whole = all(self.kept(g.numel()) == g.numel() for g in gradients)
        if whole and self.world_size == 1 and self.compressor.narrow is None:
            # All entries are kept and no other rank exists. In models of many small parameters, the
            # calls below would cost more than the parameters' own updates.
            return completed(buffer)
        positions: list[torch.Tensor] = []
        values: list[torch.Tensor] = []
        seen: list[torch.Tensor] = []
        for parameter, gradient in zip(parameters, gradients, strict=True):
            chosen, kept = self._compress(parameter, gradient)
            self.stored.own.select(parameter, chosen)
            offset = int(gradient.storage_offset()) - int(buffer.storage_offset())
            positions.append(chosen + offset)
            values.append(kept)
            if chosen.numel() < gradient.numel():
                self.remember_exchanged(parameter, seen, offset)
        entries = torch.cat(values)
        if self.world_size > 1:
            entries.div_(self.world_size)  # before the sum, as DDP itself averages
        done = exchange(
            buffer,
            torch.cat(positions),
            entries,
            stamp=self.stamp,
            group=self.group,
            headers=self.headers,
            seen=None if self.group is None else seen,
        )
        if self.compressor.narrow is None and not self.stored.peers:
            return done
        counts = [own.numel() for own in values]
        return chained(
            done, self.finishing(parameters, gradients, buffer, counts, seen), buffer.device
        )

    def finishing(
        self,
        parameters: Sequence[int],
        gradients: Sequence[torch.Tensor],
        buffer: torch.Tensor,
        counts: Sequence[int],
        seen: Sequence[torch.Tensor],
    ) -> Callable[[torch.futures.Future[torch.Tensor]], torch.Tensor]:
        """Return what follows the exchange of a bucket; see `select_of_peers` and `round`."""
        # The backend's thread frees the callback some time after the exchange. The callback must
        # not hold the last reference to the process group then: a thread cannot wait for its own
        # end.
        owner = [self]

        def finish(future: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
            averaged = future.value()
            reducer = owner.pop()
            reducer.select_of_peers(parameters, gradients, buffer, counts, seen)
            reducer.round(parameters, gradients, buffer)
            return averaged

        return finish

    def select_of_peers(
        self,
        parameters: Sequence[int],
        gradients: Sequence[torch.Tensor],
        buffer: torch.Tensor,
        counts: Sequence[int],
        seen: Sequence[torch.Tensor],
    ) -> None:
        """Remember what the peers selected of a bucket.

        Args:
            parameters: Layout indices.
            gradients: Views into ``buffer``.
            buffer: The bucket.
            counts: How many entries every rank sent of each parameter.
            seen: Positions in the bucket that each rank sent.
        """
        for peer, stored in self.stored.peers.items():
            sent = seen[peer].split(list(counts))
            for i, gradient, own in zip(parameters, gradients, sent, strict=True):
                if own.numel() < gradient.numel():  # else the ranks divide it
                    offset = int(gradient.storage_offset()) - int(buffer.storage_offset())
                    stored.select(i, own.long() - offset)

    def round(
        self, parameters: Sequence[int], gradients: Sequence[torch.Tensor], buffer: torch.Tensor
    ) -> None:
        """Round a bucket's gradients, which hold the average over ranks, if values are narrow."""
        narrow = self.compressor.narrow
        for i, gradient in zip(parameters, gradients, strict=True):
            if narrow is not None and narrow != gradient.dtype:
                rounded = gradient.to(narrow)
                gradient.copy_(rounded)
                for stored in self.stored:
                    stored.round(i, rounded)

    def _compress(
        self, parameter: int, gradient: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        k = self.kept(gradient.numel())
        if k == gradient.numel():
            return torch.arange(k, device=gradient.device), gradient
        total = self.feedback.total(parameter, gradient)
        chosen = self.selector.select(total, k)
        return chosen, self.send(parameter, gradient, total, chosen, are_largest=True)


class BinnedTopKReducer(BinnedReducer):
    """TopK with values in few bits, bound to one run."""

    is_shared = False

    def choose(self, totals: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """Choose this rank's largest entries; see ``BinnedReducer.choose``."""
        return {i: self.selector.select(t, self.kept(t.numel())) for i, t in totals.items()}

    def position_sections(self, kept: Mapping[int, Sequence[Sent]], rank: int) -> list[Section]:
        """Return the positions that a rank chose; see ``BinnedReducer.position_sections``."""
        return [positions_section(self.layout, {i: s[rank].positions for i, s in kept.items()})]
