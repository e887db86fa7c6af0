"""Robust estimates: a median and its spread, which a single outlier does not move."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Estimate:
    """Estimate of a quantity, in the caller's unit.

    Attributes:
        median: The middle observation.
        low: First decile.
        high: Ninth decile.
        count: Number of observations; 0 for a value that was not measured.
        source: ``"measured"``, ``"given"`` or ``"assumed"``.
    """

    median: float
    low: float
    high: float
    count: int
    source: str = "measured"

    @classmethod
    def of(cls, samples: Sequence[float]) -> Estimate | None:
        """Return the estimate of some observations; None without any."""
        if not samples:
            return None
        low, median, high = np.quantile(np.asarray(samples, dtype=np.float64), [0.1, 0.5, 0.9])
        return cls(float(median), float(low), float(high), len(samples))

    @classmethod
    def stated(cls, value: float) -> Estimate:
        """Return a value that the user stated, or that follows from stated values alone."""
        return cls(value, value, value, 0, "given")

    @classmethod
    def assumed(cls, value: float) -> Estimate:
        """Return a value that was neither measured nor stated."""
        return cls(value, value, value, 0, "assumed")


def slope_and_intercept(xs: Sequence[float], ys: Sequence[float]) -> tuple[float, float] | None:
    """Fit a line through points, of which up to 29 % may be outliers; None if all share one x.

    Reference: Theil (1950), Sen (1968): the median of the slopes between all pairs.
    """
    x, y = np.asarray(xs, dtype=np.float64), np.asarray(ys, dtype=np.float64)
    first, second = np.triu_indices(len(x), 1)
    apart = x[first] != x[second]
    first, second = first[apart], second[apart]
    if not len(first):
        return None
    slope = float(np.median((y[second] - y[first]) / (x[second] - x[first])))
    return slope, float(np.median(y - slope * x))
