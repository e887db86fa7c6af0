from __future__ import annotations

import math
import re
from dataclasses import astuple, replace
from typing import Any

import pytest

from lowdiff.errors import ConfigError
from lowdiff.tuner import units
from lowdiff.tuner.choice import (
    Limits,
    Setting,
    is_allowed,
    recommend,
    stored_bytes,
    written_bytes_per_hour,
)  # fmt: skip
from lowdiff.tuner.costs import Costs, store_share, waste, writer_share
from lowdiff.tuner.failures import FailureRates
from tests.unit.tuner.jobs import CLUSTER, JOBS, LAPTOP, SLOW_DISK

LIMITS = {
    "none": Limits(),
    "little memory": Limits(staging_bytes=6.1e9),
    "little loss": Limits(loss_steps=12),
    "few bytes an hour": Limits(bytes_per_hour=2e15),
    "few bytes": Limits(total_bytes=4e14),
    "idle writer": Limits(writer_share=0.4),
}


@pytest.mark.cases(5)
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


def broken(costs: Costs, limits: Limits) -> str:
    """The only limit that cannot be kept."""
    (text,) = recommend(costs, FailureRates.known(4 * 3600.0), limits).broken
    return text


def test_each_limit_that_cannot_be_kept_is_explained_by_its_own_cause() -> None:
    # 0.9 MB in each step of 0.306 s.
    assert broken(LAPTOP, Limits(bytes_per_hour=1e9)) == (
        "1 GB may be written in an hour, but differentials alone are 10.6 GB; raise --per-hour or "
        "lower the density"
    )
    assert broken(LAPTOP, Limits(total_bytes=0.5e9)) == (
        "the run may hold 500 MB, but 3 snapshots alone take 720 MB; raise --total"
    )
    assert broken(LAPTOP, Limits(total_bytes=0.5e9, kept_snapshots=4)).startswith(
        "the run may hold 500 MB, but 5 snapshots alone take 1.2 GB"
    )
    assert broken(LAPTOP, Limits(total_bytes=720.5e6)) == (
        "the run may hold 720 MB, but 3 snapshots, a step apart, take 722 MB; raise --total"
    )
    slow_core = replace(LAPTOP, encode_seconds=0.5)
    assert broken(slow_core, Limits()) == (
        "the writer cannot keep up: compressing a step takes it 500 ms of a core, a step 306 ms; "
        "lower the density"
    )
    slow_disk = replace(LAPTOP, write_bytes_per_second=3e6)
    assert broken(slow_disk, Limits(loss_steps=8)) == (
        "the writer cannot keep up: even without snapshots differentials alone keep the disk busy "
        "for 98% of a step with b = 4, more than 80%; larger batches, more bandwidth or a lower "
        "density is needed"
    )


def test_several_causes_are_all_named() -> None:
    costs = replace(LAPTOP, encode_seconds=0.5)
    limits = Limits(bytes_per_hour=1e9, total_bytes=0.5e9)
    found = recommend(costs, FailureRates.known(3600.0), limits).broken
    assert [text.partition(" ")[0] for text in found] == ["the", "1", "the"]


def test_the_least_that_a_limit_may_be_is_enough() -> None:
    rates = FailureRates.known(3600.0)
    held = stored_bytes(LAPTOP, Limits(), 3)  # more often the disk does not take snapshots
    assert recommend(LAPTOP, rates, Limits(total_bytes=held)).setting.snapshot_every == 3
    differentials = 3600 / 0.306 * LAPTOP.differential_bytes
    assert not recommend(LAPTOP, rates, Limits(bytes_per_hour=1.01 * differentials)).broken


def test_a_writer_that_cannot_keep_up_is_not_said_to_keep_up() -> None:
    slow = replace(LAPTOP, write_bytes_per_second=3e6, encode_seconds=0.5)
    choice = recommend(slow, FailureRates.known(3600.0), Limits())
    assert choice.setting.batch_size == 1
    assert not any("keeps up" in reason for reason in choice.reasons)
    assert any(
        "b = 1: the writer is busy for 163% of a step, more than the 80% it should be" in reason
        for reason in choice.reasons
    )
    fine = recommend(LAPTOP, FailureRates.known(3600.0), Limits())
    assert "b = 1: the writer keeps up with every step by itself" in " ".join(fine.reasons)


@pytest.mark.parametrize("job", JOBS)
def test_the_formula_that_is_said_gives_the_number_that_is_said(job: str) -> None:
    costs, rates = JOBS[job]
    text = recommend(costs, rates, Limits()).reasons[0]
    assert text.startswith("f = sqrt(2 C (M + K) / (r (T + d))) = ")
    said = float(text.partition(") = ")[2].partition(":")[0].replace(",", ""))
    found = re.search(r"C = (.+?) of .+ M = (.+?), .+ K = (.+?), .+ r = (.+?), .+ = (.+)$", text)
    assert found is not None
    c, m, k, r, own = (units.seconds(figure.replace(",", "")) for figure in found.groups())
    assert math.sqrt(2 * c * (m + k) / (r * own)) == pytest.approx(said, rel=0.02)


def test_recoveries_that_take_next_to_nothing_are_said_rightly() -> None:
    quick = replace(LAPTOP, restart_seconds=0.0, load_seconds=0.0, replay_seconds=0.2)
    assert "K = -100 ms, " in recommend(quick, FailureRates.known(3600.0), Limits()).reasons[0]


def test_a_loss_without_bound_is_no_limit() -> None:
    rates = FailureRates.known(3600.0)
    free = recommend(LAPTOP, rates, Limits())
    assert recommend(LAPTOP, rates, Limits(loss_steps=10**400)).setting == free.setting


def test_failures_faster_than_restarts_cannot_progress() -> None:
    with pytest.raises(ConfigError, match="the job cannot progress"):
        recommend(CLUSTER, FailureRates.known(120.0), Limits())


@pytest.mark.parametrize(
    "wrong",
    [
        {"writer_share": 0},
        {"loss_steps": 1},
        {"loss_steps": 8.0},
        {"loss_steps": math.nan},
        {"loss_steps": True},
        {"total_bytes": -1},
        {"staging_bytes": 0},
        {"kept_snapshots": 0},
        {"kept_snapshots": 1.5},
        {"kept_snapshots": True},
    ],
    ids=str,
)
def test_limits_that_cannot_be_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Limits(**wrong)


def test_a_retention_says_how_many_snapshots_are_kept_if_it_says_a_number() -> None:
    limits = Limits(loss_steps=8, kept_snapshots=3)
    assert limits.with_snapshots(5) == Limits(loss_steps=8, kept_snapshots=5)
    assert limits.with_snapshots(None) == limits
