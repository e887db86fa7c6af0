"""Why a full snapshot is taken: a pure function of what a rank knows."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowdiff.commit.schedule import Situation, Why, decide

QUIET = Situation(
    rebases=False,
    is_due=False,
    is_kept=False,
    logs_steps=True,
    makes_images=False,
    asked=None,
    can_catch_up=False,
    is_last_chance=False,
    needs_image=False,
)
SITUATIONS = st.builds(
    Situation,
    rebases=st.booleans(),
    is_due=st.booleans(),
    is_kept=st.booleans(),
    logs_steps=st.booleans(),
    makes_images=st.booleans(),
    asked=st.sampled_from([None, *Why]),
    can_catch_up=st.booleans(),
    is_last_chance=st.booleans(),
    needs_image=st.booleans(),
)


@pytest.mark.parametrize(
    ("now", "why"),
    [
        (QUIET, None),
        (replace(QUIET, is_due=True), Why.INTERVAL),
        (replace(QUIET, is_due=True, is_kept=True), Why.KEPT),
        (replace(QUIET, rebases=True, is_due=True), Why.UNREPLAYABLE),
        (replace(QUIET, asked=Why.RANKS_APART), Why.RANKS_APART),
        (replace(QUIET, can_catch_up=True), Why.OWED),
        (replace(QUIET, is_last_chance=True), None),
        (replace(QUIET, is_last_chance=True, logs_steps=False), Why.PREEMPTED),
        (replace(QUIET, is_due=True, makes_images=True), None),
        (replace(QUIET, is_due=True, makes_images=True, can_catch_up=True), Why.OWED),
        (replace(QUIET, needs_image=True), Why.RING),
        (replace(QUIET, needs_image=True, is_due=True), Why.INTERVAL),
        (replace(QUIET, needs_image=True, can_catch_up=True), Why.OWED),
    ],
)
def test_each_reason_is_named(now: Situation, why: Why | None) -> None:
    assert decide(now) is why


@given(SITUATIONS)
def test_a_step_that_cannot_be_replayed_always_gets_its_snapshot(now: Situation) -> None:
    assert decide(replace(now, rebases=True)) is Why.UNREPLAYABLE


@given(SITUATIONS)
def test_what_is_asked_for_is_never_passed_over(now: Situation) -> None:
    assert decide(replace(now, asked=Why.OTHER_RANK)) is not None
