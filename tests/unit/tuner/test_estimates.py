from __future__ import annotations

import pytest

from lowdiff.tuner.costs import Estimate, slope_and_intercept


def test_one_hiccup_does_not_move_an_estimate() -> None:
    steady = [1.0 + 0.01 * (i % 10) for i in range(50)]
    before, after = Estimate.of(steady), Estimate.of([*steady, 1000.0])
    assert before is not None
    assert after is not None
    assert after.median == pytest.approx(before.median, abs=0.011)
    assert after.high < 1.2


def test_the_spread_is_the_middle_eighty_percent() -> None:
    found = Estimate.of([float(i) for i in range(101)])
    assert found == Estimate(50.0, 10.0, 90.0, 101)


def test_nothing_observed_is_no_estimate() -> None:
    assert Estimate.of([]) is None


def test_a_line_is_found_through_points_of_which_some_are_wild() -> None:
    xs = [float(x) for x in range(20)]
    ys = [3.0 + 0.5 * x for x in xs]
    ys[3], ys[11], ys[17] = 400.0, -9.0, 70.0
    line = slope_and_intercept(xs, ys)
    assert line is not None
    assert line == pytest.approx((0.5, 3.0))


def test_points_above_each_other_make_no_line() -> None:
    assert slope_and_intercept([2.0, 2.0], [1.0, 3.0]) is None
