"""Writes that are easy to overlook: they are exact at their step."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

import lowdiff
from lowdiff.compressors import TopK
from lowdiff.recovery.inspect.verify import verify


class Table(nn.Module):
    """A frozen table, larger than what trains."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(200, 200), requires_grad=False)
        self.line = nn.Linear(200, 200)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.line(values @ self.table)
        return found


def begun(
    folder: Path, model: nn.Module, **stateful: Any
) -> tuple[lowdiff.Checkpointer, torch.optim.Optimizer]:
    """A model in training, with a log."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    checkpointer = lowdiff.Checkpointer(
        folder / "run", staging=folder / "staging", compressor=TopK(0.1), snapshot_every=100
    )
    checkpointer.attach(model, optimizer, **stateful)
    return checkpointer, optimizer


def step(model: nn.Module, optimizer: torch.optim.Optimizer, width: int) -> None:
    optimizer.zero_grad()
    model(torch.randn(4, width)).square().mean().backward()
    optimizer.step()


def test_one_element_of_a_small_frozen_table_is_exact_at_its_step(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Table()
    checkpointer, optimizer = begun(tmp_path, model)
    expected = {}
    for number in checkpointer.steps(10):
        step(model, optimizer, 200)
        if number + 1 == 6:
            model.table.data[101, 77] = 9.0
        expected[number + 1] = model.table.detach().clone()
    checkpointer.close()
    for number in (5, 6, 10):
        state = lowdiff.recover(tmp_path / "run", number, staging=tmp_path / "staging")
        assert torch.equal(state.model_state_dict()["table"], expected[number]), number


def transposed(layer: nn.Linear) -> None:
    layer.weight.data = layer.weight.data.t()  # the same memory, in another order


def orthogonal(layer: nn.Linear) -> None:
    layer.weight.data, _ = torch.linalg.qr(layer.weight.data)  # LAPACK's order: by columns


def a_column_of_two(layer: nn.Linear) -> None:
    layer.weight.data = torch.stack([layer.weight.data, layer.weight.data + 1], dim=-1)[..., 1]


@pytest.mark.cases(2)
@pytest.mark.parametrize("place", ["before forward", "before step", "after step", "after commit"])
@pytest.mark.parametrize("write", [transposed, orthogonal, a_column_of_two])
def test_values_in_another_memory_order_are_exact_and_training_goes_on(
    tmp_path: Path,
    write: Callable[[nn.Linear], None],
    place: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    layer = nn.Linear(12, 12)
    checkpointer, optimizer = begun(tmp_path, layer)
    expected = {}
    for number in range(1, 9):
        writes = {place} if number in (3, 4, 7) else set()
        if "before forward" in writes:
            write(layer)
        optimizer.zero_grad()
        layer(torch.randn(4, 12)).square().mean().backward()
        if "before step" in writes:
            write(layer)
        optimizer.step()
        if "after step" in writes:
            write(layer)
        checkpointer.commit()
        expected[number] = layer.weight.detach().clone()
        if "after commit" in writes:
            write(layer)
    checkpointer.close()
    for number, weight in expected.items():
        state = lowdiff.recover(tmp_path / "run", number, staging=tmp_path / "staging")
        assert torch.equal(state.model_state_dict()["weight"], weight), number
    assert caplog.text.count("another memory order") == 1
    report = verify(tmp_path / "run", tmp_path / "staging")
    assert report.ok, report.failures
    assert report.snapshots == (0, 8)


def test_an_expanded_gradient_is_compressed_like_any_other(tmp_path: Path) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(12, 48)
    checkpointer, optimizer = begun(tmp_path, layer)
    for _ in checkpointer.steps(4):
        optimizer.zero_grad()
        layer(torch.randn(4, 12)).square().mean().backward()
        assert layer.bias.grad is not None
        layer.bias.grad = layer.bias.grad.mean().expand(48)
        optimizer.step()
    expected = layer.bias.detach().clone()
    checkpointer.close()
    state = lowdiff.recover(tmp_path / "run", 4, staging=tmp_path / "staging")
    assert torch.equal(state.model_state_dict()["bias"], expected)


def test_an_average_that_took_its_state_back_is_not_complained_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        torch.manual_seed(0)
        layer = nn.Linear(12, 12)
        average = AveragedModel(layer)
        with caplog.at_level(logging.WARNING):
            checkpointer, optimizer = begun(tmp_path, layer, average=average)
        for _ in range(3):
            step(layer, optimizer, 12)
            average.update_parameters(layer)
            checkpointer.commit()
        checkpointer.close()
    assert "does not hold" not in caplog.text
