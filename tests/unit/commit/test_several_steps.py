"""Loop bodies with several optimizer steps: staged one by one, committed together."""

from __future__ import annotations

import logging
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import lowdiff
from lowdiff import testing
from lowdiff.compressors import TopK
from lowdiff.errors import ConfigError, UsageError
from lowdiff.persistence.format.values import same
from tests.crash.pool import Pool
from tests.crash.trainings import wrapped

BODIES = 9


class Training:
    """Actor and critic, which step a varying number of times in a body."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        torch.manual_seed(0)
        self.actor = nn.Linear(6, 3)
        self.critic = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
        self.model = nn.ModuleDict({"actor": self.actor, "critic": self.critic})
        self.optimizers: list[torch.optim.Optimizer] = [
            torch.optim.AdamW(self.actor.parameters(), lr=1e-2),
            torch.optim.SGD(self.critic.parameters(), lr=1e-2, momentum=0.9),
        ]
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizers[0], 3)
        self.average = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        self.checkpointer = lowdiff.Checkpointer(
            folder / "run", staging=folder / "staging", **{"optimizer_steps": "any", **settings}
        )

    def attach(self) -> int:
        return self.checkpointer.attach(
            self.model, self.optimizers, scheduler=self.scheduler, average=self.average
        )

    def body(self, number: int, *, calls: int | None = None) -> None:
        """What a body does: ``number % 4 + 1`` rounds, or ``calls``."""
        for call in range(number % 4 + 1 if calls is None else calls):
            self.step(1, self.critic(torch.randn(5, 6)).square().mean())
            if number == 3 and call == 1:  # somebody else writes between two calls
                self.actor.weight.data.clamp_(-0.1, 0.1)
            if number % 2 == 0 or call == 0:
                self.step(0, self.actor(torch.randn(5, 6)).square().mean())
                self.scheduler.step()
            if number in (4, 5):
                self.critic.get_parameter("0.weight").data[1] *= 0.5
            if number != 2:
                self.average.update_parameters(self.model)

    def step(self, index: int, loss: torch.Tensor) -> None:
        self.optimizers[index].zero_grad()
        loss.backward()
        self.optimizers[index].step()

    def state(self) -> dict[str, Any]:
        return deepcopy(
            {
                "model": dict(self.model.state_dict()),
                "optimizers": [o.state_dict() for o in self.optimizers],
                "average": self.average.state_dict(),
                "scheduler": self.scheduler.state_dict(),
                "random": torch.get_rng_state(),
            }
        )


def uninterrupted(folder: Path, **settings: Any) -> dict[str, Any]:
    training = Training(folder, **settings)
    training.attach()
    for number in training.checkpointer.steps(BODIES):
        training.body(number)
    training.checkpointer.close()
    return training.state()


@pytest.mark.slow
@pytest.mark.parametrize("victim", [1, 4, 5, 8])
@pytest.mark.parametrize("place", ["in the body", "behind it"])
def test_a_run_that_dies_in_a_body_goes_on_from_the_last_committed_one(
    tmp_path: Path, victim: int, place: str, caplog: pytest.LogCaptureFixture
) -> None:
    expected = uninterrupted(tmp_path / "other")
    training = Training(tmp_path)
    training.attach()
    for number in range(victim):
        training.body(number)
        training.checkpointer.commit()
    committed = training.state()
    if place == "in the body":
        training.body(victim, calls=2)
    testing.kill(training.checkpointer)

    training = Training(tmp_path)
    assert training.attach() == victim
    del committed["random"]  # the generators come back with the first body
    assert same({k: v for k, v in training.state().items() if k != "random"}, committed)
    for number in training.checkpointer.steps(BODIES):
        training.body(number)
    training.checkpointer.close()
    assert same(training.state(), expected)
    assert "full snapshot" not in caplog.text


def test_a_body_that_staging_does_not_hold_costs_a_snapshot_at_its_end(
    tmp_path: Path, limits: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    limits(least_body_steps=3, most_body_steps=3)
    training = Training(tmp_path, snapshot_every=100)
    training.attach()
    states = {}
    with caplog.at_level(logging.WARNING):
        for number in training.checkpointer.steps(6):
            training.body(number, calls=5 if number == 2 else 1)
            states[number] = training.state()
            if number == 4:
                break
    assert caplog.text.count("loop bodies make more optimizer steps (step 3: ") == 1
    training.checkpointer.commit()
    testing.kill(training.checkpointer)
    training = Training(tmp_path)
    assert training.attach() == 5
    del states[4]["random"]
    assert same({k: v for k, v in training.state().items() if k != "random"}, states[4])
    training.checkpointer.close()
    found = lowdiff.recover(tmp_path / "run", 3, staging=tmp_path / "staging")
    assert same(dict(found.model_state_dict()), states[2]["model"])


def test_what_is_left_by_break_is_committed_by_commit_alone(tmp_path: Path) -> None:
    training = Training(tmp_path)
    training.attach()
    for number in training.checkpointer.steps(5):
        training.body(number)
        if number == 2:
            break
    training.checkpointer.close()
    training = Training(tmp_path)
    assert training.attach() == 2
    training.checkpointer.close()


def test_a_compressor_takes_one_optimizer_step_per_body(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="without a compressor"):
        Training(tmp_path, compressor=TopK(0.1))
    with pytest.raises(ConfigError, match="optimizer_steps is one of"):
        Training(tmp_path, optimizer_steps=2)


def test_the_second_step_of_a_body_says_how_to_announce_it(tmp_path: Path) -> None:
    training = Training(tmp_path, optimizer_steps=1)
    training.attach()
    with pytest.raises(UsageError, match='optimizer_steps="any"'):
        training.body(3)
    testing.kill(training.checkpointer)


def train_ranks(rank: int, _: int, folder: str, until: int, dies: bool) -> dict[str, Any]:
    """One rank's life: DDP, two to four steps in a body, gradients accumulated under no_sync."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Linear(16, 2))
    ddp = wrapped(model)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-2)
    checkpointer = lowdiff.Checkpointer(
        Path(folder) / "run", staging=Path(folder) / "staging", optimizer_steps="any"
    )
    torch.manual_seed(10 + rank)
    begun = checkpointer.attach(ddp, optimizer)
    for number in checkpointer.steps(until + dies):
        for call in range(2 + number % 3):
            optimizer.zero_grad()
            with ddp.no_sync():
                ddp(torch.randn(4, 6)).square().mean().backward()
            ddp(torch.randn(4, 6)).square().mean().backward()
            optimizer.step()
            if number == 2 and call == 0:
                model.get_parameter("0.weight").data.mul_(0.9)
            if dies and number == until and call == 1:
                testing.kill(checkpointer)
                return {}
    checkpointer.close()
    return {"begun": begun, "model": deepcopy(model.state_dict()), "random": torch.get_rng_state()}


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_that_die_in_a_body_go_on_from_the_last_one_that_all_committed(
    pool: Pool, tmp_path: Path, world_size: int
) -> None:
    expected = pool.run(train_ranks, world_size, str(tmp_path / "other"), 7, False)
    pool.run(train_ranks, world_size, str(tmp_path), 4, True)
    found = pool.run(train_ranks, world_size, str(tmp_path), 7, False)
    # Of step 4 the ranks hear in the body after it, in which they die.
    assert {told.pop("begun") for told in found} == {4}
    assert {told.pop("begun") for told in expected} == {0}
    if world_size == 2:  # of three, the order in which DDP adds depends on its buckets
        assert same(found, expected)
