"""Ranks that recover together go on to the same candidate, whoever of them was set back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import pytest

from lowdiff.errors import ReplayMismatch, StepNotFound
from lowdiff.persistence.files.paths import RunFolder
from lowdiff.persistence.format.values import same
from lowdiff.persistence.run.catalog import scan
from lowdiff.recovery.replay.replayer import ReplayOptions
from lowdiff.recovery.search import Search, Setback
from lowdiff.recovery.state import RecoveredState
from tests.unit.recovery.training import Trained


class Another:
    """The company of a rank that is set back as told, attempt by attempt, and then succeeds."""

    rank, world_size = 0, 1  # so that all is loaded here

    def __init__(self, *setbacks: Setback | ReplayMismatch, lacks: int = -1) -> None:
        self.planned: list[int] = []
        self._setbacks = iter(setbacks)
        self._lacks = lacks

    def gather(self, value: Any) -> list[Any]:
        if isinstance(value, int):  # the step that rank 0 has planned
            self.planned.append(value)
            return [value, value]
        if value[0] is not None:  # the snapshots that this rank sees
            return [value, [place for place in value if place[1] != self._lacks]]
        setback = next(self._setbacks, None)
        if isinstance(setback, ReplayMismatch):
            return [value, [[str(setback), setback.step], None]]
        return [value, [None, None if setback is None else asdict(setback)]]

    @contextmanager
    def together(self) -> Iterator[None]:
        yield


def found(
    run: Trained, company: Another, step: int | None = None, *, goes_back: bool = True
) -> RecoveredState:
    catalog = scan(RunFolder(run.run), [run.staging])
    return Search(catalog, step, goes_back=goes_back).run(ReplayOptions(), company)


def test_damage_that_another_rank_found_is_gone_around(closed: Trained) -> None:
    company = Another(Setback(snapshot=(0, 10)), Setback(snapshot=(0, 5)))
    state = found(closed, company, 11)
    assert (state.step, state.base_step) == (11, 0)
    assert company.planned == [11, 11, 11]
    assert same(dict(state.model_state_dict()), dict(closed.models[11]))


def test_where_a_step_does_not_replay_on_another_rank_all_end_before_it(closed: Trained) -> None:
    company = Another(Setback(snapshot=(0, 12)), Setback(last=8), Setback(last=7))
    state = found(closed, company)
    assert company.planned == [12, 12, 8, 7]
    assert (state.step, state.base_step) == (7, 5)
    assert same(dict(state.model_state_dict()), dict(closed.models[7]))


def test_where_no_candidate_is_left_the_damage_is_named(closed: Trained) -> None:
    company = Another(*(Setback(snapshot=(0, step)) for step in (10, 5, 0)))
    with pytest.raises(StepNotFound, match=r"snapshot 10, 5, 0, which leads there, is damaged"):
        found(closed, company, 11)


def test_a_snapshot_that_another_rank_does_not_see_is_none(closed: Trained) -> None:
    company = Another(lacks=10)
    state = found(closed, company, 11)
    assert (state.step, state.base_step) == (11, 5)


def test_a_step_that_does_not_replay_on_another_rank_is_the_same_error_here(
    closed: Trained,
) -> None:
    company = Another(ReplayMismatch("it rounds otherwise", step=8))
    with pytest.raises(ReplayMismatch, match="rank 1: it rounds otherwise") as caught:
        found(closed, company, 9, goes_back=False)
    assert caught.value.step == 8
