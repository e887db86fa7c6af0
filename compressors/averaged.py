"""No compression, and no record: gradients are averaged as DDP averages them (strategy survivors)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch.distributed as dist

from lowdiff.compressors.dense import Dense, DenseReducer
from lowdiff.protocols import ResidualStore
from lowdiff.types import Layout


@dataclass(frozen=True, slots=True)
class Averaged(Dense):
    """Leaves the gradient as it is, and keeps nothing of it.

    Every rank of a data-parallel training holds the whole state, so after a failure those that live
    can save it: no step needs a record.

    Reference: Gupta et al., "Just-In-Time Checkpointing", EuroSys 2024.
    """

    name: ClassVar[str] = "averaged"

    def bind(
        self,
        layout: Layout,
        residual: ResidualStore,
        group: dist.ProcessGroup | None,
        peers: Sequence[int] = (),
    ) -> DenseReducer:
        """Make the reducer of one run; its payloads are empty."""
        world_size = 1 if group is None else group.size()
        return DenseReducer(self, group, peers, shares=[()] * world_size)
