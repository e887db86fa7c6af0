"""Curves are fitted, and the interval for predicted lost steps costs least."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest

from lowdiff.errors import ConfigError
from lowdiff.tuner.lost_tail import (
    MIN_R_SQUARED,
    Interval,
    LossCurve,
    PredictedJob,
    PredictorCurve,
    calibrated,
    cost,
    excess_loss,
    interval_closed_form,
    planned_interval,
    young_interval,
)

#: Loss falls by 1 % in a thousand seconds; a failure every four hours; 100 million parameters.
JOB = PredictedJob(
    loss=LossCurve(a1=1e-5, a2=1.0, r_squared=0.99),
    predictor=PredictorCurve(tau1=0.05, tau2=-18.0, r_squared=0.99),
    num_parameters=1e8,
    failures_per_second=1 / 14400,
    save_seconds=2.0,
)
#: Falls much faster than failures come, so that B is positive.
FAST = replace(JOB, loss=LossCurve(a1=1e-3, a2=1.0, r_squared=0.99))

SWEEP = [
    PredictedJob(
        LossCurve(a1, 1.0, 0.99), PredictorCurve(tau1, tau2, 0.99), parameters, 1 / mtbf, save, xi
    )
    for a1, tau1, tau2, parameters, mtbf, save, xi in product(
        (1e-6, 1e-4, 1e-3),
        (0.01, 0.3),
        (-25.0, -14.0),
        (1e6, 1e9),
        (3600.0, 100_000.0),
        (0.5, 20.0),
        (0.1, 3.0),
    )
]


def cheapest(job: PredictedJob) -> float:
    """Return the best interval of a fine grid from one save to the mean time between failures."""
    grid = np.geomspace(job.save_seconds, 1 / job.failures_per_second, 4000)
    return float(grid[int(np.argmin([cost(job, float(t)) for t in grid]))])


def averaged_recovery(job: PredictedJob, interval: float) -> float:
    """Average the seconds to win a prediction's excess loss back over when the failure comes."""
    rate, a1 = job.failures_per_second, job.loss.a1
    times = np.linspace(0, 60 / rate, 400_001)
    log_error = job.predictor.tau2 - job.predictor.tau1 * times / interval
    log_slope = math.log(a1) + job.loss.a2 - a1 * times
    log_density = math.log(rate) - rate * times
    values = np.exp(log_density + log_error - log_slope) * job.xi * job.num_parameters / 2
    return float((values[1:] + values[:-1]).sum() / 2 * (times[1] - times[0]))


def test_a_curve_is_found_from_its_own_points() -> None:
    curve = LossCurve.fit([(step, math.exp(-0.002 * step + 1.5)) for step in range(0, 500, 50)])
    assert (curve.a1, curve.a2) == pytest.approx((0.002, 1.5))
    assert curve.r_squared == pytest.approx(1.0)
    predictor = PredictorCurve.fit([(1, math.exp(-3.5)), (2, math.exp(-4)), (4, math.exp(-5))])
    assert (predictor.tau1, predictor.tau2) == pytest.approx((0.5, -3.0))


def test_the_fit_is_that_of_least_squares_on_log_loss() -> None:
    rng = np.random.default_rng(3)
    steps = np.arange(40.0) * 7 + 1000
    losses = np.exp(-0.004 * steps + 2 + rng.normal(0, 0.3, 40))
    curve = LossCurve.fit([(float(s), float(x)) for s, x in zip(steps, losses, strict=True)])
    slope, offset = np.polyfit(steps, np.log(losses), 1)
    assert (curve.a1, curve.a2) == pytest.approx((-slope, offset))
    assert curve.r_squared == pytest.approx(np.corrcoef(steps, np.log(losses))[0, 1] ** 2)


def test_steps_far_from_zero_lose_no_digits() -> None:
    first = 1_000_000_000
    curve = LossCurve.fit([(first + n, math.exp(-0.5 * n)) for n in range(4)])
    assert curve.a1 == pytest.approx(0.5, rel=1e-9)
    assert curve.since(first).at(2) == pytest.approx(math.exp(-1.0), rel=1e-6)


