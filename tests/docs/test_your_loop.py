"""The recipes of docs/your_loop.md: killed in a step and started again, each ends with the same bits."""

from __future__ import annotations

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


def test_there_are_ten_questions_each_with_its_lines() -> None:
    assert [int(name.partition(".")[0]) for name in RECIPES] == [1, *range(1, 11)]
    assert TEXT.count("```python") == 11


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
