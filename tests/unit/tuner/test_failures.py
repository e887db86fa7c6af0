from __future__ import annotations

import math

import numpy as np
import pytest

from lowdiff.errors import ConfigError
from lowdiff.tuner.failures import (
    FailureHistory,
    FailurePrior,
    FailureRates,
    estimate_rates,
    gamma_quantile,
)  # fmt: skip

HOUR = 3600.0


def test_without_history_the_prior_is_the_estimate() -> None:
    rates = estimate_rates(FailureHistory(0.0), FailurePrior(4 * HOUR, node_share=0.25))
    assert rates.total.mtbf_seconds == pytest.approx(4 * HOUR)
    assert rates.node.mtbf_seconds == pytest.approx(16 * HOUR)
    assert rates.total.low_seconds < 4 * HOUR < rates.total.high_seconds


def test_history_outweighs_the_prior_in_time() -> None:
    prior = FailurePrior(100 * HOUR)
    widths = []
    for failures in (0, 5, 500):
        history = FailureHistory(failures * HOUR, process=failures)
        rates = estimate_rates(history, prior)
        widths.append(rates.total.high_seconds / rates.total.low_seconds)
    assert rates.total.mtbf_seconds == pytest.approx((200 + 500) / 502 * HOUR)
    assert widths == sorted(widths, reverse=True)
    assert rates.node.mtbf_seconds > 100 * rates.process.mtbf_seconds


def test_kinds_add_up_and_the_unknown_count_as_the_worse() -> None:
    rates = estimate_rates(FailureHistory(50 * HOUR, 3, 1, 2), FailurePrior(10 * HOUR))
    assert (rates.process.failures, rates.node.failures, rates.total.failures) == (3, 3, 6)
    both = 1 / rates.process.mtbf_seconds + 1 / rates.node.mtbf_seconds
    assert 1 / both == pytest.approx(rates.total.mtbf_seconds)


def test_the_interval_holds_the_truth_as_often_as_it_says() -> None:
    rng = np.random.default_rng(1)
    truth, held = 2 * HOUR, 0
    for _ in range(400):
        count = int(rng.poisson(30 * HOUR / truth))
        found = estimate_rates(FailureHistory(30 * HOUR, process=count), None).total
        held += found.low_seconds <= truth <= found.high_seconds
    # Binomial: 0.90 of 400, four standard deviations.
    assert 336 <= held <= 384


@pytest.mark.parametrize("wrong", [math.nan, -0.1, 1.1])
def test_a_share_of_node_failures_that_cannot_be_is_refused(wrong: float) -> None:
    with pytest.raises(ConfigError, match="node_share"):
        FailureRates.known(HOUR, node_share=wrong)


@pytest.mark.parametrize("wrong", [math.nan, 0.0, -HOUR])
def test_a_time_between_failures_that_cannot_be_is_refused(wrong: float) -> None:
    with pytest.raises(ConfigError, match="MTBF"):
        FailureRates.known(wrong)


def test_a_larger_job_fails_more_often() -> None:
    history = FailureHistory(100 * HOUR, process=10)
    large = estimate_rates(history.scaled(8), None)
    assert large.total.mtbf_seconds * 8 == pytest.approx(
        estimate_rates(history, None).total.mtbf_seconds
    )


def test_neither_history_nor_prior_says_what_to_give() -> None:
    with pytest.raises(ConfigError, match="--mtbf 4h"):
        estimate_rates(FailureHistory(0.0), None)


@pytest.mark.parametrize("shape", [0.25, 1.0, 3.5, 40.0, 700.0])
def test_gamma_quantiles_are_those_of_drawn_numbers(shape: float) -> None:
    drawn = np.random.default_rng(0).gamma(shape, size=400_000)
    for q in (0.05, 0.5, 0.95):
        assert np.mean(drawn <= gamma_quantile(shape, q)) == pytest.approx(q, abs=0.003)


def test_a_kind_that_cannot_happen_never_does() -> None:
    rates = FailureRates.known(HOUR, node_share=0.0)
    assert rates.node.mtbf_seconds == math.inf
    found = estimate_rates(FailureHistory(0.0), FailurePrior(HOUR, node_share=0.0))
    assert found.node.mtbf_seconds == math.inf


@pytest.mark.parametrize(
    "wrong", [{"mtbf_seconds": 0}, {"mtbf_seconds": 1, "node_share": 2}, {"mtbf_seconds": math.nan}]
)
def test_a_prior_that_cannot_be_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        FailurePrior(**wrong)
