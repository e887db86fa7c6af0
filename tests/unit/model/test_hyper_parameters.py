"""Hyper-parameters that change on the way change what an optimizer keeps."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import lowdiff
from lowdiff.compressors import TopK
from lowdiff.persistence.format.values import same
from lowdiff.protocols import Compressor
from tests.unit.loops import Loop, wait_until
from tests.unit.model.test_large_state import differentials


@pytest.mark.parametrize(
    "compressor", [TopK(0.1), pytest.param(None, marks=pytest.mark.slow)], ids=["log", "replica"]
)
def test_momentum_that_begins_later_is_recovered(
    tmp_path: Path, compressor: Compressor | None
) -> None:
    loop = Loop(
        tmp_path,
        make=lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.0),
        settings={"snapshot_every": 1000, "compressor": compressor},
    )
    loop.attach()
    for number in loop.checkpointer.steps(12):
        loop.step(number)
        loop.optimizer.param_groups[0]["momentum"] = 0.9 if number >= 5 else 0.0
    if compressor is None:  # only what is in its file outlives the replica
        while loop.checkpointer.stats()["replica_step"] < 12:
            time.sleep(0.01)
    expected, state = loop.weights(), loop.optimizer.state_dict()["state"]
    assert all(entries["momentum_buffer"] is not None for entries in state.values())
    loop.die()
    recovered = lowdiff.recover(tmp_path / "run", staging=tmp_path / "staging")
    assert same(dict(recovered.model_state_dict()), expected)
    assert same(recovered.optimizer_state_dict()["state"], state)


def without_momentum_in_one_group(parameters: Any) -> torch.optim.Optimizer:
    first, *others = parameters
    groups = [{"params": [first], "momentum": 0}, {"params": others}]
    return torch.optim.SGD(groups, lr=1e-2, momentum=0.9, nesterov=True)


def nesterov(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-2, momentum=0.9, nesterov=True)


def as_constructed(group: dict[str, Any], number: int) -> None:
    pass


def warm_up(group: dict[str, Any], number: int) -> None:
    group["momentum"] = 0.1 * number


def sink_below_zero(group: dict[str, Any], number: int) -> None:
    group["lr"] = 1e-3 * (2 - number)


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("make", "schedule", "compressor"),
    [
        (without_momentum_in_one_group, as_constructed, TopK(0.1)),
        pytest.param(without_momentum_in_one_group, as_constructed, None, marks=pytest.mark.slow),
        (nesterov, warm_up, TopK(0.1)),
        (lambda p: torch.optim.AdamW(p, lr=1e-3), sink_below_zero, TopK(0.1)),
    ],
    ids=["a group without momentum", "and its replica", "momentum from 0", "a rate below 0"],
)
def test_what_a_constructor_refuses_a_group_may_hold(
    tmp_path: Path,
    make: Callable[[Any], torch.optim.Optimizer],
    schedule: Callable[[dict[str, Any], int], None],
    compressor: Compressor | None,
) -> None:
    settings = {"snapshot_every": 1000, "compressor": compressor}
    loop = Loop(tmp_path, make=make, settings=settings)
    loop.attach()
    for number in loop.checkpointer.steps(5):
        schedule(loop.optimizer.param_groups[0], number)
        loop.step(number)
    if compressor is None:
        wait_until(lambda: loop.checkpointer.stats()["replica_step"] == 5)
    expected, state = loop.weights(), loop.optimizer.state_dict()["state"]
    loop.die()
    recovered = lowdiff.recover(tmp_path / "run", staging=tmp_path / "staging")
    assert same(dict(recovered.model_state_dict()), expected)
    assert same(recovered.optimizer_state_dict()["state"], state)
    resumed = Loop(tmp_path, make=make, settings=settings)
    assert resumed.attach() == 5
    assert same(resumed.weights(), expected)
    resumed.checkpointer.close()


def a_list(group: dict[str, Any]) -> Callable[[], None]:
    group["betas"] = [0.5, 0.9]

    def change() -> None:
        group["betas"][0] += 0.1

    return change


def tensors_in_a_tuple(group: dict[str, Any]) -> Callable[[], None]:
    group |= {"lr": torch.tensor(1e-2), "foreach": False}
    group["betas"] = (torch.tensor(0.5), torch.tensor(0.9))
    return lambda: group["betas"][0].add_(0.1)


@pytest.mark.parametrize("kind", [a_list, tensors_in_a_tuple])
def test_values_that_are_written_in_place_after_the_step_are_recorded_as_consumed(
    tmp_path: Path, kind: Callable[[dict[str, Any]], Callable[[], None]]
) -> None:
    loop = Loop(
        tmp_path, make=lambda p: torch.optim.Adam(p, 1e-2), settings={"snapshot_every": 1000}
    )
    (group,) = loop.optimizer.param_groups
    change = kind(group)
    group["own"] = {"table": np.zeros(2)}
    loop.attach()
    expected = {}
    for number in loop.checkpointer.steps(4):
        loop.step(number)
        change()
        group["own"]["table"] += 1
        expected[number + 1] = loop.weights()
    loop.die()
    consumed = [d.optimizers[0].consumed[0] for d in differentials(tmp_path) if d.optimizers]
    assert [own["own"]["table"].tolist() for own in consumed] == [[n, n] for n in range(4)]
    for step, weights in expected.items():
        state = lowdiff.recover(tmp_path / "run", step, staging=tmp_path / "staging")
        assert same(dict(state.model_state_dict()), weights)


def test_what_a_newer_pytorch_added_is_at_its_default(tmp_path: Path) -> None:
    def newer(parameters: Any) -> torch.optim.Optimizer:
        optimizer = torch.optim.AdamW(parameters, lr=1e-2)
        optimizer.defaults["added"] = True
        for group in optimizer.param_groups:
            group["added"] = True
        return optimizer

    Loop(tmp_path).run(2)
    loop = Loop(tmp_path, make=newer)
    assert loop.attach() == 2
    assert loop.optimizer.param_groups[0]["added"] is True
    loop.checkpointer.close()
