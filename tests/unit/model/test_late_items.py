"""Tensors of items that depart from an accelerator: compared when they are here, while training goes on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import lowdiff
from lowdiff.core import devices
from lowdiff.model import item_tensors
from lowdiff.model.item_tensors import Departed, ItemTensors
from lowdiff.model.items import ItemTracker, outlined
from lowdiff.persistence.format.values import decode, encode, same
from lowdiff.recovery.replay.optimizers import placed, usable_on
from lowdiff.step.late import LateGroups, LateItems, late_tensors
from lowdiff.step.recorder import _agreed
from lowdiff.step.states import Change, Sealed
from lowdiff.types import Differential, EarlierStep, OptimizerStep, Payload, Written
from tests.crash.lives import as_from_an_accelerator
from tests.unit.loops import Loop
from tests.unit.model.test_large_state import differentials, frozen_loop

CPU = torch.device("cpu")
NAMES = ("buffer/a", "buffer/b", "frozen/w")


@pytest.fixture(autouse=True)
def _late() -> Iterator[None]:
    with as_from_an_accelerator(0):
        yield


def made() -> dict[str, torch.Tensor]:
    """Two buffers and a frozen parameter."""
    return {name: torch.arange(100.0) + i for i, name in enumerate(NAMES)}


def known(tensors: dict[str, torch.Tensor]) -> ItemTensors:
    """Tensors that have been compared once."""
    found = ItemTensors(CPU)
    found.note(found.compared(tensors))
    return found


def noted(found: ItemTensors, departed: Departed) -> dict[str, torch.Tensor]:
    """What changed, which is known from now on."""
    changes = found.arrived(departed)
    found.note(changes)
    return changes.tensors


@pytest.mark.parametrize("pending", [1, 2, 3])
def test_each_step_has_its_own_values_however_many_are_on_their_way(pending: int) -> None:
    live = made()
    tensors = known(live)
    waiting: list[tuple[Departed, dict[str, torch.Tensor]]] = []
    for number in range(6):
        changed = {NAMES[number % 2]: live[NAMES[number % 2]]}
        if number == 4:
            with torch.no_grad():
                live["frozen/w"].mul_(2)
            changed["frozen/w"] = live["frozen/w"]
        live[NAMES[number % 2]].add_(1)
        expected = {name: value.clone() for name, value in changed.items()}
        waiting.append((tensors.depart(live, thorough=False), expected))
        if len(waiting) == pending:
            departed, values = waiting.pop(0)
            assert same(noted(tensors, departed), values)
    for departed, values in waiting:
        assert same(noted(tensors, departed), values)
    assert noted(tensors, tensors.depart(live)) == {}


def test_what_departed_and_was_never_noted_is_found_by_the_next_step() -> None:
    live = made()
    tensors = known(live)
    live["buffer/a"].add_(1)
    with torch.no_grad():
        live["frozen/w"].add_(1)
    tensors.arrived(tensors.depart(live, thorough=False))
    found = noted(tensors, tensors.depart(live, thorough=False))
    assert sorted(found) == ["buffer/a", "frozen/w"]


def test_buffers_that_go_come_and_take_another_shape_are_told_in_their_steps() -> None:
    live = made()
    tensors = known(live)
    table = live.pop("buffer/b")
    first = tensors.depart(live)
    live["buffer/b"] = table.view(10, 10)
    live["buffer/c"] = torch.tensor(True)
    second = tensors.depart(live)
    gone = tensors.arrived(first)
    tensors.note(gone)
    assert gone.items() == {"buffer/b": b""}
    came = tensors.arrived(second)
    tensors.note(came)
    assert decode(came.items()["buffer/b"]).shape == (10, 10)
    assert came.tensors["buffer/c"].shape == ()


def test_a_frozen_parameter_written_through_data_is_lost_once_and_then_read() -> None:
    live = made() | {"frozen/v": torch.ones(100)}
    tensors = known(live)
    start = dict(tensors.checksums)
    live["frozen/w"].data.mul_(2)
    live["frozen/v"].data[1] = 5.0  # between the elements that are looked at
    steps = [tensors.depart(live, thorough=False) for _ in range(2)]
    for departed in steps:
        changes = tensors.arrived(departed)
        tensors.note(changes)
        assert changes.lost == ["frozen/w"]
        assert not changes.are_none
        assert not changes.tensors
        # A snapshot has to hold both.
        assert not any(tensors.is_at(name, start[name]) for name in ("frozen/w", "frozen/v"))
    found = noted(tensors, tensors.depart(live, thorough=False))
    assert same(found, {name: live[name] for name in ("frozen/w", "frozen/v")})
    live["frozen/w"].data.mul_(2)
    assert [*noted(tensors, tensors.depart(live, thorough=False))] == ["frozen/w"]


def test_a_lost_parameter_is_told_also_if_it_is_what_it_was_when_it_is_read() -> None:
    """The snapshot of the step between holds the other values."""
    live = made()
    tensors = known(live)
    for factor in (2.0, 0.5):
        live["frozen/w"].data.mul_(factor)
        found = noted(tensors, tensors.depart(live, thorough=False))
    assert [*found] == ["frozen/w"]


def test_a_frozen_parameter_that_is_found_by_reading_it_whole_is_not_lost() -> None:
    live = made()
    tensors = known(live)
    live["frozen/w"].data[1] = 5.0
    assert tensors.arrived(tensors.depart(live, thorough=False)).are_none
    changes = tensors.arrived(tensors.depart(live))
    assert same(changes.tensors, {"frozen/w": live["frozen/w"]})
    assert not changes.lost


def test_what_is_beyond_the_bound_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(item_tensors, "LATE_BYTES", 800)  # the buffers, not the parameter
    live = made()
    tensors = known(live)
    with torch.no_grad():
        live["frozen/w"].mul_(2)
    live["buffer/b"].mul_(3)
    departed = tensors.depart(live)
    assert departed.shapes.keys() == {"buffer/a", "buffer/b"}
    assert departed.read.keys() == {"frozen/w"}
    # Read once more with another value, and then with that of before, while the first is on its way.
    with torch.no_grad():
        live["frozen/w"].div_(2)
    back = tensors.depart(live)
    found = noted(tensors, departed)
    assert same(found["frozen/w"], live["frozen/w"] * 2)
    changes = tensors.arrived(back)
    assert changes.lost == ["frozen/w"]


def sealed(optimizers: Any = (), earlier: Any = ()) -> Sealed:
    """A step without items."""
    record = Differential(
        step=1, incarnation=1, rank=0, world_size=1, optimizers=optimizers, absent=(), held=(),
        payload=Payload(()), items={"rng": b"1"}, earlier=earlier,
    )  # fmt: skip
    return Sealed(record, frozenset(), [])


def test_items_are_completed_to_the_same_again_where_the_rest_was_broken_off() -> None:
    live = made()
    tracker = ItemTracker(lambda: live, {}, CPU, {})
    tracker.start({}, is_under_way=False)
    tracker.changed()
    live["buffer/a"].add_(1)
    _, departed = tracker.changed(thorough=False)
    assert departed is not None
    late = LateItems(tracker, departed)
    once, again = late.complete(sealed()), late.complete(sealed())
    assert once.differential.items.keys() == {"rng", "buffer/a"}
    assert again.differential.items == once.differential.items
    assert not once.changes


def test_a_lost_parameter_costs_its_step_a_snapshot() -> None:
    live = made()
    tracker = ItemTracker(lambda: live, {}, CPU, {})
    tracker.start({}, is_under_way=False)
    live["frozen/w"].data.mul_(2)
    _, departed = tracker.changed(thorough=False)
    assert departed is not None
    assert LateItems(tracker, departed).complete(sealed()).changes == {Change.OUTSIDE}


@pytest.mark.parametrize("snapshot_every", [4, 1000])
def test_frozen_parameters_written_through_data_are_exact_at_every_step(
    tmp_path: Path, snapshot_every: int
) -> None:
    loop = frozen_loop(tmp_path, snapshot_every=snapshot_every)
    loop.attach()
    bias = loop.model.get_parameter("0.bias")
    live = {}
    for number in loop.checkpointer.steps(9):
        loop.step(number)
        if number > 4:
            bias.data.mul_(0.9).add_(1.0)
        live[number + 1] = loop.weights()
    loop.die()
    for step, expected in live.items():
        found = lowdiff.recover(tmp_path / "run", step, staging=tmp_path / "staging")
        assert same(dict(found.model_state_dict()), expected), step


def test_an_average_comes_back_whose_count_departed_with_other_tensors(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    average = AveragedModel(loop.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    loop.attach(average=average)
    for number in loop.checkpointer.steps(4):
        loop.step(number)
        average.update_parameters(loop.model)
    loop.checkpointer.close()
    state = lowdiff.recover(tmp_path / "run")
    assert state.step == 4
    assert same(state.stateful["average"], dict(average.state_dict()))


def test_small_tensors_of_objects_depart_with_the_others() -> None:
    state = {"scale": torch.ones(2), "betas": [torch.zeros(()), 1.0]}
    outline, apart = outlined("thing", state)
    assert apart.keys() == {"tensor/thing/scale", "tensor/thing/betas/0"}
    assert late_tensors(outline) == []


def rate(value: float) -> dict[str, Any]:
    """A group on an accelerator."""
    lr = devices.belonging(torch.tensor(value), "cuda:0")
    return {"lr": lr, "betas": (torch.tensor(0.5), 0.9), "capturable": True}


def test_rates_are_in_the_record_as_consumed_and_as_left() -> None:
    stepped = [
        OptimizerStep(stepped=True, consumed=(rate(1.0),), committed=(rate(1.0),)),
        OptimizerStep(stepped=True, consumed=(rate(1.0),), committed=(rate(2.0),)),
    ]
    call = EarlierStep((stepped[1],), (), Payload(()), {}, Written())
    whole = sealed(tuple(stepped), (call,))
    tensors = late_tensors([[o.consumed, o.committed] for o in (stepped[1], *stepped)])
    late = LateGroups(tensors)
    for tensor in tensors:
        tensor.zero_()  # departed by now
    found = late.complete(whole)
    first, second = found.differential.optimizers
    assert first.committed is None
    assert same(first.consumed, (rate(1.0),))
    assert same(second.committed, (rate(2.0),))
    assert same(found.differential.earlier[0].optimizers[0].committed, (rate(2.0),))
    assert same(found.groups, [(rate(1.0),), (rate(2.0),)])


def test_a_rate_of_an_accelerator_comes_back_there_and_one_of_the_host_does_not() -> None:
    meta = torch.device("meta")
    group = decode(encode(rate(1.0)))
    assert group["lr"].device == CPU
    back = placed(group, meta)
    assert back["lr"].device == meta
    assert back["betas"][0].device == CPU
    # As often as it is stored, and on a host that continues the run.
    again = placed(decode(encode(placed(group, CPU))), meta)
    assert again["lr"].device == meta
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(devices, "may_look", lambda _: False)
        assert usable_on(meta, group)["lr"].device == meta


def test_ranks_compare_the_form_of_a_rate_on_an_accelerator_and_not_its_value() -> None:
    def agreed(*groups: dict[str, Any]) -> int:
        step = OptimizerStep(stepped=True, consumed=groups)
        return _agreed(sealed((step,)).differential, comes_late=True)[1]

    assert agreed(rate(1.0)) == agreed(rate(2.0))
    other = rate(1.0)
    other["lr"] = other["lr"].double()
    assert agreed(rate(1.0)) != agreed(other)
    assert agreed(rate(1.0)) != agreed({**rate(1.0), "lr": 1.0})


def adam(parameters: Any) -> torch.optim.Optimizer:
    """An optimizer whose learning rate is a tensor."""
    return torch.optim.Adam(parameters, lr=torch.tensor(1e-2), foreach=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"strategy": "survivors", "snapshot_every": 3},
        {"batch_size": 1},
        {"batch_size": 1, "optimizer_steps": "any"},
    ],
    ids=["survivors", "replica", "several steps"],
)
def test_strategies_without_a_compressor_resume_what_arrived_late(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    """Statistics of a batch norm, and a rate that is written after each step."""

    def trained(folder: Path, until: int) -> Loop:
        loop = Loop(folder, make=adam, settings={"compressor": None, **settings})
        loop.attach()
        for number in loop.checkpointer.steps(until):
            loop.step(number)
            loop.optimizer.param_groups[0]["lr"].mul_(0.9)
        return loop

    whole = trained(tmp_path / "whole", 8)
    whole.checkpointer.close()
    trained(tmp_path, 5).die()
    again = trained(tmp_path, 8)
    assert same(again.weights(), whole.weights())
    again.checkpointer.close()


def test_a_rate_that_a_schedule_writes_in_place_is_recorded_and_resumed(tmp_path: Path) -> None:
    loop = Loop(tmp_path, make=adam, settings={"snapshot_every": 4})
    loop.attach()
    for number in loop.checkpointer.steps(6):
        loop.step(number)
        loop.optimizer.param_groups[0]["lr"].mul_(0.5)
    loop.die()
    found = {d.step: d.optimizers[0] for d in differentials(tmp_path) if d.optimizers}
    for step, done in found.items():
        assert same(done.consumed[0]["lr"], torch.tensor(1e-2) * 0.5 ** (step - 1))
        assert done.committed is not None
        assert same(done.committed[0]["lr"], torch.tensor(1e-2) * 0.5**step)
    resumed = Loop(tmp_path, make=adam, settings={"snapshot_every": 4})
    assert resumed.attach() == 6
    assert same(resumed.optimizer.param_groups[0]["lr"], loop.optimizer.param_groups[0]["lr"])
    resumed.checkpointer.close()
