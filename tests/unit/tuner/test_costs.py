from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from lowdiff.errors import ConfigError
from lowdiff.tuner.costs import (
    batch_seconds,
    best_interval,
    effective_share,
    loop_seconds,
    lost_steps,
    replayed_steps,
    waste,
    without_residual,
    writer_share,
)  # fmt: skip
from lowdiff.tuner.failures import FailureRates
from lowdiff.tuner.strategies import published_optimum
from tests.unit.tuner.jobs import CLUSTER, JOBS, LAPTOP, SLOW_DISK


@pytest.mark.parametrize("job", ["laptop", "cluster"])
def test_the_closed_form_is_the_minimum_of_a_grid(job: str) -> None:
    costs, rates = JOBS[job]
    # A disk that is never the limit: with it the optimum is another, which choice.py finds.
    costs = replace(costs, write_bytes_per_second=1e13)
    grid = [(waste(costs, rates, f, 1).total, f) for f in range(1, 20_000)]
    least, best = min(grid)
    ideal = best_interval(costs, rates)
    assert ideal == pytest.approx(best, rel=0.01)
    assert waste(costs, rates, ideal, 1).total == pytest.approx(least, rel=1e-5)


def test_the_closed_form_is_the_designs() -> None:
    costs, rates = JOBS["cluster"]
    own = costs.step_seconds + costs.differential_seconds
    design = math.sqrt(
        2 * costs.snapshot_seconds * rates.total.mtbf_seconds / (costs.replay_seconds * own)
    )
    # Recoveries, in which nothing is snapshotted, make it a little longer.
    assert design < best_interval(costs, rates) < 1.02 * design


def test_without_failures_no_snapshot_is_worth_it() -> None:
    rates = FailureRates.known(math.inf)
    assert best_interval(LAPTOP, rates) == math.inf
    assert effective_share(LAPTOP, rates, 100, 1) == pytest.approx(
        LAPTOP.step_seconds / loop_seconds(LAPTOP, 100, 1)
    )


def test_each_cause_grows_with_what_causes_it() -> None:
    costs, rates = JOBS["laptop"]
    base = waste(costs, rates, 200, 4)
    dearer = {
        "differentials": replace(costs, differential_seconds=0.01),
        "snapshots": replace(costs, snapshot_seconds=0.2),
        "backpressure": replace(costs, write_bytes_per_second=2e6),
        "restarts": replace(costs, restart_seconds=20.0),
        "loads": replace(costs, load_seconds=3.0),
        "replay": replace(costs, replay_seconds=0.1),
        "lost_steps": replace(costs, write_latency_seconds=0.1),
    }
    for cause, changed in dearer.items():
        assert getattr(waste(changed, rates, 200, 4), cause) > getattr(base, cause), cause
    assert base.total == pytest.approx(sum(getattr(base, cause) for cause in dearer))
    assert base.seconds_per_hour == 3600 * base.total


def test_a_process_crash_takes_the_step_in_flight_and_a_node_the_batch_besides() -> None:
    for b in (1, 2, 16):
        process, node = lost_steps(CLUSTER, 100, b)
        behind = batch_seconds(CLUSTER, b) / loop_seconds(CLUSTER, 100, b)
        assert process == 0.5
        assert node == pytest.approx(0.5 + (b - 1) / 2 + behind)
    # Back-pressure keeps the guarantee, whatever the disk does.
    assert lost_steps(replace(SLOW_DISK, write_latency_seconds=1e6), 100, 4)[1] <= 8.5


def test_a_writer_that_does_not_keep_up_holds_training_back() -> None:
    assert writer_share(SLOW_DISK, 1000, 1) > 1
    assert loop_seconds(SLOW_DISK, 1000, 1) > SLOW_DISK.write_latency_seconds
    assert waste(SLOW_DISK, FailureRates.known(3600.0), 1000, 1).backpressure > 1
    assert writer_share(SLOW_DISK, 1000, 16) < 1
    assert waste(SLOW_DISK, FailureRates.known(3600.0), 1000, 16).backpressure == 0


def test_replay_covers_half_an_interval_and_what_passes_while_a_snapshot_is_written() -> None:
    writing = CLUSTER.snapshot_bytes / CLUSTER.write_bytes_per_second
    assert replayed_steps(CLUSTER, 101, 1) == pytest.approx(
        50 + writing / loop_seconds(CLUSTER, 101, 1)
    )


def test_the_effective_share_is_the_first_order_one_while_failures_are_rare() -> None:
    costs, _ = JOBS["cluster"]
    rates = FailureRates.known(30 * 86400.0)
    first_order = 1 / (1 + waste(costs, rates, 500, 2).total)
    assert effective_share(costs, rates, 500, 2) == pytest.approx(first_order, abs=1e-6)


def test_failures_within_every_restart_leave_nothing() -> None:
    assert effective_share(CLUSTER, FailureRates.known(0.3), 100, 1) == 0.0
    assert effective_share(CLUSTER, FailureRates.known(120.0), 100, 1) < 0.1


def test_the_published_optimum_is_the_minimum_of_the_published_model() -> None:
    write, merge, load, mtbf = 6e9 / 1.5e9, 0.8, 20.0, 4 * 3600.0

    def waste(full_per_second: float, batch_seconds: float) -> float:
        """(B/2 + R_F + (R_D/2)(1/(F B) - 1))/M + F S_F/W."""
        merges = merge / 2 * (1 / (full_per_second * batch_seconds) - 1)
        return (batch_seconds / 2 + load + merges) / mtbf + full_per_second * write

    frequency, batch = published_optimum(write, merge, mtbf)
    best = waste(frequency, batch)
    around = np.geomspace(0.5, 2.0, 41).tolist()
    others = [waste(frequency * x, batch * y) for x in around for y in around]
    assert best <= min(others) * (1 + 1e-12)
    assert waste(frequency * 1.3, batch) > best < waste(frequency, batch * 0.7)


def test_without_error_feedback_snapshots_are_as_much_cheaper_as_they_are_smaller() -> None:
    whole = replace(LAPTOP, residual_bytes=60e6)
    small = without_residual(whole)
    assert (small.snapshot_bytes, small.residual_bytes) == (180e6, 0.0)
    assert small.snapshot_seconds == pytest.approx(0.75 * LAPTOP.snapshot_seconds)
    assert small.load_seconds == pytest.approx(0.75 * LAPTOP.load_seconds)
    assert without_residual(LAPTOP) == LAPTOP


@pytest.mark.parametrize(
    "wrong",
    [
        {"step_seconds": 0},
        {"load_seconds": -1},
        {"replay_seconds": math.nan},
        {"encode_seconds": math.inf},
    ],
)
def test_costs_that_cannot_be_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        replace(LAPTOP, **wrong)
