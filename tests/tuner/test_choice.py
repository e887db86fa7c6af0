from __future__ import annotations

from dataclasses import astuple, replace

import pytest

from lowdiff.errors import ConfigError
from lowdiff.tuner.choice import (
    Limits,
    Setting,
    is_allowed,
    recommend,
    stored_bytes,
    written_bytes_per_hour,
)  # fmt: skip
from lowdiff.tuner.costs import store_share, waste, writer_share
from lowdiff.tuner.failures import FailureRates
from tests.tuner.jobs import CLUSTER, JOBS, LAPTOP, SLOW_DISK

LIMITS = {
    "none": Limits(),
    "little memory": Limits(staging_bytes=6.1e9),
    "little loss": Limits(loss_steps=12),
    "few bytes an hour": Limits(bytes_per_hour=2e15),
    "few bytes": Limits(total_bytes=4e14),
    "idle writer": Limits(writer_share=0.4),
}


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("job", JOBS)
def test_the_choice_is_the_best_of_a_grid_of_what_is_allowed(job: str, limit: str) -> None:
    costs, rates = JOBS[job]
    limits = LIMITS[limit]
    choice = recommend(costs, rates, limits)
    grid = [
        waste(costs, rates, f, b).total
        for b in (*range(1, 25), 32, 64, 1024)
        for f in (*range(1, 400, 3), *range(400, 6000, 37))
        if is_allowed(costs, limits, Setting(f, b))
    ]
    if not grid:
        assert choice.broken
        return
    assert not choice.broken
    assert is_allowed(costs, limits, choice.setting)
    assert choice.waste.total <= min(grid) * (1 + 1e-9)


def test_the_writer_keeps_up_with_what_is_chosen() -> None:
    for costs, rates in JOBS.values():
        chosen = recommend(costs, rates, Limits()).setting
        assert writer_share(costs, chosen.snapshot_every, chosen.batch_size) <= 0.8 + 1e-9


def test_a_slow_disk_asks_for_larger_batches_and_rarer_snapshots() -> None:
    rates = FailureRates.known(3600.0)
    fast = recommend(LAPTOP, rates, Limits()).setting
    slower = replace(LAPTOP, write_bytes_per_second=5e6, write_latency_seconds=0.5)
    slow = recommend(slower, rates, Limits())
    assert slow.setting.batch_size > fast.batch_size
    assert slow.setting.snapshot_every > fast.snapshot_every
    assert any("keep up" in reason for reason in slow.reasons)


def test_storage_limits_bind_and_are_kept() -> None:
    rates = JOBS["cluster"][1]
    free = recommend(CLUSTER, rates, Limits())
    hourly = written_bytes_per_hour(CLUSTER, free.setting.snapshot_every, 1) / 2
    rarer = recommend(CLUSTER, rates, Limits(bytes_per_hour=hourly)).setting
    assert rarer.snapshot_every > free.setting.snapshot_every
    assert written_bytes_per_hour(CLUSTER, rarer.snapshot_every, rarer.batch_size) <= hourly * 1.001

    total = stored_bytes(CLUSTER, Limits(), free.setting.snapshot_every // 2)
    oftener = recommend(CLUSTER, rates, Limits(total_bytes=total))
    assert oftener.setting.snapshot_every == free.setting.snapshot_every // 2
    assert any("may hold" in reason for reason in oftener.reasons)


def test_a_store_must_keep_up_where_it_can() -> None:
    rates = FailureRates.known(600.0)
    free = recommend(LAPTOP, rates, Limits()).setting
    needs = LAPTOP.store_bytes_per_second
    assert needs == store_share(LAPTOP, *astuple(free)) == 0
    rate = LAPTOP.differential_bytes / LAPTOP.step_seconds
    slow = replace(LAPTOP, store_bytes_per_second=2.8 * rate)
    rarer = recommend(slow, rates, Limits())
    assert store_share(slow, *astuple(free)) > 0.8
    assert 0.79 < store_share(slow, *astuple(rarer.setting)) <= 0.8
    assert any("the store must keep up" in reason for reason in rarer.reasons)
    for share in (0.5, 1.0, 1.26, 2.0):  # of what differentials take: snapshots matter less
        hopeless = replace(LAPTOP, store_bytes_per_second=share * rate)
        assert recommend(hopeless, rates, Limits()).setting == free


def test_a_store_gives_way_to_what_the_user_allows() -> None:
    rates = JOBS["laptop"][1]
    total = stored_bytes(LAPTOP, Limits(), 60)
    slow = replace(LAPTOP, store_bytes_per_second=8e6)
    choice = recommend(slow, rates, Limits(total_bytes=total))
    assert (choice.broken, choice.setting.snapshot_every) == ((), 60)


def test_a_smaller_loss_means_smaller_batches() -> None:
    choice = recommend(SLOW_DISK, JOBS["slow disk"][1], Limits(loss_steps=20))
    assert choice.setting.batch_size <= 10


def test_limits_that_contradict_each_other_are_named() -> None:
    rates = JOBS["cluster"][1]
    limits = Limits(bytes_per_hour=1e14, total_bytes=3.2e14)
    choice = recommend(CLUSTER, rates, limits)
    assert len(choice.broken) == 1
    assert "may be written" in choice.broken[0]
    assert "may hold" in choice.broken[0]


@pytest.mark.parametrize("staged_bytes", [0.0, 6e6])
def test_memory_that_is_too_little_for_one_differential_is_named(staged_bytes: float) -> None:
    rates = JOBS["cluster"][1]
    costs = replace(CLUSTER, staged_bytes=staged_bytes)
    limits = Limits(staging_bytes=5e9)  # a snapshot alone has 6
    choice = recommend(costs, rates, limits)
    assert choice.setting.batch_size == 1
    assert len(choice.broken) == 1
    assert "at least 6" in choice.broken[0]
    assert "5 GB" in choice.broken[0]
    assert not any("fit into" in reason for reason in choice.reasons)
    assert not any(is_allowed(costs, limits, Setting(f, 1)) for f in (1, 100, 10_000))
    enough = Limits(staging_bytes=6e9 + 2 * staged_bytes)
    assert not recommend(costs, rates, enough).broken
    assert is_allowed(costs, enough, Setting(1000, 1))


def test_too_little_memory_is_named_beside_limits_that_contradict_each_other() -> None:
    limits = Limits(staging_bytes=5e9, bytes_per_hour=1e14, total_bytes=3.2e14)
    choice = recommend(CLUSTER, JOBS["cluster"][1], limits)
    assert len(choice.broken) == 2


def test_a_disk_too_slow_for_differentials_alone_is_named() -> None:
    slow = replace(LAPTOP, write_bytes_per_second=1e6)
    choice = recommend(slow, FailureRates.known(3600.0), Limits())
    assert "cannot keep up" in choice.broken[0]


def test_failures_faster_than_restarts_cannot_progress() -> None:
    with pytest.raises(ConfigError, match="the job cannot progress"):
        recommend(CLUSTER, FailureRates.known(120.0), Limits())


@pytest.mark.parametrize(
    "wrong", [{"writer_share": 0}, {"loss_steps": 1}, {"total_bytes": -1}, {"staging_bytes": 0}]
)
def test_limits_that_cannot_be_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigError):
        Limits(**wrong)
