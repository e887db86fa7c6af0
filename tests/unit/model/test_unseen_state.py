"""Optimizer state that is replaced between steps is noticed; what the optimizer does itself is not."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lowdiff
from lowdiff import testing
from lowdiff.errors import UnsupportedOptimizer
from lowdiff.persistence.format.values import same
from tests.unit.loops import Loop

REBASED = "changed outside optimizer.step()"
Change = Callable[[torch.optim.Optimizer, torch.nn.Parameter], object]


class Replacing(torch.optim.Optimizer):
    """Makes new tensors and numbers of its state in every step."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["count"] = state.get("count", 1000) + 1
                state["mean"] = 0.9 * state.get("mean", torch.zeros_like(parameter)) + (
                    parameter.grad
                )
                parameter.sub_(group["lr"] * state["mean"])


@pytest.fixture
def replacing() -> Iterator[type[torch.optim.Optimizer]]:
    with testing.own_registrations():
        lowdiff.register_optimizer(Replacing, "element", scalar_state=["count"])
        yield Replacing


def state_of(loop: Loop) -> Any:
    """A copy of weights and optimizer state."""
    state = loop.optimizer.state_dict()["state"]
    copied = {
        p: {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in entries.items()}
        for p, entries in state.items()
        if entries
    }
    return loop.weights(), copied


def train(loop: Loop, until: int, changes: dict[int, Callable[[], object]]) -> dict[int, Any]:
    """Train on, with something done before some steps; the state after each."""
    live = {}
    for number in loop.checkpointer.steps(until):
        if number in changes:
            changes[number]()
        loop.step(number)
        live[number + 1] = state_of(loop)
    return live


def assert_recovered(folder: Path, live: dict[int, Any]) -> None:
    """Every step, while only a snapshot that nobody asked for could hide what is missing."""
    for step, (weights, state) in live.items():
        found = lowdiff.recover(folder / "run", step)
        assert same(dict(found.model_state_dict()), weights), step
        recovered = found.optimizer_state_dict()["state"]
        assert recovered.keys() == state.keys()
        assert all(same(recovered[p], entries) for p, entries in state.items()), step


def seldom(folder: Path, **options: Any) -> Loop:
    return Loop(folder, settings={"snapshot_every": 1000}, **options)


def clear(optimizer: torch.optim.Optimizer, _: nn.Parameter) -> None:
    optimizer.state.clear()


