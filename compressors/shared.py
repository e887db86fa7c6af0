"""Sparse exchange where all ranks send the same positions: the average takes k values, not more."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from lowdiff.compressors.lane import Lane, share
from lowdiff.compressors.sparse import SparseReducer
from lowdiff.protocols import ResidualStore
from lowdiff.types import Layout


class SharedReducer(SparseReducer, ABC):
    """Averages the same entries of every rank; each rank stores its share of them."""

    def __init__(
        self, layout: Layout, residual: ResidualStore, group: dist.ProcessGroup | None
    ) -> None:
        super().__init__(layout, residual, group)
        self.lane = Lane(group)

    @abstractmethod
    def kept(self, numel: int) -> int:
        """Number of entries exchanged of a parameter."""

    @abstractmethod
    def choose(self, totals: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """Ascending positions, int64 ``[kept]``, for each parameter, the same on all ranks.

        Args:
            totals: Layout index -> gradient plus residual of this rank.
        """

    def reduce(
        self, parameters: Sequence[int], gradients: Sequence[torch.Tensor], buffer: torch.Tensor
    ) -> torch.futures.Future[torch.Tensor]:
        """See ``Reducer.reduce``."""

        def work() -> torch.Tensor:
            self._average(dict(zip(parameters, gradients, strict=True)), buffer)
            self.averaged(parameters, gradients)
            return buffer

        return self.lane.submit(work, buffer.device)

    def close(self) -> None:
        """See ``Reducer.close``."""
        self.lane.close()

    def _average(self, gradients: Mapping[int, torch.Tensor], buffer: torch.Tensor) -> None:
        counts = {i: self.kept(g.numel()) for i, g in gradients.items()}
        sizes = [buffer.numel(), sum(counts.values())]
        self.lane.greet(self.stamp, sizes, self.headers, buffer.device)
        totals = {
            i: self.feedback.total(i, g) for i, g in gradients.items() if counts[i] < g.numel()
        }
        chosen = self.choose(totals)
        # An overflow must not hide where nobody looks: what is sent of such a tensor is NaN, so that
        # a scaler skips the step.
        hidden = {i: total.sum(dtype=_wide(total)) * 0 for i, total in totals.items()}
        values = [
            self.send(i, g, totals[i], chosen[i]).add_(hidden[i]) if i in chosen else g
            for i, g in gradients.items()
        ]
        entries = torch.cat(values)
        self.lane.mean(entries)
        for (i, gradient), own in zip(
            gradients.items(), entries.split(list(counts.values())), strict=True
        ):
            if i not in chosen:
                gradient.copy_(own)
                continue
            gradient.zero_().index_copy_(0, chosen[i], own)
            mine = slice(*share(counts[i], self.rank, self.world_size))
            self.note_selected(i, chosen[i][mine])
            self.note_exchanged(i, chosen[i])


def _wide(tensor: torch.Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32
