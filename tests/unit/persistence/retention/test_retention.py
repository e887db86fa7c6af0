"""Retention frees what is old and never what the newest recoverable step needs."""

from __future__ import annotations

from typing import Any

import pytest

from lowdiff.errors import ConfigError
from lowdiff.persistence.retention.plan import CollectionPlan, Kept
from lowdiff.persistence.run.fences import Span
from lowdiff.persistence.run.journal import Pin
from lowdiff.types import Retention
from tests.unit.persistence.retained import (
    ONE,
    SEGMENTS,
    SNAPSHOTS,
    names,
    planned,
    segment,
    snapshot,
)


def test_the_newest_snapshots_stay_with_the_differentials_after_the_oldest_of_them() -> None:
    plan = planned(ONE, SNAPSHOTS, SEGMENTS, snapshots=2)
    assert names(plan) == (["i0-s0"], ["i0-s1.seg", "i0-s51.seg"])
    assert plan.kept == (Kept(100, None, "the newest snapshots"),)
    assert plan.collected == ((0, 1, 100),)
    assert (plan.bytes_removed, plan.bytes_kept) == (12, 23)
    assert names(planned(ONE, SNAPSHOTS, SEGMENTS, snapshots=1)) == (
        ["i0-s0", "i0-s100"],
        ["i0-s1.seg", "i0-s51.seg", "i0-s101.seg", "i0-s151.seg"],
    )


def test_nothing_goes_while_there_are_not_more_snapshots_than_to_be_kept() -> None:
    for policy in ({"snapshots": 3}, {"snapshots": 4}, {"snapshots": None}):
        assert planned(ONE, SNAPSHOTS, SEGMENTS, **policy).removals == ()
    assert planned([], [], [], snapshots=1) == CollectionPlan()
    assert planned([], SNAPSHOTS, SEGMENTS, snapshots=1).removals == ()


def test_a_segment_that_reaches_beyond_the_oldest_kept_snapshot_stays() -> None:
    segments = [segment(0, 1), segment(0, 102), segment(0, 201)]
    assert names(planned(ONE, SNAPSHOTS, segments)) == (["i0-s0"], [])


def test_the_newest_segment_of_the_newest_incarnation_always_stays() -> None:
    assert names(planned(ONE, SNAPSHOTS, [segment(0, 1)], snapshots=1))[1] == []


def test_segments_of_an_earlier_life_end_where_the_later_one_begins() -> None:
    spans = [Span(0, 1, 0, 150), Span(1, 1, 150, None)]
    segments = [segment(0, 1), segment(0, 101), segment(1, 151)]
    snapshots = [snapshot(0, 100), snapshot(1, 200), snapshot(1, 300)]
    assert names(planned(spans, snapshots, segments, snapshots=3))[1] == ["i0-s1.seg"]
    plan = planned(spans, snapshots, segments, snapshots=2)
    assert names(plan)[1] == ["i0-s1.seg", "i0-s101.seg"]
    assert plan.collected == ((0, 1, 150), (1, 151, 200))


def test_snapshots_off_the_lineage_are_never_counted_as_kept() -> None:
    # Life 1 rewound to 100: what life 0 saved at 200 and 300 is void.
    spans = [Span(0, 1, 0, 100), Span(1, 1, 100, None)]
    snapshots = [snapshot(0, 100), snapshot(0, 200), snapshot(0, 300)]
    assert names(planned(spans, snapshots, [segment(0, 1)])) == ([], [])
    snapshots.append(snapshot(1, 200))
    assert names(planned(spans, snapshots, [segment(0, 1)])) == ([], ["i0-s1.seg"])
    snapshots.append(snapshot(1, 350))
    assert names(planned(spans, snapshots, [segment(0, 1)]))[0] == ["i0-s100"]
    assert names(planned(spans, snapshots, [segment(0, 1)], snapshots=1))[0] == [
        "i0-s100",
        "i0-s200",
        "i1-s200",
        "i0-s300",
    ]


def test_two_snapshots_of_one_step_count_once() -> None:
    spans = [Span(0, 1, 0, 100), Span(1, 1, 100, None)]
    snapshots = [snapshot(0, 50), snapshot(0, 100), snapshot(1, 100)]
    assert planned(spans, snapshots).removals == ()


def test_what_a_crash_left_of_older_snapshots_goes_too() -> None:
    leftovers = [snapshot(0, 50, complete=False), snapshot(0, 250, complete=False)]
    assert names(planned(ONE, SNAPSHOTS + leftovers))[0] == ["i0-s0", "i0-s50"]


def test_what_is_being_written_is_left_alone() -> None:
    # Life 1 begins afresh: its first snapshot, of step 0, is not complete yet.
    beginning = [snapshot(1, 0, complete=False), snapshot(1, 50)]
    plan = planned(ONE, SNAPSHOTS + beginning, [segment(1, 1), segment(1, 20)], snapshots=1)
    assert names(plan) == (["i0-s0", "i0-s100"], [])
    # Life 1 went back to 20, and is about to complete its first snapshot.
    spans = [Span(0, 1, 0, 20), Span(1, 1, 20, None)]
    snapshots = [snapshot(0, 0), snapshot(0, 10), snapshot(0, 20), snapshot(1, 15, complete=False)]
    assert names(planned(spans, snapshots, snapshots=1))[0] == ["i0-s0", "i0-s10"]