def test_the_quality_of_a_fit_falls_with_noise_and_is_zero_without_a_trend() -> None:
    rng = np.random.default_rng(5)
    found = []
    for noise in (0.01, 0.3, 3.0):
        logs = -0.01 * np.arange(100) + rng.normal(0, noise, 100)
        found.append(LossCurve.fit([(n, math.exp(x)) for n, x in enumerate(logs)]).r_squared)
    assert found[0] > 0.99 > found[1] > MIN_R_SQUARED / 4 > found[2]
    flat = LossCurve.fit([(n, 0.3) for n in range(7)])
    assert (flat.a1, flat.r_squared) == (0.0, 0.0)
    assert flat.at(100) == pytest.approx(0.3)


@pytest.mark.parametrize("curve", [LossCurve, PredictorCurve])
@pytest.mark.parametrize(
    ("points", "message"),
    [
        ([], "at least 3 points, got 0"),
        ([(0, 1.0), (1, 0.5)], "at least 3 points, got 2"),
        ([(0, 1.0), (1, 0.0), (2, 0.2)], "positive and finite, got 0"),
        ([(0, 1.0), (1, -0.5), (2, 0.2)], "got -0.5"),
        ([(0, 1.0), (1, math.nan), (2, 0.2)], "got nan"),
        ([(0, math.inf), (1, 0.5), (2, 0.2)], "got inf"),
        ([(0, 1.0), (0, 0.5), (2, 0.2)], "ascend"),
        ([(0, 1.0), (3, 0.5), (2, 0.2)], "ascend"),
        ([(0, 1.0), (1, 0.5), (math.nan, 0.2)], "ascend"),
        ([(0, 1.0), (1, 0.5), (math.inf, 0.2)], "finite"),
    ],
)
def test_points_without_a_curve_are_refused(
    curve: type[LossCurve | PredictorCurve],
    points: list[tuple[float, float]],
    message: str,
) -> None:
    with pytest.raises(ConfigError, match=message):
        curve.fit(points)


def test_curves_change_their_units() -> None:
    loss = LossCurve(a1=0.01, a2=1.0, r_squared=0.9)
    assert loss.over_seconds(0.5).at(100 * 0.5) == pytest.approx(loss.at(100))
    assert loss.since(30).at(70) == pytest.approx(loss.at(100))
    predictor = PredictorCurve(tau1=0.1, tau2=-2.0, r_squared=0.9)
    assert predictor.per_save(5).at(4) == pytest.approx(predictor.at(20))
    for wrong in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(ConfigError, match="positive time"):
            loss.over_seconds(wrong)
        with pytest.raises(ConfigError, match="positive time"):
            predictor.per_save(wrong)


def test_a_loss_too_large_for_a_float_is_infinite() -> None:
    assert LossCurve(a1=-1.0, a2=0.0, r_squared=1.0).at(1000) == math.inf


@pytest.mark.parametrize("job", [JOB, FAST])
@pytest.mark.parametrize("interval", [5.0, 20.0, 45.0])
def test_the_cost_is_saving_and_the_average_over_failure_times(
    job: PredictedJob, interval: float
) -> None:
    expected = job.save_seconds / interval
    expected += job.failures_per_second * averaged_recovery(job, interval)
    assert cost(job, interval) == pytest.approx(expected, rel=1e-3)


def test_a_prediction_costs_what_its_excess_loss_takes_to_win_back() -> None:
    assert excess_loss(JOB, 0) == pytest.approx(0.5 * 1e8 * math.exp(-18))
    assert excess_loss(replace(JOB, xi=3.0), 40) == pytest.approx(
        3 * excess_loss(JOB, 0) * math.exp(-2)
    )


def test_the_closed_form_is_the_cheapest_of_a_fine_grid() -> None:
    inside = 0
    for job in SWEEP:
        found = planned_interval(job)
        if found.by == "Young":
            continue
        assert found.seconds == pytest.approx(cheapest(job), rel=0.03), job
        inside += found.by == "closed form"
        if found.by == "closed form":
            assert found.seconds == interval_closed_form(job)
    # The ends of the range are not all that was compared.
    assert inside > len(SWEEP) / 3


def test_young_is_taken_in_the_sweep_only_where_no_finite_cost_falls_to_a_minimum() -> None:
    youngs = [job for job in SWEEP if planned_interval(job).by == "Young"]
    assert youngs
    for job in youngs:
        longest = 1 / job.failures_per_second
        never_follows = math.isinf(cost(job, job.save_seconds))
        only_falls = cheapest(job) == pytest.approx(longest)
        assert never_follows or only_falls, job


