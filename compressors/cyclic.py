"""Top-k selected by one rank at a time, in turns: ScaleCom."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
from lowdiff.compressors.lane import Lane, share
from lowdiff.compressors.settings import SparseSettings
from lowdiff.compressors.sparse import IndexedDecoder, MagnitudeSelector, SharedReducer
from lowdiff.protocols import Decoder, Reducer, ResidualStore
from lowdiff.types import Layout, Payload, Section


@dataclass(frozen=True, slots=True)
class CyclicTopK(SparseSettings):
    """Keeps the entries that are largest on one rank, the leader; the leader changes every step.

    The leader of step ``t``, rank ``t mod world_size``, picks each parameter's largest entries of
    its gradient plus residual. All ranks send their values at these positions. The bytes that a
    rank receives and that all ranks together store thus do not grow with the number of ranks. Per
    rank and step: ``k`` positions of 4 bytes broadcast, ``k`` values averaged by a reproducible sum
    (twice ``k * itemsize`` bytes sent), ``k / world_size`` entries stored, one residual kept. For each
    peer, until the next step: ``k / world_size`` values.

    Reference: Chen et al., "ScaleCom: Scalable Sparsified Gradient Compression for
    Communication-Efficient Distributed Training", NeurIPS 2020, section 3 (CLT-k) and Algorithm 1,
    without its low-pass filter of the residual (beta = 1).

    Attributes:
        density: Share of entries kept, in (0, 1].
        dense_below: Parameters with fewer elements are exchanged whole.
        value_bits: 2 or 4 sends and stores a value as its sign and one of 2 or 8 magnitude bins,
            and error feedback keeps the difference. Codes are not averaged: each rank receives
            those of all ranks, and stores ``k`` codes of its own and ``k / world_size`` positions.
            None keeps the dtype.

    Raises:
        ConfigError: If a setting is out of range.
    """

    name: ClassVar[str] = "cyclic_topk"

    def bind(
        self,
        layout: Layout,
        residual: ResidualStore,
        group: dist.ProcessGroup | None,
        peers: Sequence[int] = (),
    ) -> Reducer:
        """Make the reducer of one run."""
        if self.value_bits is not None:
            return BinnedCyclicTopKReducer(self, layout, residual, group, peers)
        return CyclicTopKReducer(self, layout, residual, group, peers)

    def decoder(self, payloads: Sequence[Payload], layout: Layout) -> Decoder:
        """Return a decoder that assigns each rank's share of the entries.

        With ``value_bits``, it adds what the ranks sent at the positions that they share.
        """
        if self.value_bits is not None:
            shares = [stored_positions(payload, layout) for payload in payloads]
            joined = {i: torch.cat([own[i] for own in shares if i in own]) for i in shares[0]}
            return binned_decoder(payloads, layout, self.value_bits, [joined] * len(payloads))
        return IndexedDecoder(payloads, layout)


class CyclicTopKReducer(SharedReducer):
    """CyclicTopK bound to one run."""

    def choose(self, totals: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """Choose the largest entries of this step's leader; see ``SharedReducer.choose``."""
        counts = [self.kept(total.numel()) for total in totals.values()]
        return _largest_of_leader(totals, counts, self.step, self.lane, self.selector)


class BinnedCyclicTopKReducer(BinnedReducer):
    """CyclicTopK with values in few bits, bound to one run; each rank stores its share of positions."""

    def choose(self, totals: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """Choose the largest entries of this step's leader; see ``BinnedReducer.choose``."""
        counts = [self.kept(total.numel()) for total in totals.values()]
        return _largest_of_leader(totals, counts, self.step, self.lane, self.selector)

    def position_sections(self, kept: Mapping[int, Sequence[Sent]], rank: int) -> list[Section]:
        """Return a rank's share of the positions; see ``BinnedReducer.position_sections``."""
        shares = {}
        for i, sent in kept.items():
            chosen = sent[rank].positions
            shares[i] = chosen[slice(*share(chosen.numel(), rank, self.lane.world_size))]
        return [positions_section(self.layout, shares)]


def _largest_of_leader(
    totals: Mapping[int, torch.Tensor],
    counts: Sequence[int],
    step: int,
    lane: Lane,
    selector: MagnitudeSelector,
) -> dict[int, torch.Tensor]:
    """Return the positions of the largest entries of the step's leader, the same on all ranks."""
    if not totals:
        return {}
    leader = step % lane.world_size
    if lane.rank == leader:
        chosen = torch.cat(
            [selector.select(t, k) for t, k in zip(totals.values(), counts, strict=True)]
        ).int()
    else:
        device = next(iter(totals.values())).device
        chosen = torch.empty(sum(counts), dtype=torch.int32, device=device)
    lane.broadcast(chosen, leader)
    return dict(zip(totals, chosen.long().split(list(counts)), strict=True))
