"""Writes by something else than the optimizer, and gradients changed by hand, cost values and no step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import lowdiff
from lowdiff.compressors import CyclicTopK, PowerSGD, RandomK, TopK
from lowdiff.persistence.format.values import same
from lowdiff.protocols import Compressor
from lowdiff.recovery.inspect.verify import verify
from tests.crash.pool import Pool
from tests.crash.trainings import wrapped
from tests.unit.loops import Loop

STEPS = 8
Write = Callable[[nn.Module], object]


def clamped(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.clamp_(-0.05, 0.05)


def one_row_through_data(model: nn.Module) -> None:
    model.get_parameter("0.weight").data[3] *= 0.5


def another_tensor(model: nn.Module) -> None:
    weight = model.get_parameter("3.weight")
    weight.data = weight.data - weight.data.mean()


def loaded(model: nn.Module) -> None:
    model.load_state_dict({name: value * 0.9 for name, value in model.state_dict().items()})


WRITES = [clamped, one_row_through_data, another_tensor, loaded]


def weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.named_parameters()}


def assert_exact_without_snapshots(
    folder: Path, live: dict[int, dict[str, torch.Tensor]], staging: Path
) -> None:
    for step, expected in live.items():
        found = dict(lowdiff.recover(folder, step, staging=staging).model_state_dict())
        assert same({name: found[name] for name in expected}, expected), step
    report = verify(folder, staging)
    assert report.ok, report.failures
    assert report.snapshots == (0, STEPS)
    assert report.steps_replayed == STEPS


@pytest.mark.cases(1)
@pytest.mark.parametrize("place", ["before", "after"])
@pytest.mark.parametrize("write", WRITES)
def test_every_step_is_exact_and_costs_no_snapshot(
    tmp_path: Path, write: Write, place: str, caplog: pytest.LogCaptureFixture
) -> None:
    loop, live = Loop(tmp_path, settings={"snapshot_every": 1000}), {}
    average = AveragedModel(loop.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    averages: dict[int, Any] = {}
    loop.attach(average=average)
    for number in loop.checkpointer.steps(STEPS):
        if place == "before" and number in (2, 3, 6):
            write(loop.model)
        loop.step(number)
        if place == "after" and number in (2, 3, 6):
            write(loop.model)
        average.update_parameters(loop.model)
        live[number + 1] = weights_of(loop.model)
        averages[number + 1] = {k: v.clone() for k, v in average.state_dict().items()}
    loop.checkpointer.close()
    assert_exact_without_snapshots(tmp_path / "run", live, tmp_path / "staging")
    for step, expected in averages.items():
        found = lowdiff.recover(tmp_path / "run", step).stateful["average"]
        assert same(dict(found), expected), step
    assert "something else than the optimizer wrote to" in caplog.text
    assert "such a step costs a full snapshot" not in caplog.text


@pytest.mark.cases(1)
@pytest.mark.parametrize("write", WRITES)
def test_a_replica_takes_them_in(tmp_path: Path, write: Write) -> None:
    loop = Loop(tmp_path, settings={"compressor": None, "snapshot_every": 1000})
    loop.attach()
    for number in loop.checkpointer.steps(STEPS):
        loop.step(number)
        if number in (2, 3, STEPS - 1):
            write(loop.model)
    expected = loop.weights()
    loop.die()
    again = Loop(tmp_path, settings={"compressor": None, "snapshot_every": 1000})
    assert again.attach() == STEPS
    assert same(again.weights(), expected)
    again.checkpointer.close()


def noisy(rank: int, _: int, folder: str, compressor: Compressor) -> dict[int, Any]:
    """A pool's job: noise is added to the averaged gradients, the same on all ranks."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 60), nn.ReLU(), nn.Linear(60, 30))
    ddp = wrapped(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    checkpointer = lowdiff.Checkpointer(
        f"{folder}/run",
        compressor=compressor,
        staging=f"{folder}/staging",
        snapshot_every=1000,
        retention=None,
    )
    checkpointer.attach(ddp, optimizer)
    live = {}
    for step in checkpointer.steps(STEPS):
        optimizer.zero_grad()
        inputs = torch.randn(6, 40, generator=torch.Generator().manual_seed(100 * step + rank))
        ddp(inputs).square().mean().backward()
        generator = torch.Generator().manual_seed(step)
        for parameter in model.parameters():
            if step in (2, 3, 6) and parameter.grad is not None:
                parameter.grad += 1e-3 * torch.randn(parameter.shape, generator=generator)
        optimizer.step()
        live[step + 1] = weights_of(model)
    checkpointer.close()
    return live


@pytest.mark.cases(2)
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(
    "compressor",
    [
        TopK(0.1, dense_below=64),
        pytest.param(CyclicTopK(0.1, dense_below=64), marks=pytest.mark.slow),
        RandomK(0.1, dense_below=64),
        pytest.param(PowerSGD(2, dense_below=64), marks=pytest.mark.slow),
    ],
    ids=lambda compressor: compressor.name,
)
def test_a_gradient_that_is_changed_behind_its_exchange_is_exact_at_every_step(
    pool: Pool, tmp_path: Path, compressor: Compressor, world_size: int
) -> None:
    first, *others = pool.run(noisy, world_size, str(tmp_path), compressor)
    for other in others:
        assert all(same(other[step], weights) for step, weights in first.items())
    assert_exact_without_snapshots(tmp_path / "run", first, tmp_path / "staging")
