"""torch's Join, for ranks with uneven inputs: refused by name on every rank, where a rank would hang else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.join import Join

import lowdiff
from lowdiff.compressors import TopK
from lowdiff.errors import UsageError
from tests.crash.pool import Pool
from tests.crash.trainings import batch, wrapped
from tests.unit.loops import close_after_error

SETTINGS: dict[str, dict[str, Any]] = {
    "topk": {"compressor": TopK(0.1)},
    "replica": {"compressor": None},
    "survivors": {"compressor": None, "strategy": "survivors"},
}


def life(
    rank: int, world_size: int, folder: str, kind: str, batches: int, options: dict[str, bool]
) -> tuple[str, str, int]:
    """Train inside a Join; rank 1 has three batches more. Returns what ended the loop, and the steps made."""
    torch.manual_seed(0)
    ddp = wrapped(nn.Linear(12, 4))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    checkpointer = lowdiff.Checkpointer(
        f"{folder}/run", staging=f"{folder}/staging-{rank}", **SETTINGS[kind]
    )
    checkpointer.attach(ddp, optimizer)
    error, done = ("", ""), 0
    try:
        with Join([ddp], **options):
            for step in range(batches + 3 * rank):
                optimizer.zero_grad()
                ddp(batch(step, rank, 6, 12)).square().mean().backward()
                optimizer.step()
                checkpointer.commit()
                done += 1
    except Exception as e:
        error = type(e).__name__, str(e)
    close_after_error(checkpointer)
    return *error, done


@pytest.mark.cases(1)
@pytest.mark.parametrize("kind", SETTINGS)
def test_a_loop_inside_a_join_is_refused_on_all_ranks_at_its_first_step(
    tmp_path: Path, pool: Pool, kind: str
) -> None:
    for name, text, step in pool.run(life, 2, str(tmp_path), kind, 2, {}):
        assert (name, step) == ("UsageError", 0)
        assert "torch's Join" in text
        assert "throw_on_early_termination=True" in text


def test_a_rank_without_any_batch_is_told_so_as_well(tmp_path: Path, pool: Pool) -> None:
    for name, text, step in pool.run(life, 2, str(tmp_path), "topk", 0, {}):
        assert (name, step) == ("UsageError", 0)
        assert "torch's Join" in text


def test_a_join_that_ends_all_ranks_with_the_first_trains(tmp_path: Path, pool: Pool) -> None:
    options = {"throw_on_early_termination": True}
    for rank, (name, text, step) in enumerate(pool.run(life, 2, str(tmp_path), "topk", 2, options)):
        assert (name, step) == ("RuntimeError", 2)
        assert ("exhausted", "Detected")[rank] in text
    assert lowdiff.recover(tmp_path / "run").step == 2


def after_a_join(rank: int, world_size: int, folder: str) -> tuple[str, int]:
    """Attach behind a Join that is over, and train once its mark is taken away."""
    ddp = wrapped(nn.Linear(12, 4))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    with ddp.join():
        ddp(batch(0, rank, 6, 12)).sum().backward()
    optimizer.zero_grad()
    checkpointer = lowdiff.Checkpointer(
        f"{folder}/run", staging=f"{folder}/staging-{rank}", compressor=TopK(0.1)
    )
    checkpointer.attach(ddp, optimizer)
    refused = ""
    for step in range(3):
        try:
            ddp(batch(step, rank, 6, 12)).square().mean().backward()
        except UsageError as error:
            refused = str(error)
            optimizer.zero_grad()
            ddp.join(enable=False)
            continue
        optimizer.step()
        optimizer.zero_grad()
        checkpointer.commit()
    checkpointer.close()
    return refused, lowdiff.recover(f"{folder}/run").step


def test_the_mark_of_a_join_that_is_over_can_be_taken_away(tmp_path: Path, pool: Pool) -> None:
    for refused, step in pool.run(after_a_join, 2, str(tmp_path)):
        assert "ddp.join(enable=False) takes the mark away" in refused
        assert step == 2
