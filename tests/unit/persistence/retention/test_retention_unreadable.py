"""A snapshot that cannot be read now may be complete: whatever it is, retention takes no more for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowdiff.persistence.retention.plan import Inventory, Kept, StoredSnapshot, plan_collection
from lowdiff.persistence.run.fences import Span
from lowdiff.persistence.run.journal import Pin
from lowdiff.types import Retention
from tests.unit.persistence.retained import ONE, names, planned, segment, snapshot


def unreadable(incarnation: int, step: int, **changes: Any) -> StoredSnapshot:
    return snapshot(incarnation, step, complete=False, unreadable=True, **changes)


SEGMENTS = [segment(0, first) for first in (1, 21, 41, 101, 201, 301)]


def test_it_stays_with_what_a_step_that_may_rest_on_it_needs() -> None:
    snapshots = [unreadable(0, 40), snapshot(0, 200), snapshot(0, 300), snapshot(0, 400)]
    plan = planned(ONE, snapshots, SEGMENTS, [Pin("best", 50, 0)], snapshots=2)
    segments = ["i0-s1.seg", "i0-s21.seg", "i0-s101.seg", "i0-s201.seg"]
    assert names(plan) == (["i0-s200"], segments)
    assert plan.kept[0] == Kept(40, 50, "pinned: best")
    assert plan.collected == ((0, 1, 40), (0, 51, 300))


def test_the_snapshot_before_it_stays_as_if_it_were_not_there() -> None:
    snapshots = [snapshot(0, 0), unreadable(0, 40), snapshot(0, 200), snapshot(0, 300)]
    plan = planned(ONE, snapshots, SEGMENTS, [Pin("best", 50, 0)], snapshots=1)
    assert names(plan) == (["i0-s200"], ["i0-s101.seg", "i0-s201.seg"])
    assert plan.kept[0] == Kept(0, 50, "pinned: best")


def test_it_is_not_counted_among_the_newest() -> None:
    snapshots = [snapshot(0, 100), snapshot(0, 200), unreadable(0, 300)]
    assert names(planned(ONE, snapshots, [], snapshots=2)) == ([], [])
    assert names(planned(ONE, snapshots, [], snapshots=1)) == (["i0-s100"], [])


def test_a_young_one_widens_the_window() -> None:
    others = [snapshot(0, 200), snapshot(0, 300)]
    policy: dict[str, Any] = {"now_seconds": 9500.0, "snapshots": 1, "age_hours": 1.0}
    assert names(planned(ONE, [unreadable(0, 100), *others], **policy)) == (["i0-s200"], [])
    plan = planned(ONE, [unreadable(0, 100, written_seconds=9000.0), *others], **policy)
    assert names(plan) == ([], [])
    assert plan.kept == (Kept(100, None, "the newest snapshots"),)


def test_no_good_one_goes_to_make_room_for_it() -> None:
    snapshots = [unreadable(0, 100), snapshot(0, 200), snapshot(0, 300)]
    assert names(planned(ONE, snapshots, [], snapshots=2, total_bytes=10)) == ([], [])


LIVES = [[Span(0, 1, 0, None)], [Span(0, 1, 0, 45), Span(1, 1, 45, None)]]
STATES = st.sampled_from(["none", "none", "whole", "whole", "unreadable", "unreadable"])


@st.composite
def inventories(draw: st.DrawFn) -> tuple[Inventory, Sequence[Pin]]:
    spans = draw(st.sampled_from(LIVES))
    snapshots, segments = [], []
    for number, first, last in [(0, 0, 60), (1, 45, 100)][: len(spans)]:
        steps = range(first, (last if len(spans) > 1 else 100) + 1, 5)
        for step in steps:
            state = draw(STATES)
            if state == "none":
                continue
            made = snapshot(number, step)
            is_unclear = state == "unreadable"
            snapshots.append(replace(made, complete=not is_unclear, unreadable=is_unclear))
        edges = sorted(draw(st.sets(st.integers(first + 1, steps[-1]), min_size=1, max_size=8)))
        segments += [segment(number, edge) for edge in edges]
    pins = draw(st.lists(st.integers(0, 100), max_size=3))
    owners = [0 if len(spans) == 1 or step <= 45 else 1 for step in pins]
    bases = tuple(draw(st.lists(st.integers(0, 100), max_size=1)))
    return (
        Inventory(tuple(spans), tuple(snapshots), tuple(segments), bases),
        [Pin(f"pin{step}", step, owner) for step, owner in zip(pins, owners, strict=True)],
    )


POLICIES = st.builds(
    Retention,
    snapshots=st.sampled_from([1, 2, 3, None]),
    every_steps=st.sampled_from([None, None, 7, 20]),
    age_hours=st.sampled_from([None, None, 0.01]),
    total_bytes=st.sampled_from([None, None, 15, 60]),
)


@pytest.mark.slow
@given(inventories(), POLICIES, st.integers(30, 140))
def test_nothing_goes_that_would_stay_if_it_could_be_read(
    made: tuple[Inventory, Sequence[Pin]], policy: Retention, now: int
) -> None:
    inventory, pins = made

    def gone(snapshots: Sequence[StoredSnapshot]) -> set[Path]:
        found = replace(inventory, snapshots=tuple(snapshots))
        plan = plan_collection(found, policy, pins, now_seconds=float(now))
        return {removal.path for removal in plan.removals}

    unclear = [s for s in inventory.snapshots if s.unreadable]
    went = gone(inventory.snapshots)
    assert went.isdisjoint(s.path for s in unclear)
    for truth in product([True, False], repeat=min(len(unclear), 4)):
        is_complete = dict(zip([s.path for s in unclear], truth, strict=False))
        known = [
            replace(s, complete=is_complete.get(s.path, True), unreadable=False)
            if s.unreadable
            else s
            for s in inventory.snapshots
        ]
        assert went <= gone(known)