def test_more_failures_and_cheaper_saves_shorten_the_interval() -> None:
    usual = interval_closed_form(JOB)
    assert interval_closed_form(replace(JOB, failures_per_second=1 / 3600)) < usual
    assert interval_closed_form(replace(JOB, save_seconds=0.5)) < usual
    assert interval_closed_form(replace(JOB, xi=4.0)) < usual
    better = replace(JOB.predictor, tau1=0.1)
    assert interval_closed_form(replace(JOB, predictor=better)) > usual


def test_the_reason_of_a_closed_form_is_said() -> None:
    found = planned_interval(JOB)
    assert found == Interval(interval_closed_form(JOB), "closed form", found.reason)
    assert "cost least" in found.reason


def test_a_predictor_that_does_not_keep_up_has_no_finite_cost() -> None:
    bound = FAST.predictor.tau1 / (FAST.loss.a1 - FAST.failures_per_second)
    assert math.isfinite(cost(FAST, bound * 0.99))
    assert cost(FAST, bound * 1.01) == math.inf
    assert interval_closed_form(FAST) < bound
    slow = replace(FAST, save_seconds=bound * 1.01)
    found = planned_interval(slow)
    assert found.by == "Young"
    assert found.seconds == young_interval(slow.failures_per_second, slow.save_seconds)
    assert "keeps up" in found.reason


def test_an_interval_shorter_than_a_save_becomes_the_save() -> None:
    job = replace(JOB, xi=1e4)
    assert interval_closed_form(job) < job.save_seconds
    found = planned_interval(job)
    assert (found.seconds, found.by) == (job.save_seconds, "clamped")
    assert "one save takes 2 s" in found.reason


def test_an_interval_longer_than_failures_are_apart_becomes_that() -> None:
    job = replace(JOB, predictor=replace(JOB.predictor, tau1=20.0, tau2=-30.0))
    job = replace(job, loss=replace(JOB.loss, a1=7e-5), failures_per_second=1 / 14400)
    assert 14400 < interval_closed_form(job) < math.inf
    found = planned_interval(job)
    assert found.seconds == pytest.approx(14400)
    assert found.by == "clamped"
    assert "apart" in found.reason


@pytest.mark.parametrize("curve", ["loss", "predictor"])
@pytest.mark.parametrize("r_squared", [MIN_R_SQUARED - 1e-6, 0.0, math.nan])
def test_a_poor_fit_gives_youngs_interval(curve: str, r_squared: float) -> None:
    poor: dict[str, Any] = {curve: replace(getattr(JOB, curve), r_squared=r_squared)}
    found = planned_interval(replace(JOB, **poor))
    assert found.seconds == pytest.approx(math.sqrt(2 * 2.0 * 14400))
    assert found.by == "Young"
    assert "R^2" in found.reason
    assert {"loss": "training", "predictor": "predictor"}[curve] in found.reason
    good: dict[str, Any] = {curve: replace(getattr(JOB, curve), r_squared=MIN_R_SQUARED)}
    assert planned_interval(replace(JOB, **good)).by == "closed form"
    assert planned_interval(replace(JOB, **good), min_r_squared=0.9).by == "Young"


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"loss": LossCurve(0.0, 1.0, 0.99)}, "training does not fall"),
        ({"loss": LossCurve(-1e-5, 1.0, 0.99)}, "training does not fall"),
        ({"predictor": PredictorCurve(0.0, -18.0, 0.99)}, "predictor does not fall"),
        ({"predictor": PredictorCurve(-0.1, -18.0, 0.99)}, "predictor does not fall"),
        ({"predictor": PredictorCurve(0.05, -60.0, 0.99)}, "denominator not positive"),
    ],
)
def test_without_a_closed_form_youngs_interval_is_taken(
    changed: dict[str, Any], reason: str
) -> None:
    job = replace(JOB, **changed)
    found = planned_interval(job)
    assert found.seconds == pytest.approx(240.0)
    assert found.by == "Young"
    assert reason in found.reason
    with pytest.raises(ConfigError, match="no interval"):
        interval_closed_form(job)


def test_a_loss_that_does_not_fall_wins_nothing_back() -> None:
    assert cost(replace(JOB, loss=LossCurve(0.0, 1.0, 0.99)), 60.0) == math.inf


