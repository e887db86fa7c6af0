"""What a checkpointer opens between ranks it closes again."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import lowdiff
from lowdiff.errors import LowDiffError
from tests.contract.compressors import FAMILY
from tests.crash.pool import Pool
from tests.crash.trainings import wrapped
from tests.unit.loops import small_model


def num_groups() -> int:
    """Process groups of this process."""
    return len(dist.distributed_c10d._world.pg_map)


def attach(rank: int, world_size: int, folder: str, name: str, lives: int) -> list[int]:
    """Process groups before the first life, within each, and after each."""
    model = wrapped(small_model())
    optimizer = torch.optim.AdamW(model.parameters())
    counts = [num_groups()]
    for life in range(1, lives + 1):
        with lowdiff.Checkpointer(
            f"{folder}/run", compressor=FAMILY[name], staging=f"{folder}/staging-{rank}"
        ) as checkpointer:
            checkpointer.attach(model, optimizer)
            for step in checkpointer.steps(2 * life):
                optimizer.zero_grad()
                model(torch.full((4, 20), step + rank + 1.0)).square().mean().backward()
                optimizer.step()
            counts.append(num_groups())
        counts.append(num_groups())
    return counts


@pytest.mark.slow
@pytest.mark.parametrize(("name", "own"), [("topk", 1), ("powersgd", 2), ("randomk", 2)])
def test_a_closed_checkpointer_leaves_no_process_group(
    pool: Pool, tmp_path: Path, name: str, own: int
) -> None:
    for counts in pool.run(attach, 2, str(tmp_path), name, 3):
        before = counts[0]
        assert counts == [before] + [before + own, before] * 3


def fail(rank: int, world_size: int, folder: str) -> list[int]:
    """Process groups before and after an attach that fails on rank 1."""
    model = wrapped(small_model())
    optimizer = torch.optim.AdamW(model.parameters())
    counts = [num_groups()]
    checkpointer = lowdiff.Checkpointer(
        f"{folder}/run", compressor=FAMILY["topk" if rank else "powersgd"]
    )
    with pytest.raises(LowDiffError):
        checkpointer.attach(model, optimizer)
    return [*counts, num_groups()]


def test_an_attach_that_failed_leaves_none_either(pool: Pool, tmp_path: Path) -> None:
    for before, after in pool.run(fail, 2, str(tmp_path)):
        assert after == before
