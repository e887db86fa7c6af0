"""Snapshots that are copied beside the next step: of their step in bits, or they do not count.

Copies arrive late here by `testing.late_copies`: what is overwritten before it is held is copied as it is then.
"""

from __future__ import annotations

import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import lowdiff
from lowdiff import testing
from lowdiff.commit import images
from lowdiff.commit.images import Images
from lowdiff.commit.session import Session
from lowdiff.core import devices
from lowdiff.core.layout import is_dense
from lowdiff.core.memory import byte_view
from lowdiff.persistence.format.image import RESIDUAL
from lowdiff.persistence.format.values import same
from lowdiff.recovery.state import decode_item
from tests.crash.lives import as_from_an_accelerator
from tests.unit.loops import Loop, fail_once, small_model, wait_until

#: Longer than all else in a step, by far.
SECONDS = 0.3
LOG: dict[str, Any] = {"strategy": "log"}
SURVIVORS: dict[str, Any] = {"strategy": "survivors", "compressor": None}
GRADIENTS: dict[str, Any] = {"strategy": "gradients", "compressor": None}


@pytest.fixture(autouse=True)
def _late() -> Iterator[None]:
    with ExitStack() as late:
        late.enter_context(testing.whole_buckets())
        late.enter_context(as_from_an_accelerator(0))
        late.enter_context(testing.late_copies(least_seconds=SECONDS, most_seconds=SECONDS))
        yield


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Steps of the snapshots that counted."""
    steps: list[int] = []
    show = Images.show

    def noted(own: Images, *given: int) -> Any:
        steps.append(own.step)
        return show(own, *given)

    monkeypatch.setattr(Images, "show", noted)
    return steps


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> dict[int, dict[str, bytes]]:
    """What snapshots held, by their steps."""
    found: dict[int, dict[str, bytes]] = {}
    write = Images.write

    def noted(own: Images, tensors: Any) -> Any:
        found[own.step] = {tensor.name: bytes(tensor.data) for tensor in tensors}
        return write(own, tensors)

    monkeypatch.setattr(Images, "write", noted)
    return found


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each time that a copy was held: whether by an optimizer's pre-hook."""
    calls: list[bool] = []
    inside = threading.local()
    hold, before = devices.Trail.hold, Session.before_optimizer

    def noted(trail: devices.Trail) -> None:
        calls.append(getattr(inside, "hook", False))
        hold(trail)

    def hooked(*given: Any) -> None:
        inside.hook = True
        try:
            before(*given)
        finally:
            inside.hook = False

    monkeypatch.setattr(devices.Trail, "hold", noted)
    monkeypatch.setattr(Session, "before_optimizer", hooked)
    return calls


def attached(folder: Path, **settings: object) -> Loop:
    loop = Loop(folder, settings={"snapshot_every": 2, **settings})
    loop.attach()
    return loop


def trained(loop: Loop, *numbers: int) -> None:
    for number in numbers:
        loop.step(number)
        loop.checkpointer.commit()


def recovered(loop: Loop, step: int | None = None) -> lowdiff.recovery.RecoveredState:
    return lowdiff.recover(loop.folder / "run", staging=loop.folder / "staging", step=step)


def optimizer_state(loop: Loop) -> dict[int, dict[str, torch.Tensor]]:
    parameters = loop.optimizer.param_groups[0]["params"]
    state = loop.optimizer.state
    return {
        i: {key: value.clone() for key, value in state[p].items()} for i, p in enumerate(parameters)
    }


def settled(loop: Loop, step: int) -> None:
    testing.wait_until(loop.checkpointer, lambda stats: stats["durable_snapshot"] >= step)


def passes(loop: Loop, number: int) -> None:
    """A forward and a backward pass, without the optimizer's step."""
    inputs = torch.randn(8, 20, generator=torch.Generator().manual_seed(number))
    loop.optimizer.zero_grad()
    loop.model(inputs).square().mean().backward()


