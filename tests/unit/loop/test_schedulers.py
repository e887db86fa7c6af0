"""A scheduler that is not attached is named at ``attach``, and nothing else is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, SequentialLR, StepLR

from tests.unit.loops import Loop, small_model


class Holder:
    """An object that holds a scheduler."""

    __slots__ = ()
    scheduler: LRScheduler

    def state_dict(self) -> dict[str, Any]:
        return {"scheduler": self.scheduler.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.scheduler.load_state_dict(state["scheduler"])


class Wrapped(Holder):
    """As Accelerate wraps one."""

    def __init__(self, scheduler: LRScheduler) -> None:
        self.scheduler = scheduler


class Slotted(Holder):
    """As a dataclass with slots holds one."""

    __slots__ = ("scheduler",)

    def __init__(self, scheduler: LRScheduler) -> None:
        self.scheduler = scheduler


class Trainer(Wrapped):
    """As a script has one: its schedulers lie in a dict of lists."""

    def __init__(self, scheduler: LRScheduler) -> None:
        super().__init__(scheduler)
        self.schedulers = {"all": [self.__dict__.pop("scheduler")]}

    def state_dict(self) -> dict[str, Any]:
        return {"rates": self.schedulers["all"][0].state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.schedulers["all"][0].load_state_dict(state["rates"])


class WarmUp(LRScheduler):
    """A scheduler by name that has no optimizer of its own."""

    def __init__(self, inner: LRScheduler) -> None:
        self.inner = inner

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.inner.load_state_dict(state_dict)


def sequential(optimizer: torch.optim.Optimizer) -> LRScheduler:
    """A scheduler with others inside."""
    parts: list[LRScheduler] = [LambdaLR(optimizer, lambda _: 0.1), StepLR(optimizer, 3)]
    return SequentialLR(optimizer, parts, milestones=[2])


@pytest.mark.cases(5)
@pytest.mark.parametrize("make", [lambda optimizer: StepLR(optimizer, 3), sequential])
@pytest.mark.parametrize("wrap", [lambda scheduler: scheduler, Wrapped, Trainer, Slotted, WarmUp])
def test_an_attached_scheduler_is_held_whatever_its_name_and_wrapper(
    tmp_path: Path,
    make: Callable[[Any], LRScheduler],
    wrap: Callable[[LRScheduler], Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    loop = Loop(tmp_path)
    scheduler = make(loop.optimizer)
    loop.attach(anything=wrap(scheduler))
    loop.checkpointer.close()
    assert "LD317" not in caplog.text


@pytest.mark.slow
def test_a_scheduler_that_is_not_attached_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loop = Loop(tmp_path)
    scheduler = StepLR(loop.optimizer, 3)
    other = Loop(tmp_path / "other", small_model())
    loop.attach(scheduler=StepLR(other.optimizer, 3))
    loop.checkpointer.close()
    assert caplog.text.count("LD317") == 1
    assert "StepLR of the attached AdamW is not attached" in caplog.text
    assert scheduler.last_epoch == 0


@pytest.mark.slow
def test_a_scheduler_that_nobody_holds_any_more_is_not_missed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loop = Loop(tmp_path)
    StepLR(loop.optimizer, 3)
    loop.attach()
    loop.checkpointer.close()
    assert "LD317" not in caplog.text
