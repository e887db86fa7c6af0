"""Reading and restoring leave tensors as they were: resizable, in memory of their own, not shared, not pinned."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.ao.quantization.fake_quantize import FakeQuantize
from torch.ao.quantization.observer import HistogramObserver, PerChannelMinMaxObserver
from torch.optim.swa_utils import AveragedModel

from lowdiff import testing
from lowdiff.compressors import PowerSGD, TopK
from tests.unit.loops import Loop

STRATEGIES: dict[str, dict[str, Any]] = {
    "topk": {"compressor": TopK(0.3), "snapshot_every": 2},
    "powersgd": {"compressor": PowerSGD(2), "snapshot_every": 2},
    "replica": {"compressor": None, "batch_size": 1, "snapshot_every": 2},
    "survivors": {"compressor": None, "strategy": "survivors", "snapshot_every": 2},
}


class Resizing(nn.Module):
    """Resizes its buffers in place while it trains, has an empty one and one that is a view of another."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.register_buffer("empty", torch.empty(0))
        self.register_buffer("lengths", torch.zeros(2, dtype=torch.int64))
        self.register_buffer("history", torch.empty(0))
        self.register_buffer("halves", torch.ones(4, dtype=torch.bfloat16))
        self.register_buffer("first_half", self.halves[:2])
        self.halves: torch.Tensor
        self.history: torch.Tensor
        self.lengths: torch.Tensor

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.inner(inputs)
        with torch.no_grad():
            size = self.history.numel()
            self.history.resize_(size + 1)[size] = outputs.mean()
            self.lengths[0] = size
        return outputs


class Notes:
    """An object of the user's with tensors in its state, which keeps what it is given."""

    def __init__(self) -> None:
        self.values = {"seen": torch.zeros(4), "none": torch.empty(0)}

    def state_dict(self) -> dict[str, torch.Tensor]:
        return dict(self.values)

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.values = dict(state)


class Marked(Loop):
    """A loop with everything attached that holds tensors."""

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        super().__init__(folder, Resizing(), settings=settings)
        self.trained = self.model.get_submodule("inner")
        self.average, self.notes = AveragedModel(self.trained), Notes()

    def begin(self) -> int:
        return self.attach(average=self.average, notes=self.notes)

    def train(self, until: int) -> None:
        for step in self.checkpointer.steps(until):
            self.optimizer.zero_grad()
            generator = torch.Generator().manual_seed(step)
            self.model(torch.randn(5, 6, generator=generator)).square().mean().backward()
            self.optimizer.step()
            self.average.update_parameters(self.trained)
            self.notes.values["seen"].add_(1)
            self.checkpointer.state["last"] = torch.tensor([float(step)])

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in self.model.named_parameters():
            yield name, parameter
            if parameter.grad is not None:
                yield f"{name}.grad", parameter.grad
            for key, value in self.optimizer.state.get(parameter, {}).items():
                yield f"{name}.{key}", value
        yield from self.model.named_buffers()
        yield from ((f"average.{n}", t) for n, t in self.average.state_dict().items())
        yield from self.notes.values.items()
        yield from self.checkpointer.state.items()

    def marked(self) -> dict[str, list[str]]:
        """What is not as PyTorch makes it, by mark."""
        found: dict[str, list[str]] = {}
        owners: dict[int, str] = {}
        for name, tensor in self.tensors():
            storage = tensor.untyped_storage()
            marks = {
                "cannot be resized": not storage.resizable(),
                "is shared": tensor.is_shared(),
                "is pinned": tensor.is_pinned(),
                "is no leaf": not tensor.is_leaf,
            }
            if storage.nbytes() and owners.setdefault(storage.data_ptr(), name) != name:
                marks[f"lies in the memory of {owners[storage.data_ptr()]}"] = True
            for mark in (mark for mark, is_there in marks.items() if is_there):
                found.setdefault(mark, []).append(name)
        return found


@pytest.mark.cases(2)
@pytest.mark.parametrize("kind", STRATEGIES)
def test_nothing_that_is_read_or_restored_is_marked(tmp_path: Path, kind: str) -> None:
    loop = Marked(tmp_path, STRATEGIES[kind])
    as_built = loop.marked()
    assert as_built == {"lies in the memory of halves": ["first_half"]}
    loop.begin()
    assert loop.marked() == as_built, "by attach"
    loop.train(5)
    assert loop.marked() == as_built, "by steps and snapshots"
    if kind == "survivors":  # which keeps nothing of a step for a lone process
        loop.checkpointer.close()
    else:
        testing.kill(loop.checkpointer)
    again = Marked(tmp_path, STRATEGIES[kind])
    assert again.begin() == 5
    assert any(name.endswith(".grad") for name, _ in again.tensors())
    assert again.marked() == as_built, "by restoring"
    again.train(8)
    assert again.marked() == as_built, "by the steps after it"
    again.checkpointer.close()
    assert again.marked() == as_built, "by close()"


class QuantizationAware(nn.Module):
    """A linear layer as quantization-aware training has it: observers resize their buffers in place."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.head = nn.Linear(6, 8), nn.Linear(8, 2)
        self.of_weight = FakeQuantize(
            PerChannelMinMaxObserver,
            quant_min=-128,
            quant_max=127,
            dtype=torch.qint8,
            qscheme=torch.per_channel_symmetric,
            ch_axis=0,
        )
        self.of_activation = FakeQuantize(HistogramObserver, quant_min=0, quant_max=255)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        weight = self.of_weight(self.linear.weight)
        hidden = nn.functional.linear(inputs, weight, self.linear.bias)
        outputs: torch.Tensor = self.head(self.of_activation(hidden.relu()))
        return outputs


@pytest.mark.cases(1)
@pytest.mark.parametrize("kind", ["topk", "replica"])
def test_quantization_aware_training_is_killed_and_goes_on_bit_for_bit(
    tmp_path: Path, kind: str
) -> None:
    def train(folder: Path, lives: tuple[int, ...]) -> dict[str, torch.Tensor]:
        for until in lives:
            loop = Loop(folder, QuantizationAware(), settings=STRATEGIES[kind])
            loop.attach()
            for step in loop.checkpointer.steps(until):
                loop.optimizer.zero_grad()
                generator = torch.Generator().manual_seed(step)
                loop.model(torch.randn(5, 6, generator=generator)).square().mean().backward()
                loop.optimizer.step()
            testing.kill(loop.checkpointer)
        return dict(loop.model.state_dict())

    whole, killed = train(tmp_path / "whole", (5,)), train(tmp_path / "killed", (1, 3, 5))
    assert whole["of_weight.activation_post_process.min_val"].shape == (8,)
    assert whole.keys() == killed.keys()
    for name, tensor in whole.items():
        assert tensor.dtype == killed[name].dtype, name
        assert torch.equal(tensor, killed[name]), name
