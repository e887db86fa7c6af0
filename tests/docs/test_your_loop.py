"""The recipes of docs/your_loop.md: killed in a step and started again, each ends with the same bits."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

import lowdiff
from lowdiff import testing
from lowdiff.compressors import TopK
from lowdiff.persistence.format.values import same
from tests.docs.blocks import ROOT

TEXT = (ROOT / "docs/your_loop.md").read_text()
#: Heading -> its lines; where there are two ways, the second one by the heading and a mark.
RECIPES = {
    heading + " (2)" * number: lines
    for heading, text in re.findall(
        r"^## (\d+\. [^\n]*)\n(.*?)(?=^## )", TEXT, re.DOTALL | re.MULTILINE
    )
    for number, lines in enumerate(re.findall(r"```python\n(.*?)```", text, re.DOTALL))
}
#: What is changed -> the lines that change it.
CHANGES = dict(
    re.findall(
        r"^\*\*([^*]+)\*\*.*?```python\n(.*?)```",
        TEXT.partition("## Changing things on purpose")[2].partition("\n## ")[0],
        re.DOTALL | re.MULTILINE,
    )
)
#: Forward passes after which a run is killed: in the middle of a step.
KILLED_AT = 7


class Killed(BaseException):
    """What ends a life."""


class Environment:
    """Somebody's environment."""

    def __init__(self) -> None:
        self.place, self.goal = torch.zeros(4), torch.ones(2)

    def observe(self) -> torch.Tensor:
        return self.place

    def advance(self) -> None:
        self.place = self.place + torch.randn(4) * 0.1

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.place = state_dict["place"]


class Lion(torch.optim.Optimizer):
    """Chen et al., "Symbolic Discovery of Optimization Algorithms", arXiv 2302.06675."""

    def __init__(self, params: Any, lr: float = 1e-4, betas: tuple[float, float] = (0.9, 0.99)):
        super().__init__(params, {"lr": lr, "betas": betas})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            first, second = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["mean"] = torch.zeros_like(parameter)
                update = state["mean"] * first + parameter.grad * (1 - first)
                parameter.add_(update.sign(), alpha=-group["lr"])
                state["mean"].mul_(second).add_(parameter.grad, alpha=1 - second)


def life(recipe: str, folder: Path, *, is_killed: bool = False) -> dict[str, Any]:
    """Run a recipe as a script of its own would; what it holds at its end."""
    for seed in (torch.manual_seed, np.random.seed, random.seed):
        seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.1), nn.Linear(16, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    passes = 0

    def count(*_: object) -> None:
        nonlocal passes
        passes += torch.is_grad_enabled()
        if is_killed and passes == KILLED_AT:
            raise Killed

    def get_batch() -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(8, 4), torch.randn(8, 2)

    @torch.no_grad()
    def evaluate(module: nn.Module) -> None:
        module(torch.randn(8, 4))

    names: dict[str, Any] = {
        "lowdiff": lowdiff,
        "torch": torch,
        "AveragedModel": AveragedModel,
        "DataLoader": DataLoader,
        "get_ema_multi_avg_fn": get_ema_multi_avg_fn,
        "Environment": Environment,
        "Lion": Lion,
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 4),
        "loss_of": nn.functional.mse_loss,
        "dataset": TensorDataset(torch.randn(40, 4), torch.randn(40, 2)),
        "get_batch": get_batch,
        "evaluate": evaluate,
        "run": folder / "run",
        "staging": folder / "staging",
        "checkpointer": lowdiff.Checkpointer(
            folder / "run", compressor=TopK(0.2), staging=folder / "staging", snapshot_every=5
        ),
    }
    model.register_forward_hook(count)
    try:
        exec(recipe.replace('"runs/ppo"', "run, staging=staging"), names)  # noqa: S102
    except Killed:
        testing.kill(names["checkpointer"])
        return {}
    names["checkpointer"].close()
    return deepcopy(
        {
            "model": model.state_dict(),
            "optimizer": names["optimizer"].state_dict(),
            "state": dict(names["checkpointer"].state),
            "random": torch.get_rng_state(),
            "more": [
                names[name].state_dict()
                for name in ("scheduler", "scaler", "average", "world")
                if name in names
            ],
        }
    )


