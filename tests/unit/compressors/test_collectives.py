"""The mean over ranks has the same bits wherever an element lies, on every rank."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed as dist

from lowdiff.compressors.collectives import reproducible_mean
from tests.contract.compressors import DTYPES, Patterns, exact
from tests.crash.pool import Pool

SIZES = (0, 1, 2, 3, 64, 1000, 1001)


def values(rank: int, dtype: torch.dtype, numel: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return (torch.randn(2000, generator=generator) * 100).to(dtype)[:numel]


def average(rank: int, world_size: int) -> list[list[Patterns]]:
    """A pool's job: every size alone, and as the end of a longer buffer."""
    found = []
    for dtype in DTYPES:
        for size in SIZES:
            own = values(rank, dtype, size).clone()
            assert reproducible_mean(own, dist.group.WORLD).wait() is own
            longer = torch.cat([torch.ones(37, dtype=dtype), values(rank, dtype, size)])
            reproducible_mean(longer, dist.group.WORLD).wait()
            found.append([exact(own).copy(), exact(longer[37:]).copy()])
    return found


@pytest.mark.parametrize("world_size", [2, 3])
def test_elements_are_added_in_rank_order_wherever_they_lie(pool: Pool, world_size: int) -> None:
    reports = pool.run(average, world_size)
    cases = [(dtype, size) for dtype in DTYPES for size in SIZES]
    for index, (dtype, size) in enumerate(cases):
        wide = torch.float32 if dtype.itemsize == 2 else dtype
        total = torch.zeros(size, dtype=wide)
        for rank in range(world_size):
            total += values(rank, dtype, size) / world_size
        for report in reports:
            alone, in_a_bucket = report[index]
            assert np.array_equal(alone, exact(total.to(dtype)))
            assert np.array_equal(in_a_bucket, alone)


def test_alone_it_changes_nothing() -> None:
    buffer = torch.tensor([1.0, -0.0, float("nan")])
    before = exact(buffer).copy()
    reproducible_mean(buffer, None).wait()
    assert np.array_equal(exact(buffer), before)