def test_the_step_an_incarnation_is_about_to_begin_from_stays() -> None:
    plan = planned(ONE, SNAPSHOTS, SEGMENTS, snapshots=1, bases=(60,))
    assert names(plan) == (["i0-s100"], ["i0-s101.seg", "i0-s151.seg"])


# The other rules


def test_every_kth_step_stays_with_the_snapshot_before_it() -> None:
    plan = planned(ONE, SNAPSHOTS, SEGMENTS, snapshots=1, every_steps=40)
    assert [(k.first, k.last) for k in plan.kept] == [(0, 80), (100, 160), (200, None)]
    assert plan.collected == ((0, 81, 100), (0, 161, 200))
    assert plan.removals == ()  # each segment has a step that is needed


def test_a_snapshot_at_a_kth_step_stays_alone() -> None:
    plan = planned(ONE, SNAPSHOTS, SEGMENTS, snapshots=1, every_steps=100)
    assert [(k.first, k.last) for k in plan.kept] == [(100, 100), (200, None)]
    assert names(plan) == (
        ["i0-s0"],
        ["i0-s1.seg", "i0-s51.seg", "i0-s101.seg", "i0-s151.seg"],
    )


def test_a_pinned_step_stays_with_what_leads_to_it() -> None:
    plan = planned(ONE, SNAPSHOTS, SEGMENTS, [Pin("best", 70, 0)], snapshots=1)
    assert names(plan) == (["i0-s100"], ["i0-s101.seg", "i0-s151.seg"])
    assert plan.kept[0] == Kept(0, 70, "pinned: best")
    pins = [Pin("a", 100, 0), Pin("b", 120, 0)]
    plan = planned(ONE, SNAPSHOTS, SEGMENTS, pins, snapshots=1)
    assert names(plan) == (["i0-s0"], ["i0-s1.seg", "i0-s51.seg", "i0-s151.seg"])
    assert plan.kept[0] == Kept(100, 120, "pinned: a; pinned: b")


def test_a_pin_of_a_step_that_the_run_went_back_before_keeps_nothing() -> None:
    spans = [Span(0, 1, 0, 50), Span(1, 1, 50, None)]
    snapshots = [snapshot(0, 0), snapshot(1, 100), snapshot(1, 200)]
    segments = [segment(0, 1), segment(0, 51), segment(1, 51), segment(1, 101), segment(1, 201)]
    void, valid = Pin("x", 70, 0), Pin("x", 70, 1)
    assert len(planned(spans, snapshots, segments, [void], snapshots=1).kept) == 1
    plan = planned(spans, snapshots, segments, [valid], snapshots=1)
    assert plan.kept[0] == Kept(0, 70, "pinned: x")
    assert [str(r.path) for r in plan.removals] == ["i1-s100", "r0/i0-s51.seg", "r0/i1-s101.seg"]


def test_young_snapshots_stay_and_the_newest_do_whatever_their_age() -> None:
    hour = 3600.0
    snapshots = [snapshot(0, s, written_seconds=s * hour) for s in (0, 1, 2, 3, 4)]
    for age_hours, now, oldest in ((2.5, 4, 2), (0.1, 4, 4), (0.1, 1000, 4), (100, 4, 0)):
        plan = planned(ONE, snapshots, snapshots=1, age_hours=age_hours, now_seconds=now * hour)
        assert plan.kept == (Kept(oldest, None, "the newest snapshots"),)
    # A clock that jumps back makes everything young.
    assert planned(ONE, snapshots, snapshots=1, age_hours=1, now_seconds=-9e9).removals == ()


def test_the_window_shrinks_until_all_fits() -> None:
    # 3 snapshots of 10 bytes, 5 segments of 1.
    for limit, oldest in ((35, 0), (34, 100), (23, 100), (22, 200), (11, 200), (1, 200)):
        plan = planned(ONE, SNAPSHOTS, SEGMENTS, snapshots=None, total_bytes=limit)
        assert plan.kept[-1].first == oldest, limit
    assert plan.bytes_kept == 11
    plan = planned(ONE, SNAPSHOTS, SEGMENTS, [Pin("x", 0, 0)], snapshots=3, total_bytes=1)
    assert names(plan)[0] == ["i0-s100"]


def test_what_is_void_goes_first_when_space_is_short() -> None:
    spans = [Span(0, 1, 0, 100), Span(1, 1, 100, None)]
    snapshots = [snapshot(0, 0), snapshot(0, 100), snapshot(0, 200), snapshot(1, 150)]
    segments = [segment(0, 1), segment(0, 101), segment(1, 101), segment(1, 151)]
    plan = planned(spans, snapshots, segments, snapshots=3, total_bytes=43)
    assert names(plan) == (["i0-s200"], ["i0-s101.seg"])
    assert {r.reason for r in plan.removals} == {"void: the run went back before it"}


@pytest.mark.parametrize(
    "policy",
    [
        {"snapshots": 0},
        {"every_steps": 0},
        {"age_hours": 0},
        {"age_hours": float("nan")},
        {"total_bytes": 0},
    ],
    ids=str,
)
def test_a_policy_that_cannot_work_is_refused(policy: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=str(next(iter(policy.values())))):
        Retention(**policy)