@pytest.mark.parametrize("settings", [LOG, SURVIVORS], ids=["log", "survivors"])
def test_nothing_holds_a_snapshot_before_the_next_optimizer_does(
    tmp_path: Path, settings: dict[str, Any], held: list[bool]
) -> None:
    loop = attached(tmp_path, **settings)
    trained(loop, 0, 1)
    passes(loop, 2)
    assert not held
    loop.optimizer.step()
    assert held == [True]
    loop.checkpointer.commit()
    loop.die()


def test_a_snapshot_that_arrives_before_the_next_optimizer_is_held_by_nobody(
    tmp_path: Path, held: list[bool], shown: list[int]
) -> None:
    loop = attached(tmp_path, **SURVIVORS)
    trained(loop, 0, 1)
    wait_until(lambda: 2 in shown)
    trained(loop, 2)
    assert not held
    loop.die()


@pytest.mark.parametrize("settings", [LOG, SURVIVORS], ids=["log", "survivors"])
@pytest.mark.parametrize("piece_bytes", [500, 1 << 20])
def test_a_snapshot_is_of_its_step_though_an_optimizer_steps_while_it_is_on_its_way(
    tmp_path: Path,
    settings: dict[str, Any],
    piece_bytes: int,
    shown: list[int],
    written: dict[int, dict[str, bytes]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Also what forward and backward passes write: statistics of a batch norm, and the residual."""
    with testing.limits(device_piece_bytes=piece_bytes):
        loop = attached(tmp_path, **settings)
        trained(loop, 0, 1)
        assert shown == [0] or not shown
        weights, state = loop.weights(), optimizer_state(loop)
        residual = testing.residual_of(loop.checkpointer)
        trained(loop, 2, 3)
        settled(loop, 2)
        loop.die()
    assert 2 in shown
    assert "LD222" not in caplog.text
    back = recovered(loop, 2)
    assert same(dict(back.model_state_dict()), weights)
    assert same(back.optimizer_state_dict()["state"], state)
    for name, values in residual.items():
        assert written[2][RESIDUAL + name] == bytes(byte_view(values))
    assert bool(residual) == (settings is LOG)


def test_an_average_is_of_its_step(tmp_path: Path, shown: list[int]) -> None:
    loop = Loop(tmp_path, settings={"snapshot_every": 2, **SURVIVORS})
    average = AveragedModel(loop.model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    loop.attach(ema=average)
    expected = {}
    for number in range(4):
        loop.step(number)
        average.update_parameters(loop.model)
        loop.checkpointer.commit()
        if number == 1:
            named = average.module.named_parameters()
            expected = {name: bytes(byte_view(value.detach())) for name, value in named}
    wait_until(lambda: 2 in shown)
    loop.die()
    averaged = recovered(loop, 2).averages["ema"]
    assert expected
    assert {name: bytes(byte_view(averaged[name])) for name in expected} == expected


def clamps(loop: Loop) -> None:
    with torch.no_grad():
        loop.model.get_parameter("0.weight").clamp_(-0.01, 0.01)


def writes_unseen(loop: Loop) -> None:
    loop.model.get_parameter("3.weight").data[0, 0] += 1


def loads(loop: Loop) -> None:
    loop.model.load_state_dict({k: v * 1.5 for k, v in loop.model.state_dict().items()})


def halves_moments(loop: Loop) -> None:
    for entries in loop.optimizer.state.values():
        entries["exp_avg"].mul_(0.5)


WRITES = [clamps, writes_unseen, loads, halves_moments]


@pytest.mark.parametrize("settings", [LOG, SURVIVORS], ids=["log", "survivors"])
@pytest.mark.parametrize("write", WRITES, ids=lambda write: write.__name__)
def test_a_snapshot_that_is_written_on_its_way_never_counts_and_a_later_one_does(
    tmp_path: Path,
    settings: dict[str, Any],
    write: Callable[[Loop], None],
    shown: list[int],
    held: list[bool],
    caplog: pytest.LogCaptureFixture,
) -> None:
    loop = attached(tmp_path, **settings)
    before = loop.weights()
    trained(loop, 0, 1)
    write(loop)
    kept = {2: loop.weights()}
    for number in (2, 3, 4):
        trained(loop, number)
        kept[number + 1] = loop.weights()
    wait_until(lambda: max(shown, default=0) >= 3)
    assert 2 not in shown
    assert caplog.text.count("LD222") == 1
    assert "was written between two optimizer steps" in caplog.text
    settled(loop, 3)
    loop.die()
    back = recovered(loop)
    assert back.step >= 3
    assert same(dict(back.model_state_dict()), kept[back.step])
    again = Loop(tmp_path, settings={"snapshot_every": 2, **settings})
    assert again.attach() == back.step
    assert same(again.weights(), kept[back.step])
    assert not same(again.weights(), before)
    again.die()


def test_it_is_said_once_and_each_time_another_snapshot_follows_in_its_turn(
    tmp_path: Path, shown: list[int], held: list[bool], caplog: pytest.LogCaptureFixture
) -> None:
    loop = attached(tmp_path, **{**SURVIVORS, "snapshot_every": 3})
    for number in range(9):
        trained(loop, number)
        clamps(loop)
        if number in (3, 6):
            wait_until(lambda: not loop.checkpointer.stats()["pending_steps"])
    loop.checkpointer.close()
    assert caplog.text.count("LD222") == 1
    assert not {3, 6} & {*shown}
    assert len(shown) >= 3


def test_a_kill_while_a_snapshot_is_on_its_way_leaves_the_one_before(
    tmp_path: Path, shown: list[int]
) -> None:
    loop = attached(tmp_path, **SURVIVORS)
    first = loop.weights()
    trained(loop, 0, 1)
    passes(loop, 2)
    loop.die()
    loop.optimizer.step()
    back = recovered(loop)
    assert back.step == 0
    assert same(dict(back.model_state_dict()), first)
    assert 2 not in shown


def closes(loop: Loop) -> None:
    loop.checkpointer.close()


def detaches(loop: Loop) -> None:
    loop.checkpointer.detach()


def fails(loop: Loop) -> None:
    with suppress(KeyError), loop.checkpointer:
        raise KeyError


def pins(loop: Loop) -> None:
    loop.checkpointer.keep(2)
    loop.die()


def is_attached_again(loop: Loop) -> None:
    again = Loop(loop.folder, settings={"snapshot_every": 2, **SURVIVORS})
    again.attach()
    again.die()


@pytest.mark.parametrize(
    "act", [closes, detaches, fails, pins, is_attached_again], ids=lambda act: act.__name__
)
def test_who_ends_waits_for_the_snapshot_and_may_write_afterwards(
    tmp_path: Path, act: Callable[[Loop], None], caplog: pytest.LogCaptureFixture
) -> None:
    loop = attached(tmp_path, **SURVIVORS)
    trained(loop, 0, 1)
    weights, state = loop.weights(), optimizer_state(loop)
    act(loop)
    loop.step(2)  # without lowdiff
    clamps(loop)
    back = recovered(loop)
    assert back.step == 2
    assert same(dict(back.model_state_dict()), weights)
    assert same(back.optimizer_state_dict()["state"], state)
    assert "LD222" not in caplog.text


def test_a_snapshot_whose_copy_fails_is_owed(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    shown: list[int],
    caplog: pytest.LogCaptureFixture,
) -> None:
    fail_once(monkeypatch, devices.Trail, "_begin", lowdiff.errors.StorageError("it fell off"))
    loop = attached(tmp_path, **SURVIVORS)
    trained(loop, 0, 1)
    wait_until(lambda: "no full snapshot now: it fell off" in caplog.text)
    trained(loop, 2, 3)
    wait_until(lambda: max(shown) >= 3)
    weights = loop.weights()
    loop.checkpointer.close()
    assert same(dict(recovered(loop).model_state_dict()), weights)


def test_staging_that_is_removed_while_a_snapshot_is_on_its_way_is_made_anew(
    tmp_path: Path,
) -> None:
    loop = attached(tmp_path, **LOG)
    trained(loop, 0, 1)
    testing.parts_of(loop.checkpointer).staging.folder.remove()
    trained(loop, 2, 3)
    weights = loop.weights()
    loop.checkpointer.close()
    assert same(dict(recovered(loop).model_state_dict()), weights)


def test_what_the_device_cannot_sum_as_it_lies_is_copied_in_its_turn(
    tmp_path: Path, shown: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    """Moments with holes between their rows."""
    loop = Loop(tmp_path, small_model(), settings={"snapshot_every": 2, **SURVIVORS})
    loop.attach()
    trained(loop, 0)
    for entries in loop.optimizer.state.values():
        moment = entries["exp_avg"]
        if moment.dim() == 2:
            wide = torch.zeros(moment.shape[0], moment.shape[1] + 3)
            entries["exp_avg"] = wide[:, : moment.shape[1]].copy_(moment)
    trained(loop, 1)
    state = optimizer_state(loop)
    trained(loop, 2)
    settled(loop, 2)
    loop.die()
    assert 2 in shown
    assert "LD222" not in caplog.text
    back = recovered(loop, 2).optimizer_state_dict()["state"]
    assert all(torch.equal(back[i]["exp_avg"], state[i]["exp_avg"]) for i in state)


@pytest.fixture
def on_the_host(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Have tensors lie on the host, beside a model on an accelerator."""
    places: set[int] = set()

    def stays(tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in places

    monkeypatch.setattr(devices, "leave", partial(devices.Leaving, stays=stays))
    # What lies elsewhere than the model does not trail.
    monkeypatch.setattr(images, "is_dense", lambda tensor: is_dense(tensor) and not stays(tensor))

    def lie(*tensors: torch.Tensor) -> None:
        places.update(tensor.untyped_storage().data_ptr() for tensor in tensors)

    return lie


@pytest.mark.parametrize("settings", [LOG, SURVIVORS])
def test_an_average_on_the_host_is_of_its_step(
    tmp_path: Path, on_the_host: Callable[..., None], settings: dict[str, Any]
) -> None:
    loop = Loop(tmp_path, settings={"snapshot_every": 2, **settings})
    average = AveragedModel(loop.model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    on_the_host(*average.parameters())
    loop.attach(average=average)
    averaged = {}
    for number in range(4):
        loop.step(number)
        average.update_parameters(loop.model)
        loop.checkpointer.commit()
        averaged[number + 1] = {
            name: value.detach().reshape(-1).clone()
            for name, value in average.module.named_parameters()
        }
    settled(loop, 2)
    loop.die()
    found = recovered(loop, 2).averages["average"]
    assert same({name: found[name] for name in averaged[2]}, averaged[2])


def test_items_on_the_host_are_of_their_step(
    tmp_path: Path, on_the_host: Callable[..., None]
) -> None:
    model = small_model()
    seen, kept = torch.zeros(2000), torch.zeros(2000)
    model.register_buffer("seen", seen)
    loop = Loop(tmp_path, model, settings={"snapshot_every": 2, **GRADIENTS})
    on_the_host(seen, kept)
    loop.attach()
    loop.checkpointer.state["kept"] = kept
    for number in range(3):
        loop.step(number)
        seen.fill_(number + 1)
        kept.fill_(number + 1)
        loop.checkpointer.commit()
    settled(loop, 2)
    loop.die()
    items = recovered(loop, 2).items[0]
    for name in ("buffer/seen", "tensor/checkpointer.state/kept"):
        assert decode_item(name, items[name]).unique().tolist() == [2.0]


class Counting(torch.optim.Optimizer):
    """SGD whose state holds a dict and a list that its step changes in place."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            seen = self.state[parameter].setdefault("seen", {"count": 0, "last": []})
            seen["count"] += 1
            seen["last"].append(parameter.grad.norm())
            parameter.add_(parameter.grad, alpha=-self.param_groups[0]["lr"] / seen["count"])


@pytest.mark.parametrize("settings", [LOG, SURVIVORS])
def test_what_is_nested_in_optimizer_state_is_of_its_step(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    lowdiff.register_optimizer(Counting, "whole")
    loop = Loop(tmp_path, make=Counting, settings={"snapshot_every": 2, **settings})
    loop.attach()
    trained(loop, *range(4))
    settled(loop, 2)
    loop.die()
    seen = recovered(loop, 2).optimizer_state_dict()["state"][0]["seen"]
    assert (seen["count"], len(seen["last"])) == (2, 2)


@pytest.mark.parametrize("settings", [GRADIENTS, SURVIVORS])
def test_a_kept_step_is_kept_though_an_evaluation_swaps_weights_behind_it(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    retention = lowdiff.Retention(snapshots=1, every_steps=3)
    loop = attached(tmp_path, retention=retention, **{**settings, "snapshot_every": 100})
    for number in range(7):
        trained(loop, number)
        if (number + 1) % 3 == 0:
            own = loop.weights()
            with torch.no_grad():
                for parameter in loop.model.parameters():
                    parameter.zero_()
            loop.model.load_state_dict(own)
    loop.checkpointer.close()
    assert [recovered(loop, step).step for step in (3, 6)] == [3, 6]


@pytest.mark.parametrize("settings", [GRADIENTS, SURVIVORS])
def test_a_snapshot_before_the_machine_goes_holds_its_step_though_weights_are_swapped_behind_it(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    loop = attached(tmp_path, **{**settings, "snapshot_every": 100})
    trained(loop, 0, 1)
    os.kill(os.getpid(), signal.SIGTERM)
    wait_until(lambda: loop.checkpointer.stats()["preempted"])
    trained(loop, 2)
    weights = loop.weights()
    with torch.no_grad():
        for parameter in loop.model.parameters():
            parameter.zero_()  # averaged weights are put in to be exported
    with suppress(lowdiff.LowDiffError):
        loop.checkpointer.close()
    shutil.rmtree(tmp_path / "staging")
    state = recovered(loop)
    assert state.step == 3
    assert same(dict(state.model_state_dict()), weights)


@pytest.mark.parametrize(("snapshot_every", "every_steps"), [(5, 6), (4, 2)])
def test_a_kept_step_soon_behind_another_snapshot_is_kept(
    tmp_path: Path, snapshot_every: int, every_steps: int
) -> None:
    retention = lowdiff.Retention(snapshots=1, every_steps=every_steps)
    loop = attached(
        tmp_path, retention=retention, **{**GRADIENTS, "snapshot_every": snapshot_every}
    )
    trained(loop, *range(13))
    loop.checkpointer.close()
    for step in range(every_steps, 13, every_steps):
        assert recovered(loop, step).step == step


def test_memory_that_is_given_back_meanwhile_was_overwritten(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loop = attached(tmp_path, on_error="raise", **LOG)
    trained(loop, 0, 1)
    parameters = list(loop.model.parameters())
    values = [parameter.detach().clone() for parameter in parameters]
    for parameter in parameters:
        parameter.untyped_storage().resize_(0)  # as for a rollout
    wait_until(lambda: "LD222" in caplog.text)
    for parameter, value in zip(parameters, values, strict=True):
        parameter.untyped_storage().resize_(value.nbytes)
        parameter.data.copy_(value)
    trained(loop, 2, 3)
    settled(loop, 3)
    weights = loop.weights()
    loop.settle()
    loop.die()
    assert same(dict(recovered(loop).model_state_dict()), weights)


def test_a_commit_under_inference_mode_takes_its_snapshot(tmp_path: Path) -> None:
    loop = attached(tmp_path, on_error="raise", **LOG)
    for number in range(4):
        loop.step(number)
        with torch.inference_mode():
            loop.checkpointer.commit()
    settled(loop, 4)
    weights = loop.weights()
    loop.die()
    assert same(dict(recovered(loop, 4).model_state_dict()), weights)