def test_there_are_eleven_questions_each_with_its_lines() -> None:
    assert [int(name.partition(".")[0]) for name in RECIPES] == [1, *range(1, 12)]
    assert TEXT.count("```python") == len(RECIPES) + len(CHANGES)


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_that_is_killed_in_a_step_ends_with_the_same_bits(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    expected = life(RECIPES[name], tmp_path / "whole")
    assert not life(RECIPES[name], tmp_path / "killed", is_killed=True)
    found = life(RECIPES[name], tmp_path / "killed")
    assert same(found, expected)
    assert "drawn from" not in caplog.text


class Change:
    """A run of six steps with a scheduler and a loader, and what a change of it makes of the seventh."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def start(self, lines: str, **more: Any) -> dict[str, Any]:
        """Build what the script builds, and attach it by the lines; returns all names."""
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        names: dict[str, Any] = {
            "lowdiff": lowdiff,
            "torch": torch,
            "TopK": TopK,
            "DataLoader": DataLoader,
            "model": model,
            "optimizer": optimizer,
            "scheduler": torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20),
            "dataset": TensorDataset(torch.randn(40, 4)),
            "more_data": TensorDataset(torch.randn(56, 4)),
            "checkpointer": lowdiff.Checkpointer(
                self.folder / "runs/before", compressor=TopK(0.2), staging=self.folder / "staging"
            ),
            **more,
        }
        for run in ("before", "changed"):
            lines = lines.replace(f'"runs/{run}"', f'"{self.folder}/runs/{run}"')
        exec(lines, names)  # noqa: S102
        return names

    def train(self, names: dict[str, Any], steps: int) -> None:
        batches = iter(names["loader"]) if "loader" in names else None
        for _ in range(steps):
            (inputs,) = (torch.randn(8, 4),) if batches is None else next(batches)
            names["optimizer"].zero_grad()
            names["model"](inputs).square().mean().backward()
            names["optimizer"].step()
            if names["scheduler"].optimizer is names["optimizer"]:
                names["scheduler"].step()
            names["checkpointer"].commit()

    def changed(self, begun: str, lines: str) -> tuple[dict[str, Any], dict[str, Any], list[Any]]:
        """Begin a run, change it, and start the changed script once more after a kill.

        Returns:
            The names of both starts, and the rates and the count of steps as each goes on.
        """
        names = self.start(begun)
        self.train(names, 3)
        names["checkpointer"].close()
        first = self.start(lines)
        found = [(first["step"], first["optimizer"].param_groups[0]["lr"])]
        self.train(first, 1)
        testing.kill(first["checkpointer"])
        second = self.start(lines)
        found.append((second["step"], second["optimizer"].param_groups[0]["lr"]))
        self.train(second, 1)
        second["checkpointer"].close()
        return first, second, found


def test_each_change_has_its_lines() -> None:
    assert len(CHANGES) == 5
    assert "restore_from" in CHANGES["The optimizer, or the layers"]


def test_a_rate_is_changed_once(tmp_path: Path) -> None:
    begun = "checkpointer.attach(model, optimizer, scheduler=scheduler)"
    _, _, found = Change(tmp_path).changed(begun, CHANGES["The rate"])
    curve = [0.005 * (1 + math.cos(math.pi * step / 20)) for step in range(5)]
    assert found == [(3, pytest.approx(0.5 * curve[3])), (4, pytest.approx(0.5 * curve[4]))]


@pytest.mark.filterwarnings("ignore:Detected call of")  # the recipe says so
def test_a_schedule_goes_on_along_the_new_curve(tmp_path: Path) -> None:
    begun = "checkpointer.attach(model, optimizer, scheduler=scheduler)"
    _, _, found = Change(tmp_path).changed(begun, CHANGES["The schedule"])
    curve = [0.005 * (1 + math.cos(math.pi * step / 40)) for step in range(5)]
    assert found == [(3, pytest.approx(curve[3])), (4, pytest.approx(curve[4]))]


@pytest.mark.filterwarnings("ignore:Detected call of")
def test_so_does_one_whose_settings_lie_in_the_groups(tmp_path: Path) -> None:
    begun = (
        "scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=20)\n"
        "checkpointer.attach(model, optimizer, scheduler=scheduler)"
    )
    made = "OneCycleLR(optimizer, 2e-2, total_steps=40)"
    lines = CHANGES["The schedule"].replace("CosineAnnealingLR(optimizer, T_max=40)", made)
    assert made in lines
    names = Change(tmp_path / "whole").start("")
    whole = torch.optim.lr_scheduler.OneCycleLR(names["optimizer"], 2e-2, total_steps=40)
    curve = []
    for _ in range(5):
        curve.append(whole.get_last_lr()[0])
        whole.step()
    _, _, found = Change(tmp_path).changed(begun, lines)
    assert found == [(3, pytest.approx(curve[3])), (4, pytest.approx(curve[4]))]


def test_other_data_begin_an_epoch(tmp_path: Path) -> None:
    begun = (
        "loader = DataLoader(dataset, batch_size=8, shuffle=True)\n"
        "checkpointer.attach(model, optimizer, loader=loader)"
    )
    first, second, found = Change(tmp_path).changed(begun, CHANGES["The data"])
    assert [step for step, _ in found] == [3, 4]
    assert len(first["loader"]) == 7
    assert second["checkpointer"].stats()["steps"] == 1


def test_another_batch_size_goes_on_within_the_epoch(tmp_path: Path) -> None:
    begun = (
        "loader = checkpointer.dataloader(dataset, batch_size=8)\n"
        "checkpointer.attach(model, optimizer)"
    )
    name = "The batch size, or the number of ranks"
    _, second, found = Change(tmp_path).changed(begun, CHANGES[name])
    assert [step for step, _ in found] == [3, 4]
    # 24 of 40 samples are one whole batch of 16; two more batches follow.
    assert second["loader"].consumed == 3


def test_another_optimizer_takes_the_weights_once(tmp_path: Path) -> None:
    change = Change(tmp_path)
    begun = "checkpointer.attach(model, optimizer, scheduler=scheduler)"
    _, second, found = change.changed(begun, CHANGES["The optimizer, or the layers"])
    assert [step for step, _ in found] == [0, 1]
    assert lowdiff.recover(tmp_path / "runs/before", staging=tmp_path / "staging").step == 3
    assert type(second["optimizer"]) is torch.optim.SGD