def forget_one(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> None:
    del optimizer.state[parameter]


def empty_one(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> None:
    optimizer.state[parameter] = {}


def new_moment(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> None:
    optimizer.state[parameter]["exp_avg"] = torch.zeros_like(parameter)


def exchange_moments(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> None:
    state = optimizer.state[parameter]
    state["exp_avg"], state["exp_avg_sq"] = state["exp_avg_sq"].clone(), state["exp_avg"].abs()


@pytest.mark.cases(2)
@pytest.mark.parametrize("change", [clear, forget_one, empty_one, new_moment, exchange_moments])
def test_optimizer_state_replaced_after_a_loss_spike_is_recovered_at_every_step(
    tmp_path: Path, change: Change, caplog: pytest.LogCaptureFixture
) -> None:
    loop = seldom(tmp_path)
    loop.attach()
    weight = loop.model.get_parameter("0.weight")
    live = train(loop, 7, {3: lambda: change(loop.optimizer, weight)})
    loop.checkpointer.close()
    assert_recovered(tmp_path, live)
    assert REBASED in caplog.text


def test_state_given_to_another_parameter_is_recovered(tmp_path: Path) -> None:
    loop = seldom(tmp_path)
    loop.attach()
    mine, other = (loop.model.get_parameter(name) for name in ("0.bias", "1.bias"))

    def hand_over() -> None:
        state = loop.optimizer.state
        state[mine], state[other] = state[other], state[mine]

    live = train(loop, 6, {3: hand_over})
    loop.checkpointer.close()
    assert_recovered(tmp_path, live)


def test_a_loaded_state_is_watched_and_the_one_before_is_freed(tmp_path: Path) -> None:
    loop = seldom(tmp_path)
    loop.attach()
    weight = loop.model.get_parameter("0.weight")
    before: list[weakref.ref[torch.Tensor]] = []

    def load() -> None:
        before.extend(
            weakref.ref(value)
            for entries in loop.optimizer.state.values()
            for value in entries.values()
        )
        taken = loop.optimizer.state_dict()
        taken["state"] = {
            p: {k: v.clone() for k, v in e.items()} for p, e in taken["state"].items()
        }
        loop.optimizer.load_state_dict(taken)

    def shrink() -> None:
        loop.optimizer.state[weight]["exp_avg"].mul_(0.5)

    live = train(loop, 8, {3: load, 5: shrink})
    assert len(before) == 18
    assert [ref() for ref in before if ref() is not None] == []
    loop.checkpointer.close()
    assert_recovered(tmp_path, live)


def test_an_optimizer_that_replaces_its_own_state_costs_no_snapshot(
    tmp_path: Path,
    replacing: type[torch.optim.Optimizer],
    caplog: pytest.LogCaptureFixture,
) -> None:
    loop = seldom(tmp_path, make=replacing)
    loop.attach()
    live = train(loop, 6, {})
    assert REBASED not in caplog.text
    weight = loop.model.get_parameter("0.weight")

    def count_anew() -> None:
        loop.optimizer.state[weight]["count"] = 5

    live |= train(loop, 9, {7: count_anew})
    loop.checkpointer.close()
    assert REBASED in caplog.text
    assert_recovered(tmp_path, live)


def test_a_look_at_state_that_is_not_there_yet_costs_no_snapshot(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loop = seldom(tmp_path)
    loop.attach()
    last = loop.model.get_parameter("3.weight")
    seen = []
    live = train(loop, 4, {0: lambda: seen.append(dict(loop.optimizer.state[last]))})
    loop.checkpointer.close()
    assert seen == [{}]
    assert_recovered(tmp_path, live)
    assert REBASED not in caplog.text


def nesterov(parameters: Any) -> torch.optim.Optimizer:
    """As CUDA has it by default: the kernel adds the momentum to the gradient in place."""
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True, foreach=True)


def cleared_by_itself(parameters: Any) -> torch.optim.Optimizer:
    """Its gradients are zeroed in place by a hook, after lowdiff's own has seen the step's end."""
    optimizer = torch.optim.AdamW(parameters, lr=1e-2)
    optimizer.register_step_post_hook(lambda *_: optimizer.zero_grad(set_to_none=False))
    return optimizer


@pytest.mark.cases(2)
@pytest.mark.parametrize("make", [nesterov, cleared_by_itself])
@pytest.mark.parametrize("plus", [False, True], ids=["topk", "uncompressed"])
def test_gradients_written_by_the_step_itself_are_recovered(
    tmp_path: Path, make: Callable[[Any], torch.optim.Optimizer], plus: bool
) -> None:
    settings: dict[str, Any] = {"snapshot_every": 1000, "batch_size": 1}
    loop = Loop(tmp_path, make=make, settings=settings | ({"compressor": None} if plus else {}))
    loop.attach()
    live = train(loop, 5, {})
    loop.checkpointer.close()
    assert_recovered(tmp_path, {5: live[5]} if plus else live)


def clamped_by_itself(parameters: Any) -> torch.optim.Optimizer:
    """A hook that is registered before lowdiff's own, and that replay does not have."""
    optimizer = torch.optim.AdamW(parameters, lr=1e-2)

    @torch.no_grad()
    def clamp(*_: object) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.clamp_(-0.1, 0.1)

    optimizer.register_step_post_hook(clamp)
    return optimizer


def test_a_post_hook_of_the_users_is_no_work_of_the_optimizers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loop = seldom(tmp_path, make=clamped_by_itself)
    loop.attach()
    live = train(loop, 4, {})
    loop.checkpointer.close()
    assert "something else than the optimizer wrote to" in caplog.text
    assert REBASED not in caplog.text
    assert_recovered(tmp_path, live)


class Counting(torch.optim.Optimizer):
    """Counts its steps beside the parameters' state, in a number or in a dict."""

    def __init__(self, params: Any, *, entry: Callable[[int], Any] = int) -> None:
        super().__init__(params, {"lr": 0.1})
        self.entry, self.count = entry, 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.count += 1
        own: dict[Any, Any] = self.state
        own["count"] = self.entry(self.count)
        for parameter in self.param_groups[0]["params"]:
            parameter.sub_(parameter.grad, alpha=0.1 / self.count)


@pytest.fixture
def counting() -> Iterator[type[torch.optim.Optimizer]]:
    with testing.own_registrations():
        lowdiff.register_optimizer(Counting, "whole")
        yield Counting


@pytest.mark.parametrize("entry", [int, lambda count: {"of_all": count}], ids=["number", "dict"])
def test_state_that_belongs_to_no_parameter_is_refused_when_it_comes(
    tmp_path: Path, counting: Callable[..., torch.optim.Optimizer], entry: Callable[[int], Any]
) -> None:
    loop = seldom(tmp_path, make=lambda parameters: counting(parameters, entry=entry))
    loop.attach()
    with pytest.raises(
        UnsupportedOptimizer, match=r"Counting keeps state\['count'\], which belongs"
    ):
        loop.step(0)
    loop.die()
    with pytest.raises(UnsupportedOptimizer, match=r"state\['count'\]"):
        loop.attach()
