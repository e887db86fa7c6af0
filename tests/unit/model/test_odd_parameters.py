"""Parameters of unusual sizes and memory layouts are recovered bit for bit, or refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lowdiff
from lowdiff import testing
from lowdiff.compressors import TopK
from lowdiff.errors import UnsupportedModel, UsageError
from lowdiff.persistence.format.values import same


def transposed() -> torch.Tensor:
    """Dense, but not in row order."""
    return torch.randn(40, 30).t()


def inside() -> torch.Tensor:
    """A dense range in the middle of a larger memory."""
    return torch.randn(3000)[500:2500].view(40, 50)


def with_holes() -> torch.Tensor:
    """Every row is followed by memory that is not its own."""
    return torch.randn(40, 60)[:, :30]


class Sum(nn.Module):
    """As many parameters as it is given."""

    def __init__(self, *values: torch.Tensor) -> None:
        super().__init__()
        self.values = nn.ParameterList([nn.Parameter(value) for value in values])

    def forward(self) -> torch.Tensor:
        return torch.stack([value.square().sum() for value in self.values]).sum()


def train(
    folder: Path,
    model: nn.Module,
    until: int,
    *,
    dies: bool,
    kind: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
) -> tuple[int, dict[str, Any]]:
    """One life; returns where it resumed, and the state of its optimizer."""
    optimizer = kind(model.parameters(), lr=0.1)
    checkpointer = lowdiff.Checkpointer(
        folder / "run",
        compressor=TopK(0.1),
        staging=folder / "staging",
        snapshot_every=4,
    )
    resumed = checkpointer.attach(model, optimizer)
    for _ in checkpointer.steps(until):
        optimizer.zero_grad()
        model().backward()
        optimizer.step()
    if dies:
        testing.kill(checkpointer)
    else:
        checkpointer.close()
    return resumed, optimizer.state_dict()


MODELS: dict[str, Callable[[], list[torch.Tensor]]] = {
    "without_elements": lambda: [torch.randn(3), torch.randn(0), torch.randn(5, 0), transposed()],
    "nothing_but_no_elements": lambda: [torch.randn(0, 7)],
    "a_single_element": lambda: [torch.randn(1)],
    "dense_views": lambda: [transposed(), inside()],
    "hundreds_of_tiny_ones": lambda: [torch.randn(1 + i % 5) for i in range(400)],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_it_resumes_and_is_recovered_bit_for_bit(tmp_path: Path, name: str) -> None:
    models = []
    for _ in range(3):
        torch.manual_seed(1)
        models.append(Sum(*MODELS[name]()))
    whole, first, second = models
    _, optimizer = train(tmp_path / "whole", whole, 7, dies=False)
    assert train(tmp_path / "killed", first, 5, dies=True)[0] == 0
    resumed, resumed_optimizer = train(tmp_path / "killed", second, 7, dies=False)
    assert resumed == 5
    assert same(dict(second.state_dict()), dict(whole.state_dict()))
    recovered = lowdiff.recover(tmp_path / "killed/run")
    assert same(dict(recovered.model_state_dict()), dict(whole.state_dict()))
    for found in (resumed_optimizer, recovered.optimizer_state_dict()):
        assert same(in_order(found["state"]), in_order(optimizer["state"]))


def test_state_that_lies_in_another_order_than_its_parameter_keeps_its_places(
    tmp_path: Path,
) -> None:
    def model() -> Sum:
        torch.manual_seed(1)
        kernels = [(6, 4, 3, 1), (6, 4, 1, 3)]
        return Sum(*(torch.randn(k).to(memory_format=torch.channels_last) for k in kernels))

    live = model()
    _, optimizer = train(tmp_path, live, 3, dies=True, kind=torch.optim.Adafactor)
    # One of the factors has the shape of its weight, but torch makes it in row order.
    for index, key in enumerate(("row_var", "col_var")):
        factor = optimizer["state"][index][key]
        assert factor.shape == live.values[index].shape
        assert factor.is_contiguous()
        assert not live.values[index].is_contiguous()
    recovered = lowdiff.recover(tmp_path / "run", staging=tmp_path / "staging")
    assert recovered.base_step == 0
    assert same(dict(recovered.model_state_dict()), dict(live.state_dict()))
    found = recovered.optimizer_state_dict()
    assert same(in_order(found["state"]), in_order(optimizer["state"]))
    resumed = model()
    assert train(tmp_path, resumed, 3, dies=False, kind=torch.optim.Adafactor)[0] == 3
    assert same(dict(resumed.state_dict()), dict(live.state_dict()))


def in_order(state: dict[int, dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """An optimizer's state; files keep its entries in another order than live objects."""
    return {number: dict(sorted(entries.items())) for number, entries in state.items()}


def test_a_parameter_with_holes_in_its_memory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"'values.0' does not cover its memory densely"):
        train(tmp_path, Sum(with_holes()), 1, dies=False)


def test_two_parameters_in_one_place_are_refused_by_name(tmp_path: Path) -> None:
    model = Sum(torch.randn(6, 5), torch.randn(6, 5), torch.randn(3))
    model.values[1].data = model.values[0].data[1:]
    with pytest.raises(UnsupportedModel, match=r"'values.0' and 'values.1' share memory"):
        train(tmp_path, model, 1, dies=False)


def test_a_parameter_under_two_names_is_one(tmp_path: Path) -> None:
    model = Sum(torch.randn(6, 5), torch.randn(6, 5))
    model.values[1] = model.values[0]
    assert train(tmp_path, model, 2, dies=True)[0] == 0
    assert train(tmp_path, model, 3, dies=False)[0] == 2


def half_with_full_gradients() -> Sum:
    model = Sum(torch.randn(6, 5, dtype=torch.bfloat16))
    model.values[0].grad_dtype = torch.float32
    return model


needs_grad_dtype = pytest.mark.skipif(
    not hasattr(torch.Tensor, "grad_dtype"), reason="this PyTorch has no grad_dtype"
)


@needs_grad_dtype
def test_gradients_of_another_dtype_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"'values.0' is torch.bfloat16 and keeps gradients"):
        train(tmp_path, half_with_full_gradients(), 1, dies=False)


@needs_grad_dtype
def test_gradients_that_get_another_dtype_later_are_refused(tmp_path: Path) -> None:
    model = Sum(torch.randn(6, 5, dtype=torch.bfloat16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    checkpointer = lowdiff.Checkpointer(tmp_path / "run", staging=tmp_path / "staging")
    checkpointer.attach(model, optimizer)
    model.values[0].grad_dtype = torch.float32
    model().backward()
    with pytest.raises(UsageError, match=r"gradient of 'values.0' is torch.float32"):
        optimizer.step()
    checkpointer.close()
