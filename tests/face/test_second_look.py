"""Writes that are easy to overlook: they are exact at their step, or refused by name at the next."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

import lowdiff
from lowdiff.compressors import TopK
from lowdiff.errors import UsageError


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


def test_a_parameter_that_is_transposed_in_place_is_exact_then_and_refused_after(
    tmp_path: Path,
) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(12, 12)
    checkpointer, optimizer = begun(tmp_path, layer)
    for _ in range(4):
        step(layer, optimizer, 12)
        checkpointer.commit()
    step(layer, optimizer, 12)
    layer.weight.data = layer.weight.data.t()  # the same memory, in another order
    checkpointer.commit()
    expected = layer.weight.detach().clone()
    with pytest.raises(UsageError, match=r"'weight' was .*copy_"):
        step(layer, optimizer, 12)
    checkpointer.close()
    state = lowdiff.recover(tmp_path / "run", 5, staging=tmp_path / "staging")
    assert torch.equal(state.model_state_dict()["weight"], expected)


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
