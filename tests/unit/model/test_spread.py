"""Tensors that only some ranks have reach all of them with their bits."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from lowdiff.model.ranks import Ranks
from lowdiff.persistence.format.values import same
from lowdiff.testing import limits
from tests.crash.pool import Pool

MADE = {
    "large": torch.arange(1000, dtype=torch.float64),
    "half": torch.tensor([1.5, float("nan"), -0.0], dtype=torch.bfloat16),
    "none": torch.empty(0),
    "flags": torch.tensor([True, False]),
    "matrix": torch.arange(600.0).view(20, 30).t(),
    "number": torch.tensor(7.5),
    "everybody's": torch.arange(5),
    "nobody else's": torch.arange(7, dtype=torch.int16),
}
#: Name -> who has it.
HOLDERS = {
    "large": {0},
    "half": {1, 2},
    "none": {2},
    "flags": {0, 2},
    "matrix": {1},
    "number": {0},
    "everybody's": {0, 1, 2},
    "nobody else's": {2},
}


def spread(rank: int, world_size: int, piece_bytes: int) -> list[str]:
    """A pool's job: what this rank got, checked for its bits."""
    mine = {name: MADE[name].clone() for name, holders in HOLDERS.items() if rank in holders}
    ranks = Ranks(dist.group.WORLD if world_size > 1 else None)
    with limits(spread_piece_bytes=piece_bytes):
        found = ranks.spread(mine)
    ranks.close()
    assert same(found, {name: MADE[name] for name in found})
    return sorted(found)


@pytest.mark.parametrize("piece_bytes", [1 << 20, 100])
def test_every_rank_gets_what_it_lacks(pool: Pool, piece_bytes: int) -> None:
    found = pool.run(spread, 3, piece_bytes)
    assert found == [sorted(n for n, h in HOLDERS.items() if rank not in h) for rank in range(3)]


def test_a_rank_alone_lacks_nothing(pool: Pool) -> None:
    assert pool.run(spread, 1, 100) == [[]]
