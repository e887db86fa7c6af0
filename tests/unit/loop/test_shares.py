"""The rest of an epoch is shared out so that each sample is seen, and the whole one as PyTorch does it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DistributedSampler

from lowdiff.loop.shares import Share, order_of

COUNTS = st.integers(1, 5)
FLAGS = st.booleans()


@given(st.integers(1, 40), COUNTS, COUNTS, FLAGS, FLAGS, FLAGS)
def test_a_whole_epoch_is_shared_out_as_pytorch_does_it(
    size: int,
    ranks: int,
    batch_size: int,
    shuffle: bool,
    drops_samples: bool,
    drops_batch: bool,
) -> None:
    data: Any = range(size)
    for rank in range(ranks):
        sampler: DistributedSampler[Any] = DistributedSampler(
            data, ranks, rank, shuffle=shuffle, seed=2, drop_last=drops_samples
        )
        sampler.set_epoch(3)
        share = Share(rank, ranks, batch_size, drops_samples, drops_batch)
        theirs = [*BatchSampler(sampler, batch_size, drops_batch)]
        assert share.batches(order_of(sampler), 0) == theirs


@given(st.integers(1, 40), st.integers(0, 45), COUNTS, COUNTS)
def test_each_sample_that_is_left_is_seen_and_every_rank_has_as_many_batches(
    size: int, skipped: int, ranks: int, batch_size: int
) -> None:
    order = [*range(size)]
    shares = [
        Share(rank, ranks, batch_size, drops_samples=False, drops_batch=False).batches(
            order, skipped
        )
        for rank in range(ranks)
    ]
    assert len({len(batches) for batches in shares}) == 1
    seen = [i for batches in shares for batch in batches for i in batch]
    left = {*order[skipped:]}
    assert {*seen} >= left
    assert len(seen) - len(left) < ranks  # repeated, so that all ranks take part


@pytest.mark.parametrize("skipped", [0, 3])
def test_what_does_not_suffice_for_all_ranks_may_be_dropped(skipped: int) -> None:
    order = [*range(10)]
    shares = [
        Share(rank, 4, 2, drops_samples=True, drops_batch=False).batches(order, skipped)
        for rank in range(4)
    ]
    seen = sorted(i for batches in shares for batch in batches for i in batch)
    assert seen == order[skipped : skipped + len(order[skipped:]) // 4 * 4]
