from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from lowdiff.errors import ConfigError
from lowdiff.tuner.choice import Limits, Setting, recommend
from lowdiff.tuner.costs import effective_share
from lowdiff.tuner.failures import FailureRates
from lowdiff.tuner.simulate import FailureModel, Simulated, Trace, draw_trace, simulate, trace_for
from lowdiff.tuner.strategies import (
    Recovery,
    Strategy,
    alternatives,
    checkfreq,
    just_in_time,
    lowdiff,
    no_checkpoints,
    periodic_full,
)  # fmt: skip
from tests.unit.tuner.jobs import CLUSTER, JOBS

DAYS = 86400.0
others_of = partial(alternatives, num_nodes=2048, network_bytes_per_second=10e9)


def run(
    strategy: Strategy, model: FailureModel, *, days: float, step: float, trials: int = 200
) -> Simulated:
    rng = np.random.default_rng(3)
    trace = trace_for(model, horizon_seconds=days * DAYS, trials=trials, rng=rng)
    return simulate(strategy, trace, useful_step_seconds=step, horizon_seconds=days * DAYS)


@pytest.mark.cases(6)
@pytest.mark.parametrize("setting", [Setting(20, 1), Setting(150, 6), Setting(2000, 40)])
@pytest.mark.parametrize("job", JOBS)
def test_the_simulator_agrees_with_the_closed_form(job: str, setting: Setting) -> None:
    costs, rates = JOBS[job]
    found = run(lowdiff(costs, setting), FailureModel.of(rates), days=40, step=costs.step_seconds)
    expected = effective_share(costs, rates, setting.snapshot_every, setting.batch_size)
    # Besides the Monte-Carlo error, a run begins with a snapshot and without a recovery.
    error = 4 * found.standard_error + 1e-3 * (1 - expected)
    assert found.effective_share == pytest.approx(expected, abs=error)


def test_without_checkpoints_only_the_time_since_the_last_failure_counts() -> None:
    mtbf, horizon = 1000.0, 5000.0
    gaps = np.random.default_rng(0).exponential(mtbf, (4000, 200))
    nothing = no_checkpoints(replace(CLUSTER, step_seconds=1.0, restart_seconds=0.0))
    trace = Trace(gaps, np.zeros(gaps.shape, np.int8))
    found = simulate(nothing, trace, useful_step_seconds=1.0, horizon_seconds=horizon)
    # The age of the last renewal at the horizon: the lesser of an exponential and the horizon.
    assert found.effective_share * horizon == pytest.approx(
        mtbf * -math.expm1(-horizon / mtbf), abs=4 * found.standard_error * horizon
    )


def test_periodic_snapshots_agree_with_daly() -> None:
    rates = FailureRates.known(6 * 3600.0)
    costs = replace(CLUSTER, step_seconds=1.0, write_latency_seconds=0.0, differential_seconds=0.0)
    strategy = periodic_full(costs, rates)
    found = run(strategy, FailureModel(6 * 3600.0), days=60, step=1.0)
    interval, stall = strategy.interval_steps, strategy.stall_seconds
    q = 1 / (6 * 3600.0)
    # Daly 2006, eq. 9: one interval of work with its snapshot, restarts included.
    taken = math.exp(q * strategy.node.fixed_seconds) / q * math.expm1(q * (interval + stall))
    assert found.effective_share == pytest.approx(
        interval / taken, abs=4 * found.standard_error + 2e-4
    )


def test_one_failure_is_counted_by_hand() -> None:
    process = Recovery(1, 0.0, 7.0, base_steps=10, replay_seconds=0.5)
    node = replace(process, grain_steps=4, lag_seconds=1.0)
    strategy = Strategy("by hand", "", 1.0, 2.0, 10, process, node, node)

    def after(seconds: float, kind: int) -> Simulated:
        trace = Trace(np.array([[seconds, 1e9]]), np.array([[kind, 0]], np.int8))
        return simulate(strategy, trace, useful_step_seconds=1.0, horizon_seconds=100.0)

    # 10 steps, 2 s of snapshot, 3.5 steps more: step 13 is staged, 3 steps after the snapshot.
    crash = after(15.5, kind=0)
    assert crash.lost_steps == 0.5
    assert crash.recovering * 100 == pytest.approx(7.0 + 3 * 0.5)
    # At 0.83 of a step a second, the writer is 0.83 of a step behind: 12 is durable.
    lost = after(15.5, kind=1)
    assert lost.lost_steps == 1.5
    assert lost.recovering * 100 == pytest.approx(7.0 + 2 * 0.5)
    # In the middle of the stall: all ten steps are there, but the snapshot is counted from them.
    stalled = after(11.0, kind=0)
    assert stalled.lost_steps == 0.0
    assert stalled.recovering * 100 == pytest.approx(7.0)


