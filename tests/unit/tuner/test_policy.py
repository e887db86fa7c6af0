from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from lowdiff.errors import ConfigError
from lowdiff.tuner.choice import (
    Limits,
    Setting,
    is_allowed,
    recommend,
    stored_bytes,
    written_bytes_per_hour,
)
from lowdiff.tuner.costs import Costs, waste, writer_share
from lowdiff.tuner.failures import FailureRates
from lowdiff.tuner.policy import BATCH_LEVELS, INTERVAL_LEVELS, Levels, Tuning, move
from tests.unit.tuner.jobs import JOBS, LAPTOP, SLOW_DISK

BOTH = (True, True)


def settle(
    levels: Levels,
    costs: Costs,
    rates: FailureRates,
    limits: Limits | None = None,
    tunes: tuple[bool, bool] = BOTH,
) -> list[Levels]:
    """Follow the policy until it rests."""
    visited = [levels]
    for _ in range(60):
        found = move(visited[-1], costs, rates, limits or Limits(), tunes=tunes)
        if found is None:
            return visited
        visited.append(found.levels)
    raise AssertionError(f"it never rests: {visited[-6:]}")


@pytest.mark.parametrize("job", JOBS)
@pytest.mark.parametrize("start", [Levels(0, 0), Levels(13, 4), Levels(30, 12)])
def test_it_comes_to_rest_near_the_best_wherever_it_begins(job: str, start: Levels) -> None:
    costs, rates = JOBS[job]
    setting = settle(start, costs, rates)[-1].setting
    best = recommend(costs, rates, Limits()).waste
    there = waste(costs, rates, setting.snapshot_every, setting.batch_size)
    fixed = best.differentials + best.restarts + best.loads
    # Within the hysteresis, of what depends on the setting, and of half a second an hour; and the
    # grid's own coarseness.
    assert there.total - best.total <= max(0.3 * (best.total - fixed), 1 / 3600)
    assert writer_share(costs, setting.snapshot_every, setting.batch_size) <= 0.8


def test_a_change_is_bounded() -> None:
    costs, rates = JOBS["slow disk"]
    visited = settle(Levels(2, 0), costs, rates)
    assert len(visited) > 3
    for before, after in pairwise(visited):
        assert abs(after.interval - before.interval) <= 2
        assert abs(after.batch - before.batch) <= 1


def test_a_small_gain_changes_nothing() -> None:
    costs, rates = JOBS["laptop"]
    rest = settle(Levels(13, 0), costs, rates)[-1]
    for factor in (0.9, 1.1):
        shaken = replace(costs, snapshot_seconds=costs.snapshot_seconds * factor)
        assert move(rest, shaken, rates, Limits(), tunes=BOTH) is None


def test_a_disk_ten_times_slower_is_followed_and_its_recovery_too() -> None:
    rates = FailureRates.known(3600.0)
    fast = replace(LAPTOP, write_bytes_per_second=50e6, write_latency_seconds=0.1)
    slow = replace(fast, write_bytes_per_second=5e6, write_latency_seconds=1.0)
    before = settle(Levels(13, 4), fast, rates)[-1]
    during = settle(before, slow, rates)[-1]
    assert during.batch > before.batch
    assert during.interval > before.interval
    setting = during.setting
    assert writer_share(slow, setting.snapshot_every, setting.batch_size) <= 0.8
    after = settle(during, fast, rates)[-1].setting
    there = waste(fast, rates, after.snapshot_every, after.batch_size)
    before_waste = waste(fast, rates, before.setting.snapshot_every, before.setting.batch_size)
    assert there.total <= before_waste.total * 1.1


def test_what_is_not_left_to_it_stays() -> None:
    costs, rates = JOBS["slow disk"]
    found = move(Levels(2, 0), costs, rates, Limits(), tunes=(True, False))
    assert found is not None
    assert found.levels.batch == 0
    found = move(Levels(2, 0), costs, rates, Limits(), tunes=(False, True))
    assert found is not None
    assert found.levels.interval == 2


def test_a_broken_limit_is_mended_even_if_it_costs() -> None:
    costs, rates = JOBS["laptop"]
    visited = settle(Levels(10, 8), costs, rates, Limits(loss_steps=8))
    assert visited[-1].setting.batch_size <= 4


@pytest.mark.parametrize("start", [Levels(0, 0), Levels(13, 4), Levels(30, 12)])
@pytest.mark.parametrize("total_bytes", [0.1e9, 0.8e9, 2e9, 2.2e9, 2.6e9])
@pytest.mark.parametrize("job", ["laptop", "slow disk"])
def test_a_limit_of_bytes_is_kept_or_if_none_can_keep_it_waste_decides(
    job: str, total_bytes: float, start: Levels
) -> None:
    costs, rates = JOBS[job]
    limits = Limits(total_bytes=total_bytes)
    best = recommend(costs, rates, limits)
    visited = settle(start, costs, rates, limits)
    rest = visited[-1].setting
    assert is_allowed(costs, limits, rest) != bool(best.broken)
    there = waste(costs, rates, rest.snapshot_every, rest.batch_size)
    fixed = best.waste.differentials + best.waste.restarts + best.waste.loads
    # Half an octave is as near as the grid comes to a limit.
    assert there.total - best.waste.total <= max(0.5 * (best.waste.total - fixed), 1 / 3600)
    assert 1 / 2 < rest.snapshot_every / best.setting.snapshot_every < 2
    assert rest.batch_size <= 64
    # On its way it goes hardly beyond where it began and where it is to be.
    assert max(v.interval for v in visited) <= max(start.interval, visited[-1].interval) + 2
    assert max(v.batch for v in visited) <= max(start.batch, Levels.near(Setting(1, 64)).batch)


