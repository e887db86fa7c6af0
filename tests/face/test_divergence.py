"""Ranks that no longer hold the same parameters hear of it within 64 steps, all at once."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lowdiff
from lowdiff.compressors import Cast, PowerSGD, TopK
from lowdiff.errors import RanksDiverged
from lowdiff.protocols import Compressor
from lowdiff.recovery.verify import verify
from tests.scenarios.pool import Pool
from tests.scenarios.trainings import wrapped

KINDS: dict[str, Compressor | None] = {
    "topk": TopK(0.1),
    "powersgd": PowerSGD(2),
    "cast": Cast(torch.bfloat16),
    "none": None,
}
FEW = [pytest.param(k, marks=() if k in ("topk", "none") else pytest.mark.slow) for k in KINDS]
CHANGED_AT, ODD_RANK, STEPS = 10, 1, 90
Told = dict[str, Any]


class Lines(logging.Handler):
    """Keeps what is said of ranks that parted."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if getattr(record, "event", "") == "ranks_diverged":
            self.texts.append(record.getMessage())


def train(rank: int, world_size: int, folder: str, kind: str, on_error: str, parts: bool) -> Told:
    """A pool's job: one rank changes one value, behind everybody's back."""
    torch.manual_seed(0)
    model = wrapped(nn.Linear(64, 32))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    checkpointer = lowdiff.Checkpointer(
        f"{folder}/run",
        compressor=KINDS[kind],
        staging=f"{folder}/staging",
        on_error=on_error,
        snapshot_every=1000,
    )
    checkpointer.attach(model, optimizer)
    lines, raised = Lines(), ""
    logging.getLogger("lowdiff").addHandler(lines)
    try:
        for step in checkpointer.steps(STEPS):
            if parts and step == CHANGED_AT and rank == ODD_RANK:
                model.module.weight.data[17, 3] += 1e-6
            optimizer.zero_grad()
            inputs = torch.randn(4, 64, generator=torch.Generator().manual_seed(step))
            model(inputs).square().mean().backward()
            optimizer.step()
    except RanksDiverged as error:
        raised = f"{error.step} {error.ranks}"
    finally:
        logging.getLogger("lowdiff").removeHandler(lines)
    told = {"lines": lines.texts, "raised": raised, "stats": checkpointer.stats()}
    checkpointer.close()
    return told


@pytest.mark.parametrize("kind", FEW)
def test_every_rank_says_once_which_one_left(pool: Pool, tmp_path: Path, kind: str) -> None:
    for rank, told in enumerate(pool.run(train, 3, str(tmp_path), kind, "warn", True)):
        (line,) = told["lines"]
        assert f"rank {rank}: after step" in line
        assert f"the parameters of rank(s) {ODD_RANK} are not those of rank 0" in line
        assert "(around 'weight')" in line
        assert told["stats"]["diverged_ranks"] == [ODD_RANK]
        assert told["stats"]["steps"] == STEPS
    if kind != "none":  # there the steps between snapshots are not kept
        report = verify(tmp_path / "run", staging=tmp_path / "staging")
        assert f"differ from what rank {ODD_RANK} recorded" in report.failures[0].message


def test_it_is_an_error_at_the_same_commit_of_all_ranks_if_asked_for(
    pool: Pool, tmp_path: Path
) -> None:
    raised = {told["raised"] for told in pool.run(train, 3, str(tmp_path), "topk", "raise", True)}
    (one,) = raised
    step, ranks = one.split(" ", 1)
    assert CHANGED_AT < int(step) <= CHANGED_AT + 64
    assert ranks == f"({ODD_RANK},)"


@pytest.mark.parametrize("kind", FEW)
def test_ranks_that_stay_together_hear_nothing(pool: Pool, tmp_path: Path, kind: str) -> None:
    for told in pool.run(train, 3, str(tmp_path), kind, "raise", False):
        assert told["lines"] == []
        assert told["raised"] == ""
        assert told["stats"]["diverged_ranks"] == []
