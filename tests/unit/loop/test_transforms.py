"""Nothing of lowdiff runs inside transforms, traces and fake modes: it is done at the next call outside."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call, grad, jvp, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

import lowdiff
from lowdiff.errors import UsageError
from tests.unit.loops import Loop

INPUTS = torch.ones(5, 4)


class PerSample(Loop):
    """Gradients per sample by `torch.func`; steps end by ``commit()``."""

    def __init__(self, folder: Path, kind: str = "topk", dropout: float = 0.0) -> None:
        torch.manual_seed(0)
        dropped = nn.Dropout(dropout) if dropout else nn.Identity()
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), dropped, nn.Linear(8, 1))
        super().__init__(folder, model, settings=KINDS[kind])
        self.drawn: list[float] = []

    def gradients(self, inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        """The gradient of each sample."""

        def loss(parameters: dict[str, torch.Tensor], sample: torch.Tensor) -> torch.Tensor:
            outputs: torch.Tensor = functional_call(self.model, parameters, (sample[None],))
            return outputs.square().mean()

        parameters = {name: p.detach() for name, p in self.model.named_parameters()}
        per_sample = vmap(grad(loss), in_dims=(None, 0), randomness="different")
        found: dict[str, torch.Tensor] = per_sample(parameters, inputs)
        return found

    def body(self, number: int) -> None:
        inputs = torch.randn(5, 4, generator=torch.Generator().manual_seed(number))
        for name, gradient in self.gradients(inputs).items():
            norms = gradient.flatten(1).norm(dim=1).clamp(min=1)
            self.model.get_parameter(name).grad = (
                (gradient.flatten(1) / norms[:, None]).mean(0).view(gradient.shape[1:])
            )
        self.optimizer.step()
        self.drawn.append(float(torch.rand(())))  # as noise behind the step is

    def train(self, until: int, *, by_steps: bool = False) -> None:
        resumed = self.attach()
        if by_steps:
            for number in self.checkpointer.steps(until):
                self.body(number)
        else:
            for number in range(resumed, until):
                self.body(number)
                self.checkpointer.commit()
        self.die()


KINDS: dict[str, dict[str, Any]] = {"topk": {}, "replica": {"compressor": None, "batch_size": 1}}


@pytest.mark.cases(1)
@pytest.mark.parametrize("kind", KINDS)
def test_per_sample_gradients_are_killed_and_go_on_bit_for_bit(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The generators are restored by the optimizer's hook, the first one outside: nothing was drawn before."""
    whole = PerSample(tmp_path / "whole", kind)
    whole.train(6)
    drawn = []
    for until in (2, 3, 6):
        killed = PerSample(tmp_path / "killed", kind)
        killed.train(until)
        drawn += killed.drawn
    assert drawn == whole.drawn
    for name, value in whole.weights().items():
        assert torch.equal(killed.weights()[name], value), name
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_what_a_transform_draws_goes_on_bit_for_bit_with_steps_and_is_said_with_commit(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole = PerSample(tmp_path / "whole", dropout=0.5)
    whole.train(4)
    PerSample(tmp_path / "killed", dropout=0.5).train(2)
    killed = PerSample(tmp_path / "killed", dropout=0.5)
    killed.train(4, by_steps=True)
    for name, value in whole.weights().items():
        assert torch.equal(killed.weights()[name], value), name
    assert "LD213" not in caplog.text
    other = PerSample(tmp_path / "killed", dropout=0.5)
    other.train(5)
    assert "LD213" in caplog.text


def in_fake_mode(model: nn.Module) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        model(torch.ones(5, 4))


INSIDE: dict[str, Callable[[nn.Module], object]] = {
    "vmap": lambda model: vmap(model)(INPUTS),
    "grad": lambda model: grad(lambda inputs: model(inputs).sum())(INPUTS),
    "jvp": lambda model: jvp(model, (INPUTS,), (INPUTS,)),
    "jit": lambda model: torch.jit.trace(model, INPUTS, check_trace=False),
    "fx": lambda model: torch.fx.symbolic_trace(nn.Sequential(model)),
    "make_fx": lambda model: make_fx(model)(INPUTS),
    "make_fx before dispatch": lambda model: make_fx(model, pre_dispatch=True)(INPUTS),
    "fake mode": in_fake_mode,
    "export": lambda model: torch.export.export(model, (INPUTS,), strict=False),
}


def resumed(folder: Path) -> tuple[Loop, torch.Tensor]:
    """A run that goes on at step 1, and the generator's state that its first body begins with."""
    state = torch.empty(0)
    for _ in range(2):
        torch.manual_seed(0)
        loop = Loop(folder, nn.Sequential(nn.Linear(4, 2)))
        if loop.attach():
            break
        loop.model(INPUTS).sum().backward()
        loop.optimizer.step()
        torch.manual_seed(7)
        state = torch.get_rng_state()
        loop.checkpointer.commit()
        loop.die()
    return loop, state


def update(loop: Loop) -> None:
    loop.model(INPUTS).sum().backward()
    loop.optimizer.step()
    loop.checkpointer.commit()


@pytest.mark.cases(3)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("way", INSIDE)
def test_a_hook_waits_for_the_next_forward_pass_outside(tmp_path: Path, way: str) -> None:
    loop, expected = resumed(tmp_path)
    before = torch.get_rng_state()
    assert not torch.equal(before, expected)
    INSIDE[way](loop.model)
    assert torch.equal(torch.get_rng_state(), before)
    loop.model(INPUTS)
    assert torch.equal(torch.get_rng_state(), expected)
    update(loop)
    loop.checkpointer.close()
    assert lowdiff.recover(tmp_path / "run").step == 2


def test_a_mode_that_only_watches_does_not_count(tmp_path: Path) -> None:
    loop, expected = resumed(tmp_path)
    with FlopCounterMode(display=False):
        loop.model(INPUTS)
    assert torch.equal(torch.get_rng_state(), expected)
    loop.checkpointer.close()


def test_a_step_inside_is_refused_by_name_and_training_goes_on(tmp_path: Path) -> None:
    loop, _ = resumed(tmp_path)
    loop.model(INPUTS).sum().backward()
    with (
        pytest.raises(UsageError, match=r"optimizer\.step\(\) runs inside a FakeTensorMode, where"),
        FakeTensorMode(allow_non_fake_inputs=True),
    ):
        loop.optimizer.step()

    def stepping(inputs: torch.Tensor) -> torch.Tensor:
        loop.optimizer.step()
        return inputs.sum()

    with pytest.raises(UsageError, match=r"inside a transform of torch\.func"):
        grad(stepping)(INPUTS)
    loop.optimizer.step()
    loop.checkpointer.commit()
    loop.checkpointer.close()
    assert lowdiff.recover(tmp_path / "run").step == 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_step_that_a_cuda_graph_captures_is_refused_by_name(tmp_path: Path) -> None:
    loop = Loop(tmp_path, nn.Linear(4, 2).cuda(), lambda p: torch.optim.AdamW(p, capturable=True))
    loop.attach()
    loop.model(INPUTS.cuda()).sum().backward()
    loop.optimizer.step()
    loop.checkpointer.commit()
    with (
        pytest.raises(UsageError, match="inside the capture of a CUDA graph"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        loop.optimizer.step()
    loop.checkpointer.close()
