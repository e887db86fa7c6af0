from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowdiff.errors import ConfigError
from lowdiff.tuner import SnapshotCosts, best_interval, wasted_share

durations = st.floats(1e-3, 1e3)


@given(durations, durations, st.floats(1e-4, 1e2), st.floats(1e2, 1e6), st.floats(0, 100))
def test_no_neighbouring_interval_wastes_less(
    step: float, snapshot: float, replay: float, failure: float, load: float
) -> None:
    costs = SnapshotCosts(step, snapshot, replay, failure, load)
    best = best_interval(costs)
    for other in (best - 1, best + 1, best // 2, 2 * best, 10 * best):
        assert wasted_share(costs, best) <= wasted_share(costs, max(1, other)) * (1 + 1e-9)


def test_the_worked_example_of_the_design() -> None:
    # 0.2 s of stall, a failure every 4 h, 25 ms of replay, steps of 0.3 s.
    assert best_interval(SnapshotCosts(0.3, 0.2, 0.025, 14400)) == 876


def test_a_duration_that_is_not_positive_is_refused() -> None:
    with pytest.raises(ConfigError, match="step_seconds must be positive, got 0"):
        SnapshotCosts(0, 1, 1, 1)
