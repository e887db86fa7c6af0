"""What is on its way from an accelerator when a step is sealed: the commit waits for it, and stages it whole.

Copies arrive late here by `testing.late_copies`; those of an accelerator differ in how long they take.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

import lowdiff
from lowdiff import testing
from lowdiff.persistence.format.values import same
from tests.crash.lives import as_from_an_accelerator
from tests.unit.loops import Loop

#: Longer than all else in a step.
SECONDS = 0.2


@pytest.fixture(autouse=True)
def _late() -> Iterator[None]:
    with ExitStack() as late:
        late.enter_context(testing.whole_buckets())
        late.enter_context(as_from_an_accelerator(0))
        late.enter_context(testing.late_copies(least_seconds=SECONDS, most_seconds=SECONDS))
        yield


def attached(folder: Path) -> Loop:
    loop = Loop(folder, settings={"snapshot_every": 1000})
    loop.attach()
    return loop


def trained(loop: Loop, *numbers: int) -> None:
    for number in numbers:
        loop.step(number)
        loop.checkpointer.commit()


def test_a_step_counts_once_its_commit_has_returned(tmp_path: Path) -> None:
    loop = attached(tmp_path)
    for number in range(3):
        trained(loop, number)
        assert loop.checkpointer.stats()["committed_step"] == number + 1
    weights = loop.weights()
    loop.die()
    state = lowdiff.recover(tmp_path / "run", staging=tmp_path / "staging")
    assert state.step == 3
    assert same(dict(state.model_state_dict()), weights)


def test_a_killed_run_goes_on_with_the_residual_of_its_last_step(tmp_path: Path) -> None:
    whole = attached(tmp_path / "whole")
    trained(whole, *range(6))
    whole.checkpointer.close()
    killed = attached(tmp_path)
    trained(killed, *range(4))
    killed.die()
    again = Loop(tmp_path, settings={"snapshot_every": 1000})
    assert again.attach() == 4
    trained(again, 4, 5)
    assert same(again.weights(), whole.weights())
    again.checkpointer.close()


def test_a_copy_of_a_residual_that_is_not_here_yet_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed between the two, the step before counts, with its own."""
    killed = attached(tmp_path)
    trained(killed, 0, 1)

    def dies(*_: object) -> None:
        raise KeyboardInterrupt

    killed.step(2)
    with monkeypatch.context() as patch:
        patch.setattr("lowdiff.step.states.Sealed.arrived", dies)
        with pytest.raises(KeyboardInterrupt):
            killed.checkpointer.commit()
    killed.die()
    whole = attached(tmp_path / "whole")
    trained(whole, *range(4))
    whole.checkpointer.close()
    again = Loop(tmp_path, settings={"snapshot_every": 1000})
    assert again.attach() == 2
    trained(again, 2, 3)
    assert same(again.weights(), whole.weights())
    again.checkpointer.close()
