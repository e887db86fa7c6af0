"""Ranks that are not alike any more hear of it at once or within a few steps, all of them together."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lowdiff
from lowdiff.compressors import Cast, PowerSGD, TopK
from lowdiff.core.layout import layout_of, share_owners
from lowdiff.errors import RanksDiverged
from lowdiff.protocols import Compressor
from tests.crash.pool import Pool
from tests.crash.trainings import wrapped

KINDS: dict[str, Compressor | None] = {
    "topk": TopK(0.1),
    "powersgd": PowerSGD(2),
    "cast": Cast(torch.bfloat16),
    "none": None,
}
FEW = [pytest.param(k, marks=() if k in ("topk", "none") else pytest.mark.slow) for k in KINDS]
WORLD_SIZE, STEPS, SNAPSHOT_EVERY = 3, 14, 1000
#: The last step at whose end the ranks are alike.
ALIKE = 5
OWNER = share_owners(layout_of(nn.Linear(64, 32).named_parameters()), WORLD_SIZE)[0]
NEITHER, BEFORE_OWNER = (OWNER + 1) % WORLD_SIZE, (OWNER + 2) % WORLD_SIZE
Told = dict[str, Any]


class Lines(logging.Handler):
    """Keeps what is said of ranks that parted."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if getattr(record, "event", "") == "ranks_diverged":
            self.texts.append(record.getMessage())


class Training:
    """One rank's, with a scheduler that follows the rank's own loss."""

    def __init__(self, folder: str, kind: str, on_error: str) -> None:
        torch.manual_seed(0)
        self.model = wrapped(nn.Linear(64, 32))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(self.optimizer, patience=0)
        self.checkpointer = lowdiff.Checkpointer(
            f"{folder}/run",
            compressor=KINDS[kind],
            staging=f"{folder}/staging",
            on_error=on_error,
            snapshot_every=SNAPSHOT_EVERY,
        )
        self.resumed = self.checkpointer.attach(
            self.model, self.optimizer, scheduler=self.scheduler
        )
        self.weights: dict[int, bytes] = {self.resumed: self.bits()}

    def bits(self) -> bytes:
        return b"".join(p.detach().numpy().tobytes() for p in self.model.parameters())

    def train(self, odd: str) -> None:
        """Do all steps; ``odd`` is how this rank goes astray after step `ALIKE`, or nothing."""
        for step in self.checkpointer.steps(STEPS):
            if odd == "writes" and step == ALIKE:
                self.model.module.weight.data[17, 3] += 1e-6
            self.optimizer.zero_grad()
            inputs = torch.randn(4, 64, generator=torch.Generator().manual_seed(step))
            self.model(inputs).square().mean().backward()
            self.optimizer.step()
            worse = odd == "plateau" and step == ALIKE
            self.scheduler.step(100.0 if worse else 50.0 - step)
            self.weights[step + 1] = self.bits()


def train(
    rank: int, _: int, folder: str, kind: str, on_error: str, odd_rank: int, odd: str
) -> Told:
    """A pool's job: one rank does something of its own."""
    lines, raised = Lines(), None
    logging.getLogger("lowdiff").addHandler(lines)
    training = Training(folder, kind, on_error)
    try:
        training.train(odd if rank == odd_rank else "")
    except RanksDiverged as error:
        raised = (error.step, error.ranks, error.what)
    stats = training.checkpointer.stats()
    try:
        training.checkpointer.close()
    except RanksDiverged:
        assert raised
    finally:
        logging.getLogger("lowdiff").removeHandler(lines)
    return {
        "lines": lines.texts,
        "raised": raised,
        "stats": stats,
        "weights": training.weights,
    }


def noticed_at(odd_rank: int, odd: str) -> range:
    """Steps at whose end it may be noticed."""
    at_once = odd == "plateau" or odd_rank == OWNER
    return range(ALIKE + 1, ALIKE + (2 if at_once else 1 + WORLD_SIZE))


@pytest.mark.cases(1)
@pytest.mark.parametrize("kind", FEW)
@pytest.mark.parametrize("odd_rank", [OWNER, NEITHER, BEFORE_OWNER])
def test_a_write_on_one_rank_is_an_error_on_all_ranks_within_as_many_steps(
    pool: Pool, tmp_path: Path, kind: str, odd_rank: int
) -> None:
    found = pool.run(train, WORLD_SIZE, str(tmp_path), kind, "raise", odd_rank, "writes")
    assert len({told["raised"] for told in found}) == 1
    step, ranks, what = found[0]["raised"]
    assert step in noticed_at(odd_rank, "writes")
    assert ranks == (odd_rank,)
    assert what == "parameter 'weight'"
    for told in found:
        assert max(told["weights"]) == step, "no rank took another step"


def test_a_learning_rate_that_follows_each_ranks_own_loss_is_an_error_before_it_is_used(
    pool: Pool, tmp_path: Path
) -> None:
    found = pool.run(train, WORLD_SIZE, str(tmp_path), "topk", "raise", NEITHER, "plateau")
    for told in found:
        step, ranks, what = told["raised"]
        assert (step, ranks) == (ALIKE + 1, (NEITHER,))
        assert "learning rate" in what
        assert max(told["weights"]) == ALIKE + 1
    assert len({told["weights"][ALIKE + 1] for told in found}) == 1, (
        "the parameters are alike still"
    )


@pytest.mark.cases(1)
@pytest.mark.parametrize("odd", ["writes", "plateau"])
@pytest.mark.parametrize("kind", FEW)
def test_every_rank_says_once_which_one_left_and_takes_a_snapshot(
    pool: Pool, tmp_path: Path, kind: str, odd: str
) -> None:
    found = pool.run(train, WORLD_SIZE, str(tmp_path), kind, "warn", NEITHER, odd)
    for rank, told in enumerate(found):
        assert told["raised"] is None
        (line,) = told["lines"]
        assert f"rank {rank}: after step" in line
        assert f"rank(s) {NEITHER} differ from the others in" in line
        assert "A full snapshot follows" in line
        assert told["stats"]["diverged_ranks"] == [NEITHER]
        assert told["stats"]["steps"] == STEPS
    snapshots = sorted(
        int(path.name.rsplit("s", 1)[1]) for path in (tmp_path / "run/snapshots").glob("i*")
    )
    due = noticed_at(NEITHER, odd)
    assert any(due.start < step <= due.stop for step in snapshots), snapshots


@pytest.mark.slow
@pytest.mark.parametrize("odd", ["writes", "plateau"])
def test_the_next_attach_makes_the_ranks_alike_again(pool: Pool, tmp_path: Path, odd: str) -> None:
    pool.run(train, WORLD_SIZE, str(tmp_path), "topk", "raise", NEITHER, odd)
    again = pool.run(train, WORLD_SIZE, str(tmp_path), "topk", "raise", NEITHER, "")
    for told in again:
        assert told["raised"] is None
        assert ALIKE <= min(told["weights"]) <= noticed_at(NEITHER, odd)[-1]
        assert told["weights"] == again[0]["weights"]


@pytest.mark.cases(1)
@pytest.mark.parametrize("kind", FEW)
def test_ranks_that_stay_together_hear_nothing(pool: Pool, tmp_path: Path, kind: str) -> None:
    for told in pool.run(train, WORLD_SIZE, str(tmp_path), kind, "raise", NEITHER, ""):
        assert told["lines"] == []
        assert told["raised"] is None
        assert told["stats"]["diverged_ranks"] == []