def test_youngs_interval_is_clamped_as_well() -> None:
    # Of saves that take nearly the time between failures, Young's interval would be longer than that.
    job = replace(JOB, save_seconds=14000.0, loss=LossCurve(0.0, 1.0, 0.99))
    assert young_interval(job.failures_per_second, 14000.0) > 14400
    assert planned_interval(job).seconds == pytest.approx(14400)


def test_perfect_and_hopeless_predictions_overflow_nothing() -> None:
    perfect = replace(FAST, predictor=replace(FAST.predictor, tau2=-5000.0))
    assert planned_interval(perfect).by == "closed form"
    assert planned_interval(perfect).seconds == pytest.approx(0.05 / (1e-3 - 1 / 14400))
    hopeless = replace(FAST, predictor=replace(FAST.predictor, tau2=5000.0))
    assert interval_closed_form(hopeless) == 0.0
    assert planned_interval(hopeless).by == "Young"


def test_a_calibration_averages_logarithms() -> None:
    assert calibrated(0.3, [2.0, 5.0], [2.0, 5.0]) == pytest.approx(0.3)
    assert calibrated(0.3, [1.0, 1.0], [2.0, 0.5]) == pytest.approx(0.3)
    assert calibrated(1.0, [1.0, 1.0], [2.0, 8.0]) == pytest.approx(4.0)
    assert calibrated(1.0, [1.0], [16.0], weight=3) == pytest.approx(2.0)


def test_calibrating_bit_by_bit_equals_calibrating_at_once() -> None:
    modelled, observed = [1.0, 2.0, 3.0, 0.4], [0.7, 5.0, 3.3, 0.1]
    first = calibrated(1.0, modelled[:3], observed[:3])
    then = calibrated(first, [modelled[3] * first], observed[3:], weight=3)
    assert then == pytest.approx(calibrated(1.0, modelled, observed))


@pytest.mark.parametrize(
    ("xi", "modelled", "observed", "weight", "message"),
    [
        (0.0, [1.0], [1.0], 0.0, "xi must be positive"),
        (1.0, [], [], 0.0, "at least one"),
        (1.0, [1.0, 2.0], [1.0], 0.0, "got 2 and 1"),
        (1.0, [0.0], [1.0], 0.0, "modelled excess loss"),
        (1.0, [1.0], [-0.1], 0.0, "observed excess loss"),
        (1.0, [1.0], [math.nan], 0.0, "observed excess loss"),
        (1.0, [1.0], [1.0], -1.0, "weight"),
        (1.0, [1.0], [1.0], math.inf, "weight"),
    ],
)
def test_predictions_that_calibrate_nothing_are_refused(
    xi: float, modelled: list[float], observed: list[float], weight: float, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        calibrated(xi, modelled, observed, weight=weight)


@pytest.mark.parametrize("name", ["num_parameters", "failures_per_second", "save_seconds", "xi"])
@pytest.mark.parametrize("value", [0.0, -1.0, math.inf, math.nan])
def test_nonsense_is_refused(name: str, value: float) -> None:
    wrong: dict[str, Any] = {name: value}
    with pytest.raises(ConfigError, match=name):
        replace(JOB, **wrong)


@pytest.mark.parametrize(
    ("curve", "rate"),
    [("loss", "a1"), ("loss", "a2"), ("predictor", "tau1"), ("predictor", "tau2")],
)
def test_curves_that_are_not_finite_are_refused(curve: str, rate: str) -> None:
    broken: dict[str, Any] = {rate: math.nan}
    wrong: dict[str, Any] = {curve: replace(getattr(JOB, curve), **broken)}
    with pytest.raises(ConfigError, match=f"{rate} must be finite"):
        replace(JOB, **wrong)


def test_a_save_longer_than_failures_are_apart_is_refused() -> None:
    with pytest.raises(ConfigError, match="apart"):
        replace(JOB, save_seconds=14401.0)


@pytest.mark.parametrize("interval", [0.0, -1.0, math.inf, math.nan])
def test_an_interval_that_is_none_has_no_cost(interval: float) -> None:
    with pytest.raises(ConfigError, match="interval"):
        cost(JOB, interval)


def test_youngs_interval_takes_positive_numbers() -> None:
    with pytest.raises(ConfigError, match="failures_per_second"):
        young_interval(0.0, 1.0)
    with pytest.raises(ConfigError, match="save_seconds"):
        young_interval(1.0, -1.0)