def test_a_failure_during_a_recovery_begins_it_anew() -> None:
    recovery = Recovery(1, 0.0, 10.0)
    strategy = Strategy("", "", 1.0, 0.0, math.inf, recovery, recovery, recovery)
    trace = Trace(np.array([[5.0, 4.0, 1e9]]), np.zeros((1, 3), np.int8))
    found = simulate(strategy, trace, useful_step_seconds=1.0, horizon_seconds=50.0)
    assert found.recovering * 50 == pytest.approx(4.0 + 10.0)
    assert found.effective_share * 50 == pytest.approx(50.0 - 14.0)


def test_shares_of_wall_time_add_up() -> None:
    costs, rates = JOBS["cluster"]
    for strategy in others_of(costs, rates):
        found = run(strategy, FailureModel.of(rates), days=54, step=costs.step_seconds)
        parts = found.stalls + found.recovering + found.lost
        assert found.effective_share + parts == pytest.approx(1.0, abs=0.01), strategy.name


def test_a_run_of_16384_gpus_for_54_days_is_ranked_as_expected() -> None:
    """The public figure of Llama 3: 466 interruptions in 54 days."""
    costs, rates = JOBS["cluster"]
    choice = recommend(costs, rates, Limits())
    model = FailureModel.of(rates)
    ours = run(lowdiff(costs, choice.setting), model, days=54, step=costs.step_seconds)
    assert ours.failures == pytest.approx(466, abs=6)
    others = {
        s.name: run(s, model, days=54, step=costs.step_seconds) for s in others_of(costs, rates)
    }
    assert others["no checkpoints"].effective_share < 0.01
    assert ours.effective_share > others["periodic full"].effective_share
    assert ours.effective_share > others["CheckFreq"].effective_share
    assert ours.effective_share > others["Gemini"].effective_share


def test_weibull_failures_come_as_often_but_in_clusters() -> None:
    rng = np.random.default_rng(0)
    clustered = draw_trace(FailureModel(100.0, shape=0.7), failures=500, trials=200, rng=rng)
    assert clustered.gaps.mean() == pytest.approx(100.0, rel=0.03)
    assert clustered.gaps.std() > 1.3 * 100.0


def test_losing_several_nodes_at_once_takes_what_only_their_memory_held() -> None:
    costs, rates = JOBS["cluster"]
    alone = FailureModel(rates.total.mtbf_seconds, 0.8, group_share=0.0)
    together = FailureModel(rates.total.mtbf_seconds, 0.8, group_share=0.5)
    jit = just_in_time(costs, num_nodes=2048)
    assert run(jit, alone, days=54, step=6.0).lost_steps < 1
    assert run(jit, together, days=54, step=6.0).lost_steps > 100


def test_on_one_node_no_replica_survives_its_loss() -> None:
    jit = just_in_time(CLUSTER, num_nodes=1)
    crashes, losses = (FailureModel(4 * 3600.0, share) for share in (0.0, 1.0))
    assert run(jit, crashes, days=54, step=6.0).lost_steps < 1
    assert run(jit, losses, days=54, step=6.0).lost_steps > 100


def test_a_checkpoint_counts_once_it_is_written() -> None:
    costs = replace(CLUSTER, snapshot_seconds=0.01, snapshot_bytes=60e9)
    strategy = checkfreq(costs)
    found = run(strategy, FailureModel(4 * 3600.0), days=54, step=6.0)
    # Half an interval, and the writing of one, which takes as long as an interval.
    assert found.lost_steps == pytest.approx(1.5 * strategy.interval_steps, rel=0.07)


def test_a_trace_that_is_too_short_is_refused() -> None:
    trace = draw_trace(FailureModel(10.0), failures=3, trials=2, rng=np.random.default_rng(0))
    with pytest.raises(ConfigError, match="longer"):
        simulate(no_checkpoints(CLUSTER), trace, useful_step_seconds=6.0, horizon_seconds=1e6)
