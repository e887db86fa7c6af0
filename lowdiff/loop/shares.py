"""The rest of an epoch that a ``DistributedSampler`` shares out, when the number of ranks is another one."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any

from torch.utils.data import BatchSampler, DistributedSampler


@dataclass(frozen=True, slots=True)
class Share:
    """One rank's part of an epoch.

    In each round every rank takes a batch, so what all ranks have consumed is a prefix of the epoch's order,
    and what is left can be shared out over any number of ranks.

    Attributes:
        rank: Whose.
        ranks: Number of ranks.
        batch_size: Samples per batch and rank.
        drops_samples: Whether samples that do not suffice for all ranks are left out, not repeated.
        drops_batch: Whether an incomplete last batch is left out.
    """

    rank: int
    ranks: int
    batch_size: int
    drops_samples: bool
    drops_batch: bool

    def batches(self, order: list[int], skipped: int) -> list[list[int]]:
        """Return the indices of this rank's batches behind the samples that are skipped.

        Without skipped samples, they are those of PyTorch's sampler.

        Args:
            order: Of all samples of the epoch.
            skipped: How many of them all ranks have consumed.
        """
        rest = order[skipped:]
        rounds = len(rest) // self.ranks if self.drops_samples else -(-len(rest) // self.ranks)
        # Every rank must take part in every step.
        repeated = [*rest, *islice(cycle(order), max(0, rounds * self.ranks - len(rest)))]
        own = repeated[: rounds * self.ranks][self.rank :: self.ranks]
        return [*BatchSampler(own, self.batch_size, self.drops_batch)]


def share_of(loader: Any) -> Share | None:
    """Return this rank's part, if PyTorch's own samplers share a loader's samples out."""
    batches, sampler = loader.batch_sampler, loader.sampler
    if type(sampler) is not DistributedSampler or type(batches) is not BatchSampler:
        return None
    return Share(
        sampler.rank,
        sampler.num_replicas,
        batches.batch_size,
        sampler.drop_last,
        batches.drop_last,
    )


def order_of(sampler: DistributedSampler[Any]) -> list[int]:
    """Return the indices of all samples, in the order of the sampler's epoch."""
    whole = copy.copy(sampler)
    whole.rank, whole.num_replicas, whole.drop_last = 0, 1, False
    whole.num_samples = whole.total_size = len(sampler.dataset)  # type: ignore[arg-type]
    return [*whole]