@pytest.mark.parametrize(
    ("costs", "low", "high", "near"), [(LAPTOP, 50, 60, {45, 64}), (SLOW_DISK, 120, 126, {91, 128})]
)
@pytest.mark.parametrize("start", [Levels(0, 0), Levels(13, 4), Levels(30, 12)])
def test_where_the_grid_has_nothing_between_two_limits_it_rests_beside_them(
    costs: Costs, low: int, high: int, near: set[int], start: Levels
) -> None:
    limits = Limits(
        bytes_per_hour=written_bytes_per_hour(costs, low, 4096),
        total_bytes=stored_bytes(costs, Limits(), high),
    )
    rates = FailureRates.known(3600.0)
    best = recommend(costs, rates, limits)
    assert not best.broken
    assert low <= best.setting.snapshot_every <= high
    rest = settle(start, costs, rates, limits)[-1].setting
    assert rest.snapshot_every in near
    assert rest.batch_size <= 32


def test_limits_that_contradict_each_other_leave_it_in_peace_however_costs_flutter() -> None:
    costs, rates = JOBS["slow disk"]
    limits = Limits(total_bytes=2e9)
    levels, moves = Levels(13, 4), 0
    for look in range(60):
        factor = (0.95, 1.0, 1.05)[look % 3]
        shaken = replace(costs, write_bytes_per_second=costs.write_bytes_per_second * factor)
        found = move(levels, shaken, rates, limits, tunes=BOTH)
        if found is not None:
            levels, moves = found.levels, moves + 1
            assert any("no setting keeps all limits" in reason for reason in found.reasons)
    assert moves <= 6
    assert 256 <= levels.setting.snapshot_every <= 512
    assert levels.setting.batch_size in (8, 16)


def test_a_limit_that_only_what_is_fixed_could_keep_moves_nothing_else() -> None:
    costs, rates = JOBS["slow disk"]
    limits = Limits(total_bytes=2e9)  # at most 50 steps, and 362 are fixed
    rest = settle(Levels(17, 3), costs, rates, limits, tunes=(False, True))[-1]
    assert rest.setting.batch_size <= 16
    small = Limits(loss_steps=4)  # at most 2, and 16 are fixed
    rest = settle(Levels(13, 4), costs, rates, small, tunes=(True, False))[-1]
    free = settle(Levels(13, 4), costs, rates, Limits(), tunes=(True, False))[-1]
    assert rest == free


def test_memory_that_is_too_little_for_any_batch_makes_it_the_smallest() -> None:
    costs, rates = JOBS["laptop"]
    limits = Limits(staging_bytes=costs.snapshot_bytes)
    visited = settle(Levels(13, 4), costs, rates, limits)
    assert visited[-1].setting.batch_size == 1
    assert 256 <= visited[-1].setting.snapshot_every <= 512
    found = move(Levels(13, 4), costs, rates, limits, tunes=BOTH)
    assert found is not None
    assert any("no setting keeps all limits" in reason for reason in found.reasons)


def test_an_interval_beyond_the_grid_is_its_last_point() -> None:
    costs, rates = JOBS["laptop"]
    limits = Limits(bytes_per_hour=written_bytes_per_hour(costs, 60_000, 1))
    assert not recommend(costs, rates, limits).broken
    assert settle(Levels(13, 4), costs, rates, limits)[-1].interval == INTERVAL_LEVELS - 1


def test_a_move_says_why() -> None:
    costs, rates = JOBS["slow disk"]
    found = move(Levels(2, 0), costs, rates, Limits(), tunes=BOTH)
    assert found is not None
    text = "; ".join(found.reasons)
    assert "seconds per hour" in text
    assert "% busy" in text


def test_levels_are_found_for_any_setting() -> None:
    for level in range(INTERVAL_LEVELS):
        for batch in range(BATCH_LEVELS):
            near = Levels.near(Levels(level, batch).setting)
            assert near.setting == Levels(level, batch).setting
    assert Levels.near(Setting(10**9, 10**9)) == Levels(INTERVAL_LEVELS - 1, BATCH_LEVELS - 1)


@pytest.mark.parametrize(
    "wrong",
    [
        {"mtbf_hours": 0},
        {"every_steps": 0},
        {"every_steps": 1.5},
        {"every_steps": float("nan")},
        {"node_share": 3},
    ],
    ids=str,
)
def test_tuning_that_cannot_be_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        Tuning(**wrong)
