"""What attach restored is compared with what was recovered, by name and bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lowdiff.errors import RunMismatch
from tests.unit.loops import Loop


class Meddler:
    """A stateful object whose ``load_state_dict`` does more than take its own state back."""

    def __init__(self, meddle: Callable[[], Any]) -> None:
        self.meddle = meddle

    def state_dict(self) -> dict[str, Any]:
        return {"position": 3}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.meddle()


def nudge(tensor: torch.Tensor) -> None:
    """Change the last bit of one element, behind the version counter."""
    elements = tensor.data.view(-1)
    elements[0] = torch.nextafter(elements[0], torch.tensor(9.0))


def of_optimizer(loop: Loop, key: str) -> torch.Tensor:
    found: torch.Tensor = loop.optimizer.state[loop.model.get_parameter("3.bias")][key]
    return found


MEDDLING: dict[str, tuple[Callable[[Loop], Any], str]] = {
    "weight": (
        lambda loop: nudge(loop.model.get_parameter("3.weight")),
        "parameter '3.weight' is not what step 4",
    ),
    "buffer": (
        lambda loop: nudge(loop.model.get_buffer("1.running_mean")),
        "buffer '1.running_mean'",
    ),
    "frozen": (
        lambda loop: nudge(loop.model.get_parameter("1.bias")),
        "frozen parameter '1.bias'",
    ),
    "moment": (
        lambda loop: nudge(of_optimizer(loop, "exp_avg")),
        r"'exp_avg' of '3.bias' of optimizer 0 \(AdamW\)",
    ),
    "step": (lambda loop: of_optimizer(loop, "step").add_(1), "'step' of '3.bias'"),
    "entry": (
        lambda loop: loop.optimizer.state.pop(loop.model.get_parameter("3.bias")),
        "of '3.bias' of optimizer 0",
    ),
    "group": (
        lambda loop: loop.optimizer.param_groups[0].update(lr=0.5),
        "'lr' of group 0 of optimizer 0",
    ),
}


@pytest.mark.cases(2)
@pytest.mark.parametrize("what", MEDDLING)
def test_what_an_attached_object_writes_over_what_was_restored_is_an_error_that_names_it(
    tmp_path: Path, what: str
) -> None:
    meddle, message = MEDDLING[what]

    def loop() -> Loop:
        made = Loop(tmp_path, make=lambda p: torch.optim.AdamW(p, lr=1e-2))
        made.model.get_parameter("1.bias").requires_grad_(False)
        return made

    loop().run(4, meddler=Meddler(lambda: None))
    again = loop()
    with pytest.raises(RunMismatch, match=message):
        again.attach(meddler=Meddler(lambda: meddle(again)))
    # The run is as it was.
    assert loop().run(5, meddler=Meddler(lambda: None)) == 4


class Forgetful:
    """Does not take all of its state back, or all of it."""

    def __init__(self, *, forgets: bool) -> None:
        self.forgets = forgets
        self.seen, self.table = 0, torch.zeros(3000)

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen, "table": self.table}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.seen = state_dict["seen"]
        if not self.forgets:
            self.table = state_dict["table"]


@pytest.mark.parametrize("forgets", [True, False])
def test_an_object_that_does_not_hold_what_it_was_given_is_named_in_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, forgets: bool
) -> None:
    first, counter = Loop(tmp_path), Forgetful(forgets=forgets)
    first.attach(counter=counter)
    for number in first.checkpointer.steps(3):
        first.step(number)
        counter.seen += 1
        counter.table = counter.table + 1
    first.die()
    second, counter = Loop(tmp_path), Forgetful(forgets=forgets)
    assert second.attach(counter=counter) == 3
    said = "counter does not hold what its load_state_dict() was given" in caplog.text
    assert said == forgets
    second.die()


@pytest.mark.parametrize("key", ["_is_initial", "_get_lr_called_within_step"])
def test_a_schedulers_state_of_an_older_pytorch_is_taken_as_it_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    def scheduler(loop: Loop) -> torch.optim.lr_scheduler.LRScheduler:
        parts: list[torch.optim.lr_scheduler.LRScheduler] = [
            torch.optim.lr_scheduler.StepLR(loop.optimizer, size) for size in (2, 3)
        ]
        return torch.optim.lr_scheduler.SequentialLR(loop.optimizer, parts, milestones=[4])

    with monkeypatch.context() as patch:
        kind = torch.optim.lr_scheduler.LRScheduler
        whole = kind.state_dict

        def older(self: Any) -> dict[str, Any]:
            return {k: v for k, v in whole(self).items() if k != key}

        patch.setattr(kind, "state_dict", older)
        loop = Loop(tmp_path)
        loop.run(2, scheduler=scheduler(loop))
    again = Loop(tmp_path)
    again.attach(scheduler=scheduler(again))
    assert "LD309" not in caplog.text
    again.checkpointer.close()


def test_a_scheduler_that_lost_a_part_of_its_state_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def scheduler(loop: Loop) -> torch.optim.lr_scheduler.LRScheduler:
        return torch.optim.lr_scheduler.StepLR(loop.optimizer, 2)

    loop = Loop(tmp_path)
    loop.run(2, scheduler=scheduler(loop))
    again = Loop(tmp_path)
    less = scheduler(again)
    monkeypatch.setattr(less, "state_dict", lambda: {"last_epoch": less.last_epoch})
    again.attach(scheduler=less)
    assert "LD309" in caplog.text
    again.checkpointer.close()


class Decay:
    """What a LambdaLR stores of its function."""

    def __init__(self, **facts: int) -> None:
        vars(self).update(facts)

    def __call__(self, epoch: int) -> float:
        return 0.9**epoch


def test_what_a_schedulers_function_holds_in_addition_is_a_difference(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def scheduler(loop: Loop, **facts: int) -> torch.optim.lr_scheduler.LRScheduler:
        return torch.optim.lr_scheduler.LambdaLR(loop.optimizer, Decay(**facts))

    loop = Loop(tmp_path)
    loop.run(2, scheduler=scheduler(loop, first=1))
    again = Loop(tmp_path)
    again.attach(scheduler=scheduler(again, first=2, cache=3))
    assert "LD309" in caplog.text
    again.checkpointer.close()
