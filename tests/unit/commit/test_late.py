"""Steps that are on their way from an accelerator when their commit returns: what waits for them, and what a kill takes.

Copies arrive late here by `testing.late_copies`; the engine on an accelerator differs in how long it takes.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

import lowdiff
from lowdiff import testing
from lowdiff.persistence.format.values import same
from tests.crash.lives import as_from_an_accelerator
from tests.unit.loops import Loop, wait_until

#: Longer than all else in a step, by far.
SECONDS = 0.4
#: Steps that may be pending.
MOST = 2


@pytest.fixture(autouse=True)
def _late() -> Iterator[None]:
    with ExitStack() as late:
        late.enter_context(testing.whole_buckets())
        late.enter_context(as_from_an_accelerator(0))
        late.enter_context(testing.late_copies(least_seconds=SECONDS, most_seconds=SECONDS))
        yield


def loop_of(folder: Path, **settings: object) -> Loop:
    loop = Loop(folder, settings={"snapshot_every": 1000, **settings})
    loop.attach()
    return loop


def trained(loop: Loop, *numbers: int) -> None:
    for number in numbers:
        loop.step(number)
        loop.checkpointer.commit()


def recovered(folder: Path) -> int:
    return lowdiff.recover(folder / "run", staging=folder / "staging").step


def test_a_commit_returns_before_its_step_is_staged_which_counts_two_steps_later(
    tmp_path: Path,
) -> None:
    loop = loop_of(tmp_path)
    trained(loop, 0, 1)
    stats = loop.checkpointer.stats()
    assert (stats["pending_steps"], stats["committed_step"]) == (MOST, 0)
    trained(loop, 2)
    stats = loop.checkpointer.stats()
    assert 1 <= stats["committed_step"] == 3 - stats["pending_steps"]
    loop.die()
    assert recovered(tmp_path) == stats["committed_step"]


def test_what_a_kill_takes_is_made_again_to_the_same_bits(tmp_path: Path) -> None:
    whole = loop_of(tmp_path / "whole")
    trained(whole, *range(7))
    whole.checkpointer.close()
    killed = loop_of(tmp_path)
    trained(killed, *range(4))
    killed.die()
    again = Loop(tmp_path, settings={"snapshot_every": 1000})
    begun = again.attach()
    assert 4 - MOST <= begun <= 4
    trained(again, *range(begun, 7))
    assert same(again.weights(), whole.weights())
    again.checkpointer.close()


def closes(loop: Loop) -> None:
    with pytest.raises(KeyError), loop.checkpointer:
        raise KeyError


def breaks(loop: Loop) -> None:
    for number in loop.checkpointer.steps(10):
        if number == 4:
            break
        loop.step(number)


def ends(loop: Loop) -> None:
    for number in loop.checkpointer.steps(4):
        loop.step(number)


def is_interrupted(loop: Loop) -> None:
    with suppress(KeyboardInterrupt):
        for number in loop.checkpointer.steps(10):
            if number == 4:
                raise KeyboardInterrupt
            loop.step(number)


def pins(loop: Loop) -> None:
    trained(loop, 2, 3)
    assert loop.checkpointer.keep(4) == 4


def is_preempted(loop: Loop) -> None:
    trained(loop, 2)
    os.kill(os.getpid(), signal.SIGUSR1)
    wait_until(lambda: loop.checkpointer.stats()["preempted"])
    trained(loop, 3)


@pytest.mark.parametrize(
    "act", [breaks, ends, is_interrupted, pins, is_preempted], ids=lambda act: act.__name__
)
def test_whoever_relies_on_a_step_waits_for_it(tmp_path: Path, act: Callable[[Loop], None]) -> None:
    """Killed right behind it, all four steps are there."""
    loop = loop_of(tmp_path)
    if act in (pins, is_preempted):
        trained(loop, 0, 1)
    act(loop)
    loop.die()
    assert recovered(tmp_path) == 4


@pytest.mark.parametrize("fails", [False, True])
def test_the_end_of_a_training_waits_for_its_last_steps(tmp_path: Path, *, fails: bool) -> None:
    loop = loop_of(tmp_path)
    trained(loop, *range(4))
    if fails:
        closes(loop)
    else:
        loop.checkpointer.close()
    assert recovered(tmp_path) == 4


def test_a_snapshot_waits_for_the_steps_before_it(tmp_path: Path) -> None:
    loop = loop_of(tmp_path, snapshot_every=4)
    trained(loop, *range(4))
    assert loop.checkpointer.stats()["pending_steps"] == 0
    assert loop.checkpointer.stats()["snapshot_step"] == 4
    loop.die()
    assert recovered(tmp_path) == 4


def test_steps_that_are_pending_when_staging_is_removed_cost_a_snapshot(tmp_path: Path) -> None:
    loop = loop_of(tmp_path)
    trained(loop, 0, 1)
    testing.parts_of(loop.checkpointer).staging.folder.remove()
    trained(loop, 2, 3)
    assert loop.checkpointer.stats()["snapshot_step"] >= 3
    weights = loop.weights()
    loop.checkpointer.close()
    state = lowdiff.recover(tmp_path / "run", staging=tmp_path / "staging")
    assert state.step == 4
    assert same(dict(state.model_state_dict()), weights)


def test_a_fork_has_nothing_of_what_is_pending(tmp_path: Path) -> None:
    loop = loop_of(tmp_path)
    trained(loop, 0, 1)
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    trained(loop, 2)
    loop.checkpointer.close()
    assert recovered(tmp_path) == 3


def test_a_cell_that_is_run_again_goes_on_after_all_that_had_ended(tmp_path: Path) -> None:
    trained(loop_of(tmp_path), *range(4))
    again = Loop(tmp_path, settings={"snapshot_every": 1000})
    assert again.attach() == 4
    again.checkpointer.close()


def test_a_kill_between_the_copy_of_a_residual_and_its_record_takes_no_staged_one_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies have three places: that of the step which is sealed is the place of one three steps older."""
    monkeypatch.setattr("lowdiff.step.residual.NUM_SLOTS", 3)
    whole = loop_of(tmp_path / "whole")
    trained(whole, *range(8))
    whole.checkpointer.close()
    killed = loop_of(tmp_path)
    trained(killed, 0)
    time.sleep(1.5 * SECONDS)
    trained(killed, 1, 2)  # the first one is staged by now, and these are not

    def dies(*_: object) -> None:
        raise KeyboardInterrupt

    killed.step(3)
    with monkeypatch.context() as patch:
        patch.setattr("lowdiff.commit.staging.Staging.stage", dies)
        with pytest.raises(KeyboardInterrupt):
            killed.checkpointer.commit()
    killed.die()
    again = Loop(tmp_path, settings={"snapshot_every": 1000})
    begun = again.attach()
    assert 2 <= begun <= 3
    trained(again, *range(begun, 8))
    assert same(again.weights(), whole.weights())
    again.checkpointer.close()
