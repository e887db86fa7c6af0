"""What turns parameters or an optimizer's step into something that replay does not repeat is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lowdiff.errors import UsageError
from tests.unit.loops import Loop


def convolution() -> nn.Module:
    return nn.Sequential(nn.Unflatten(1, (5, 2, 2)), nn.Conv2d(5, 3, 2), nn.Flatten())


def channels_last(model: Any) -> object:
    return model.to(memory_format=torch.channels_last)


def bfloat16(model: nn.Module) -> object:
    return model.to(torch.bfloat16)


def inputs_of(model: nn.Module, number: int) -> torch.Tensor:
    dtype = next(model.parameters()).dtype
    return torch.randn(8, 20, generator=torch.Generator().manual_seed(number)).to(dtype)


def step(loop: Loop, number: int) -> None:
    loop.optimizer.zero_grad()
    loop.model(inputs_of(loop.model, number)).square().mean().backward()
    loop.optimizer.step()


@pytest.mark.cases(3)
@pytest.mark.parametrize("convert", [nn.Module.double, bfloat16])
@pytest.mark.parametrize("before", [0, 2])
def test_a_model_that_is_converted_after_attach_is_refused_before_it_steps(
    tmp_path: Path, convert: Callable[[nn.Module], object], before: int
) -> None:
    loop = Loop(tmp_path, model=convolution(), make=lambda p: torch.optim.SGD(p, lr=0.1))
    loop.attach()
    for number in range(before):
        step(loop, number)
        loop.checkpointer.commit()
    convert(loop.model)
    kept = loop.weights()
    with pytest.raises(UsageError, match=r"'1.weight' was torch.float32 .* convert the model"):
        step(loop, before)
    assert all(torch.equal(value, kept[name]) for name, value in loop.weights().items())
    loop.die()


@pytest.mark.slow
def test_a_model_converted_before_attach_is_resumed(tmp_path: Path) -> None:
    for until, resumed in ((2, 0), (4, 2)):
        model = convolution()
        channels_last(model)
        assert Loop(tmp_path, model=model).run(until) == resumed


@pytest.fixture
def compiler() -> Iterator[Any]:
    """torch.compile."""
    yield torch.compile
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", pytest.param("aot_eager", marks=pytest.mark.slow)])
@pytest.mark.parametrize("whole", [False, True], ids=["the step", "a function around it"])
def test_a_compiled_step_is_refused_and_one_beside_a_compiled_model_is_not(
    tmp_path: Path, compiler: Callable[..., Any], backend: str, whole: bool
) -> None:
    loop = Loop(tmp_path, model=nn.Linear(20, 3))
    loop.attach()
    compiled_model = compiler(loop.model, backend=backend)

    def update() -> None:
        loop.optimizer.step()

    compiled = compiler(update if whole else loop.optimizer.step, backend=backend)
    kept = loop.weights()
    compiled_model(inputs_of(loop.model, 0)).square().mean().backward()
    for _ in range(2):  # traced, and remembered
        with pytest.raises(UsageError, match=r"optimizer.step\(\) runs inside torch.compile"):
            compiled()
    assert all(torch.equal(value, kept[name]) for name, value in loop.weights().items())
    left_out = torch.compiler.disable(update)
    compiler(lambda: left_out(), backend=backend)()
    loop.checkpointer.close()
    assert Loop(tmp_path, model=nn.Linear(20, 3)).run(2) == 1
