"""The states of a step, and what is refused between them."""

from __future__ import annotations

import pytest

from lowdiff.errors import UsageError
from lowdiff.step.states import Change, Sealed, State, Step
from lowdiff.types import Differential, OptimizerStep, Payload, Written

DONE = OptimizerStep(stepped=True, consumed=({"lr": 0.1},))


def sealed(number: int = 1, *changes: Change, calls: int = 1) -> Sealed:
    differential = Differential(
        step=number,
        incarnation=0,
        rank=0,
        world_size=1,
        optimizers=(DONE,),
        absent=(),
        held=(),
        payload=Payload(()),
    )
    return Sealed(differential, frozenset(changes), [], calls=calls)


def test_a_step_goes_from_open_to_staged() -> None:
    step = Step(1, 2)
    states = [step.state]
    for optimizer in range(2):
        step.consume(optimizer, DONE, [])
        states.append(step.state)
        assert step.is_broken_off
        step.end(optimizer)
        states.append(step.state)
    assert step.is_complete
    step.begin_sealing(ranks=1)
    states.append(step.state)
    step.seal(sealed())
    states.append(step.state)
    step.stage()
    assert [*states, step.state] == [
        State.OPEN,
        *[State.CONSUMED, State.STEPPED] * 2,
        State.SEALING,
        State.SEALED,
        State.STAGED,
    ]
    assert not step.changes


def test_a_body_without_an_optimizers_step_is_sealed_as_well() -> None:
    step = Step(1, 1)
    step.begin_sealing(ranks=3)
    step.seal(sealed())
    assert step.state is State.SEALED
    assert not step.is_complete


@pytest.mark.parametrize(
    ("has_ended", "message"),
    [(True, "stepped twice between commits of step 7"), (False, "before it")],
)
def test_a_second_step_of_an_optimizer_is_refused(has_ended: bool, message: str) -> None:
    step = Step(7, 1)
    step.refuse_again(0, ["SGD"])
    step.consume(0, DONE, [])
    if has_ended:
        step.end(0)
    with pytest.raises(UsageError, match=message):
        step.refuse_again(0, ["SGD"])


def test_a_second_step_names_the_optimizers_that_stepped_and_those_that_did_not() -> None:
    step, names = Step(7, 3), ["the first", "the second", "the third"]
    assert step.unfinished(names) == ""
    for optimizer in (0, 1):
        step.consume(optimizer, DONE, [])
        step.end(optimizer)
    said = "the first and the second stepped and the third did not"
    assert step.unfinished(names) == said
    with pytest.raises(UsageError, match=f"the second stepped twice.*step 7; so far {said}"):
        step.refuse_again(1, names)
    step.consume(2, DONE, [])
    assert step.unfinished(names) == ""


def test_an_earlier_call_is_kept_with_what_it_lacked() -> None:
    step = Step(1, 2)
    step.consume(0, DONE, [3, 1])
    step.end(0)
    step.end_call({}, Written())
    step.consume(0, DONE, [])
    (call,) = step.earlier
    assert (call.absent, [o.stepped for o in call.optimizers]) == ((1, 3), [True, False])
    assert (step.calls, step.absent, step.has_stepped) == (2, set(), True)
    assert not step.changes


def test_an_optimizer_that_was_broken_off_makes_its_call_a_change() -> None:
    step = Step(1, 1)
    step.consume(0, DONE, [])
    step.end_call({}, Written())
    assert step.changes == {Change.BROKEN_OFF}


def test_sealing_that_was_broken_off_costs_a_snapshot_or_with_several_ranks_the_step() -> None:
    alone, together = Step(1, 1), Step(1, 1)
    for step, ranks in ((alone, 1), (together, 2)):
        step.begin_sealing(ranks=ranks)
    alone.begin_sealing(ranks=1)
    assert alone.changes == {Change.BROKEN_OFF}
    with pytest.raises(UsageError, match="was broken off on this rank"):
        together.begin_sealing(ranks=2)


def test_no_step_is_sealed_or_staged_out_of_turn() -> None:
    step = Step(1, 1)
    with pytest.raises(AssertionError):
        step.seal(sealed())
    with pytest.raises(AssertionError):
        step.stage()


@pytest.mark.parametrize("change", list(Change))
def test_every_change_makes_a_snapshot_and_all_but_one_a_warning(change: Change) -> None:
    found = sealed(5, change, calls=3)
    assert found.rebases
    assert bool(found.warning) == (change is not Change.UNPROVEN_STATE)
    assert "{" not in found.warning
    assert not sealed().rebases
    assert not sealed().warning
