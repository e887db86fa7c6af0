"""How ranks end a run that some of them left earlier, or whose process group is gone."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import lowdiff
from lowdiff.compressors import TopK
from lowdiff.errors import UnsupportedModel
from lowdiff.model.ranks import Ranks
from tests.crash.pool import Pool
from tests.crash.trainings import wrapped
from tests.unit.loops import Loop


def meet(rank: int, _: int, missing: int) -> tuple[str, float]:
    ranks = Ranks(dist.group.WORLD)
    started, why = time.monotonic(), ""
    if rank != missing:
        why = ranks.meet(1.0)
    took = time.monotonic() - started
    time.sleep(max(0.0, 4.0 - took))  # the one that does not come is alive
    return why, took


@pytest.mark.parametrize("missing", [-1, 0, 1, 2])
def test_whoever_waits_for_a_rank_that_does_not_come_gives_up_in_time(
    pool: Pool, missing: int
) -> None:
    for rank, (why, took) in enumerate(pool.run(meet, 3, missing)):
        assert took < 3.5
        is_in_vain = missing >= 0 and rank != missing
        assert why == ("another rank did not reach close() within 1 s" if is_in_vain else "")


def destroy_first(rank: int, _: int, folder: str) -> int:
    """Close behind the end of the process group."""
    model = wrapped(nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    checkpointer = lowdiff.Checkpointer(
        Path(folder) / "run", staging=Path(folder) / "staging", compressor=TopK(0.5)
    )
    begun = checkpointer.attach(model, optimizer)
    for _ in checkpointer.steps(begun + 3):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    dist.destroy_process_group()
    checkpointer.close()
    return begun


def test_a_process_group_that_was_destroyed_before_close_costs_the_last_snapshot(
    pool: Pool, tmp_path: Path
) -> None:
    assert pool.run(destroy_first, 2, str(tmp_path)) == [0, 0]
    assert pool.run(destroy_first, 2, str(tmp_path)) == [3, 3]


def test_parameters_that_come_to_share_memory_are_refused_at_that_step(tmp_path: Path) -> None:
    loop = Loop(tmp_path, model=nn.Sequential(nn.Linear(20, 20), nn.Linear(20, 20)))
    loop.attach()
    layers: Any = loop.model
    for number in range(3):
        loop.step(number)
        loop.checkpointer.commit()
    layers[1].weight.data = layers[0].weight.data
    with pytest.raises(UnsupportedModel, match=r"'0.weight' and '1.weight' share memory"):
        loop.step(3)
    loop.die()
    assert Loop(tmp_path, model=nn.Sequential(nn.Linear(20, 20), nn.Linear(20, 20))).run(4) == 3
