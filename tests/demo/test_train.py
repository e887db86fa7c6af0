from __future__ import annotations

import pytest
import torch
from torch import nn

from lowdiff.demo.train import WARM_UP_STEPS, learning_rate_factor, make_optimizer


def test_the_learning_rate_rises_and_then_falls_to_a_tenth() -> None:
    factors = [learning_rate_factor(step, 60) for step in range(61)]
    assert factors[:WARM_UP_STEPS] == sorted(factors[:WARM_UP_STEPS])
    assert factors[WARM_UP_STEPS:] == sorted(factors[WARM_UP_STEPS:], reverse=True)
    assert 0.9 < max(factors) <= 1
    assert factors[-1] == pytest.approx(0.1)


def test_matrices_decay_and_vectors_do_not() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3))
    decay = {
        parameter: group["weight_decay"]
        for group in make_optimizer(model).param_groups
        for parameter in group["params"]
    }
    assert all((decay[p] > 0) == (p.dim() == 2) for p in model.parameters())
    assert isinstance(make_optimizer(model), torch.optim.AdamW)
