"""A lane that is closed while a job is under way does not disturb anybody else's collectives."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from lowdiff.compressors.collectives import own_group
from lowdiff.compressors.lane import Lane
from tests.crash.pool import Pool

CPU = torch.device("cpu")


def close_in_the_middle(rank: int, world_size: int) -> tuple[list[float], list[float], str]:
    """A job of two exchanges; what it got, what the training got meanwhile, and what comes after."""
    lane = Lane(dist.group.WORLD)
    halfway, closed = threading.Event(), threading.Event()

    def job() -> torch.Tensor:
        lane.gather(torch.tensor([0.0]))
        halfway.set()
        closed.wait()
        return torch.cat(lane.gather(torch.tensor([rank + 100.0])))

    done = lane.submit(job, CPU)
    halfway.wait()
    lane.close()
    closed.set()
    trained = [torch.zeros(1) for _ in range(world_size)]
    dist.all_gather(trained, torch.tensor([rank + 7.0]))
    found = done.wait()
    with pytest.raises(RuntimeError, match="attach again") as refusal:
        lane.submit(job, CPU).wait()
    return found.tolist(), torch.cat(trained).tolist(), str(refusal.value)


@pytest.mark.slow
def test_its_job_ends_on_its_own_group(pool: Pool) -> None:
    for found, trained, _ in pool.run(close_in_the_middle, 2):
        assert found == [100.0, 101.0]
        assert trained == [7.0, 8.0]


def patience_of_its_own_group(rank: int, world_size: int) -> float:
    training = dist.new_group(list(range(world_size)), timeout=timedelta(hours=3))
    group = own_group(training)
    return float(group._get_backend(CPU).options._timeout.total_seconds())


def test_its_own_group_waits_as_long_as_the_trainings(pool: Pool) -> None:
    assert pool.run(patience_of_its_own_group, 2) == [3 * 3600.0] * 2
