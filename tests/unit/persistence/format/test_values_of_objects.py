"""What schedulers, optimizers and random generators keep comes back so that they go on the same."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim import lr_scheduler

from lowdiff.persistence.format.values import decode, encode, same


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1, momentum=0.9)


def chained(o: torch.optim.Optimizer) -> lr_scheduler.SequentialLR:
    warmup = lr_scheduler.LinearLR(o, total_iters=3)
    rest = [lr_scheduler.MultiStepLR(o, [2, 4, 4]), lr_scheduler.CosineAnnealingLR(o, 5)]
    return lr_scheduler.SequentialLR(o, [warmup, *rest], milestones=[3, 8])


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [3, 5, 5, 9]),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, max_lr=1.0, total_steps=40),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1),
    "SequentialLR": chained,
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.1, 1.0, step_size_up=3),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_restored_from_bytes_goes_on_as_if_never_stopped(name: str) -> None:
    def advance(o: torch.optim.Optimizer, scheduler: Any, num_steps: int) -> list[float]:
        rates = []
        for step in range(num_steps):
            o.step()
            scheduler.step(*([1.0 + step] if name == "ReduceLROnPlateau" else []))
            rates.append(o.param_groups[0]["lr"])
        return rates

    live = optimizer()
    live_scheduler = SCHEDULERS[name](live)
    advance(live, live_scheduler, 4)
    state = live_scheduler.state_dict(), live.state_dict()
    stored = encode(state)
    assert same(decode(stored), state)

    resumed = optimizer()
    resumed_scheduler = SCHEDULERS[name](resumed)
    scheduler_state, optimizer_state = decode(stored)
    resumed.load_state_dict(optimizer_state)
    resumed_scheduler.load_state_dict(scheduler_state)
    assert advance(resumed, resumed_scheduler, 20) == advance(live, live_scheduler, 20)


def test_the_state_of_an_optimizer_with_a_tensor_rate_comes_back() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    adam = torch.optim.Adam([weight], lr=torch.tensor(0.1), capturable=False, foreach=False)
    weight.sum().backward()
    adam.step()
    assert same(decode(encode(adam.state_dict())), adam.state_dict())


def test_the_states_of_random_generators_come_back() -> None:
    generator = np.random.default_rng(0)
    random_numbers = random.Random(0)
    states = (random_numbers.getstate(), torch.get_rng_state(), generator.bit_generator.state)
    decoded = decode(encode(states))
    expected = random_numbers.random(), generator.random()
    random_numbers.setstate(decoded[0])
    generator.bit_generator.state = decoded[2]
    assert (random_numbers.random(), generator.random()) == expected
    assert torch.equal(decoded[1], states[1])
