from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

from lowdiff.demo.digests import checkpoint_size, state_digests

State = tuple[nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LambdaLR]


def make_state() -> State:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    model(torch.ones(2, 3)).square().sum().backward()
    optimizer.step()
    scheduler.step()
    return model, optimizer, scheduler


def test_equal_states_have_equal_digests() -> None:
    assert state_digests(*make_state()) == state_digests(*make_state())


def test_taking_digests_changes_nothing() -> None:
    state = make_state()
    first = state_digests(*state)
    assert state_digests(*state) == first


def flip_parameter(state: State) -> None:
    next(state[0].parameters()).data.view(torch.int32)[0, 0] ^= 1


def flip_moment(state: State) -> None:
    parameter = next(state[0].parameters())
    state[1].state[parameter]["exp_avg"].view(torch.int32)[0, 0] ^= 1


def change_buffer(state: State) -> None:
    next(state[0].buffers()).add_(1)


def step_scheduler(state: State) -> None:
    state[2].last_epoch += 1


def change_weight_decay(state: State) -> None:
    state[1].param_groups[0]["weight_decay"] = 0.5


def draw(state: State) -> None:
    torch.rand(1)


def draw_numpy(state: State) -> None:
    np.random.rand(1)


CHANGES: dict[Callable[[State], None], str] = {
    flip_parameter: "parameter 0.weight",
    flip_moment: "optimizer exp_avg of 0.weight",
    change_buffer: "buffer 1.running_mean",
    step_scheduler: "scheduler",
    change_weight_decay: "optimizer group 0",
    draw: "torch random state",
    draw_numpy: "NumPy random state",
}


@pytest.mark.parametrize(("change", "name"), CHANGES.items())
def test_a_single_change_is_seen_and_named(change: Callable[[State], None], name: str) -> None:
    state = make_state()
    before = state_digests(*state)
    change(state)
    after = state_digests(*state)
    assert [key for key in before if before[key] != after[key]] == [name]


def test_a_full_checkpoint_holds_parameters_buffers_and_moments() -> None:
    model, optimizer, _ = make_state()
    elements, size = checkpoint_size(model, optimizer)
    assert elements == 3 * 4 + 4 + 4 + 4
    buffers = 4 + 4 + 2  # mean, variance and an int64 counter, in units of four bytes
    steps = 4  # one scalar per parameter
    assert size == 4 * (3 * elements + buffers + steps)
