"""What a script holds on to is what training goes on with after a resume, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR, StepLR
from torch.optim.swa_utils import AveragedModel

from lowdiff.persistence.format.values import same
from tests.unit.loops import Loop

UNTIL, AT = 6, 3


def resumed(tmp_path: Path, make: Any) -> tuple[Any, Any]:
    """What an uninterrupted run, and one that was killed and resumed, end with."""
    ends = []
    for name, stops in (("whole", (UNTIL,)), ("killed", (AT, UNTIL))):
        for until in stops:
            end = make(Loop(tmp_path / name), until, dies=until == AT)
        ends.append(end)
    return ends[0], ends[1]


def test_a_rate_that_is_a_tensor_stays_the_one_that_the_script_fills(tmp_path: Path) -> None:
    def life(loop: Loop, until: int, *, dies: bool) -> Any:
        rate = torch.tensor(0.1)
        loop.optimizer = torch.optim.AdamW(loop.model.parameters(), lr=rate)
        loop.attach()
        for step in loop.checkpointer.steps(until):
            rate.fill_(0.1 / (step + 1))
            loop.step(step)
        loop.die() if dies else loop.checkpointer.close()
        return loop.weights()

    assert same(*resumed(tmp_path, life))


def test_gradients_that_are_views_of_a_buffer_stay_views(tmp_path: Path) -> None:
    def life(loop: Loop, until: int, *, dies: bool) -> Any:
        parameters = list(loop.model.parameters())
        flat = torch.zeros(sum(p.numel() for p in parameters))
        views = flat.split([p.numel() for p in parameters])
        for parameter, view in zip(parameters, views, strict=True):
            parameter.grad = view.view_as(parameter)
        loop.attach()
        for step in loop.checkpointer.steps(until):
            inputs = torch.randn(8, 20, generator=torch.Generator().manual_seed(step))
            flat.zero_()
            loop.model(inputs).square().mean().backward()
            loop.optimizer.step()
        loop.die() if dies else loop.checkpointer.close()
        return loop.weights()

    assert same(*resumed(tmp_path, life))


def test_what_another_scheduler_put_into_the_groups_stays(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    scheduler: Any = StepLR(loop.optimizer, 2)
    loop.run(3, scheduler=scheduler)
    other = Loop(tmp_path)
    other.optimizer.param_groups[0]["mine"] = 7
    scheduler = OneCycleLR(other.optimizer, max_lr=0.2, total_steps=50)
    assert other.attach(scheduler=scheduler) == 3
    for step in other.checkpointer.steps(5):
        other.step(step)
        scheduler.step()
    other.checkpointer.close()
    assert other.optimizer.param_groups[0]["mine"] == 7


class Moving(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(20, 3)
        self.register_buffer("mean", torch.zeros(1))
        self.mean: torch.Tensor

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        found = self.linear(inputs)
        self.mean = 0.9 * self.mean + 0.1 * found.mean().detach()
        moved: torch.Tensor = found + self.mean
        return moved


@pytest.mark.filterwarnings("ignore:`torch.jit.script`:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:`torch.jit.script`:FutureWarning")  # since PyTorch 2.14
def test_buffers_that_a_scripted_module_replaces_are_recorded(tmp_path: Path) -> None:
    def life(loop: Loop, until: int, *, dies: bool) -> Any:
        torch.manual_seed(0)
        scripted = Loop(loop.folder, torch.jit.script(Moving()))
        scripted.attach()
        for step in scripted.checkpointer.steps(until):
            scripted.step(step)
        scripted.die() if dies else scripted.checkpointer.close()
        return scripted.weights()

    assert same(*resumed(tmp_path, life))


class OwnUpdate(AveragedModel):
    @torch.no_grad()
    def update_parameters(self, model: nn.Module) -> None:
        for mine, theirs in zip(self.module.parameters(), model.parameters(), strict=True):
            mine.lerp_(theirs, 0.1)
        self.n_averaged += 1


def test_an_average_with_an_update_of_its_own_comes_back(tmp_path: Path) -> None:
    def life(loop: Loop, until: int, *, dies: bool) -> Any:
        average = OwnUpdate(loop.model)
        assert loop.attach(average=average) in (0, AT)
        for step in loop.checkpointer.steps(until):
            loop.step(step)
            average.update_parameters(loop.model)
        loop.die() if dies else loop.checkpointer.close()
        return dict(average.state_dict())

    assert same(*resumed(tmp_path, life))


def test_gradients_that_an_optimizer_gathers_over_two_bodies_are_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loop = Loop(tmp_path)
    parts = list(loop.model.children())
    first, second, third = (
        torch.optim.SGD(part.parameters(), 0.1) for part in (parts[0], parts[3], parts[1])
    )
    loop.checkpointer.attach(loop.model, [first, second, third])
    for step in loop.checkpointer.steps(4):
        loop.model(torch.randn(8, 20)).square().mean().backward()
        for optimizer in (first, third, *([second] if step % 2 else [])):
            optimizer.step()
            optimizer.zero_grad()
    loop.checkpointer.close()
    assert caplog.text.count("ended without a step of optimizer 1") == 1
