"""No compression, and no record: gradients are averaged as DDP averages them (strategy survivors)."""

from __future__ import annotations

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
        self, layout: Layout, residual: ResidualStore, group: dist.ProcessGroup | None
    ) -> DenseReducer:
        """Make the reducer of one run; its payloads are empty."""
        return DenseReducer(self, layout, group, kept=())
