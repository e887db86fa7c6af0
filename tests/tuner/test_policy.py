from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from lowdiff.errors import ConfigError
from lowdiff.tuner.choice import Limits, Setting, recommend
from lowdiff.tuner.costs import Costs, waste, writer_share
from lowdiff.tuner.failures import FailureRates
from lowdiff.tuner.policy import BATCH_LEVELS, INTERVAL_LEVELS, Levels, Tuning, move
from tests.tuner.jobs import JOBS, LAPTOP

BOTH = (True, True)


def settle(
    levels: Levels, costs: Costs, rates: FailureRates, limits: Limits | None = None
) -> list[Levels]:
    """Follow the policy until it rests."""
    visited = [levels]
    for _ in range(60):
        found = move(visited[-1], costs, rates, limits or Limits(), tunes=BOTH)
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


@pytest.mark.parametrize("wrong", [{"mtbf_hours": 0}, {"every_steps": 0}, {"node_share": 3}])
def test_tuning_that_cannot_be_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        Tuning(**wrong)
