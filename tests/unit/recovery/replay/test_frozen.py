"""Optimizers whose groups hold frozen parameters too, as ``AdamW(model.parameters())`` makes them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lowdiff.persistence.format.values import same
from tests.unit.recovery.training import train

Build = Callable[[nn.Module], torch.optim.Optimizer]


def half_frozen(model: nn.Module) -> torch.optim.Optimizer:
    """The frozen ones come first and are of another dtype than those that are trained."""
    frozen = [nn.Parameter(torch.ones(9000).bfloat16(), requires_grad=False) for _ in range(2)]
    model.frozen = nn.ParameterList(frozen)
    model.get_parameter("last.weight").requires_grad_(False)
    trained = [p for p in model.parameters() if all(p is not other for other in frozen)]
    return torch.optim.AdamW([*frozen, *trained], lr=1e-2)


def last_frozen(make: Callable[[Any], torch.optim.Optimizer]) -> Build:
    def build(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = make(model.parameters())
        frozen = model.get_parameter("last.weight").requires_grad_(False)
        if not optimizer.state[frozen]:
            optimizer.state[frozen] = {"exp_avg": torch.full_like(frozen, 0.5)}
        return optimizer

    return build


@pytest.mark.parametrize(
    "make", [torch.optim.Adagrad, pytest.param(torch.optim.AdamW, marks=pytest.mark.slow)]
)
def test_a_resumed_optimizer_keeps_what_it_was_built_with_of_frozen_parameters(
    make: Callable[[Any], torch.optim.Optimizer], tmp_path: Path
) -> None:
    """Adagrad's constructor makes state of all it is given; Adam's may be of before freezing."""
    build = last_frozen(make)
    whole = train(tmp_path / "whole", 4, build=build)
    train(tmp_path, 2, build=build, end="crash")
    resumed = train(tmp_path, 4, build=build)
    assert min(resumed.optimizers) == 2
    assert len(whole.optimizers[4][0]["state"]) == 6
    assert same(resumed.optimizers[4], whole.optimizers[4])
