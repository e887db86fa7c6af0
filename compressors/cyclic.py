"""Top-k selected by one rank at a time, in turns: ScaleCom."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.distributed as dist

from lowdiff.compressors.settings import SparseSettings
from lowdiff.compressors.sparse import IndexedDecoder, SharedReducer
from lowdiff.protocols import Decoder, ResidualStore
from lowdiff.types import Layout, Payload


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
    ) -> CyclicTopKReducer:
        """Make the reducer of one run."""
        return CyclicTopKReducer(self, layout, residual, group, peers)

    def decoder(self, payloads: Sequence[Payload], layout: Layout) -> Decoder:
        """Return a decoder that assigns each rank's share of the entries."""
        return IndexedDecoder(payloads, layout)


class CyclicTopKReducer(SharedReducer):
    """CyclicTopK bound to one run."""

    def choose(self, totals: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """Choose the largest entries of this step's leader; see ``SharedReducer.choose``."""
        if not totals:
            return {}
        counts = [self.kept(total.numel()) for total in totals.values()]
        leader = self.step % self.world_size
        if self.rank == leader:
            chosen = torch.cat(
                [self.selector.select(t, k) for t, k in zip(totals.values(), counts, strict=True)]
            ).int()
        else:
            device = next(iter(totals.values())).device
            chosen = torch.empty(sum(counts), dtype=torch.int32, device=device)
        self.lane.broadcast(chosen, leader)
        return dict(zip(totals, chosen.long().split(counts), strict=True))
