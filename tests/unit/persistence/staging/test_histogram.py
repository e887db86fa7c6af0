"""Histograms: every observation in its bucket, and quantiles within a factor of two."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowdiff.persistence.staging.measurements import (
    BUCKETS,
    BYTES,
    SECONDS,
    STEPS,
    Histogram,
    HistogramValue,
)


def observed(quantities: list[float], start: HistogramValue = STEPS) -> HistogramValue:
    histogram = Histogram(start)
    for quantity in quantities:
        histogram.observe(quantity)
    return histogram.value()


@given(st.lists(st.floats(0.0, 1e13), max_size=50), st.sampled_from([SECONDS, BYTES, STEPS]))
def test_every_observation_is_in_the_bucket_of_its_bound(
    quantities: list[float], start: HistogramValue
) -> None:
    found = observed(quantities, start)
    total = 0
    for bound, count in zip(found.bounds, found.counts, strict=True):
        total += count
        # Decimal bounds are rounded: an observation on one may fall either side.
        near = sum(math.isclose(q, bound, rel_tol=1e-9) for q in quantities)
        assert abs(sum(q <= bound for q in quantities) - total) <= near
    assert found.count == total == len(quantities)
    assert found.max == max(quantities, default=0.0)
    assert found.sum == pytest.approx(sum(quantities))


def test_bounds_double_and_include_their_own_value() -> None:
    found = observed([0, 1, 2, 2.5, 4, 2.0**30, 2.0**31])
    assert found.bounds[:4] == (1, 2, 4, 8)
    assert found.counts[:4] == (2, 1, 2, 0)
    assert found.counts[-2:] == (1, 1)
    assert len(found.counts) == BUCKETS
    assert found.bounds[-1] == math.inf


@pytest.mark.parametrize("q", [0.01, 0.5, 0.9, 0.99, 1.0])
def test_quantiles_are_within_a_factor_of_two(q: float) -> None:
    quantities = np.random.default_rng(3).lognormal(-5, 2, 5000).tolist()
    estimate = observed(quantities, SECONDS).quantile(q)
    true = float(np.quantile(quantities, q))
    assert true / 2 <= estimate <= true * 2
    assert observed(quantities, SECONDS).quantile(1.0) <= max(quantities)


def test_an_empty_histogram_says_zero() -> None:
    document = SECONDS.document()
    assert (document["count"], document["p50"], document["max"]) == (0, 0.0, 0.0)


def test_a_histogram_goes_on_from_a_value() -> None:
    again = Histogram(observed([1.0, 3.0]))
    again.observe(100.0)
    assert again.value() == observed([1.0, 3.0, 100.0])
