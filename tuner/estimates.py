"""Robust estimates: a median and its spread, which one hiccup does not move."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Estimate:
    """A quantity as measured, assumed or given, in the unit of whoever asks.

    Attributes:
        median: The middle observation.
        low: First decile.
        high: Ninth decile.
        count: Observations; 0 for a value that nobody measured.
        source: ``"measured"``, ``"given"`` or ``"assumed"``.
    """

    median: float
    low: float
    high: float
    count: int
    source: str = "measured"

    @classmethod
    def of(cls, samples: Sequence[float]) -> Estimate | None:
        """The estimate of some observations; None without any."""
        if not samples:
            return None
        low, median, high = np.quantile(np.asarray(samples, dtype=np.float64), [0.1, 0.5, 0.9])
        return cls(float(median), float(low), float(high), len(samples))

    @classmethod
    def given(cls, value: float) -> Estimate:
        """What the user said, or what follows from that alone."""
        return cls(value, value, value, 0, "given")

    @classmethod
    def assumed(cls, value: float) -> Estimate:
        """What nobody measured or said yet."""
        return cls(value, value, value, 0, "assumed")


def slope_and_intercept(xs: Sequence[float], ys: Sequence[float]) -> tuple[float, float] | None:
    """A line through points, at most 29 % of them wild; None if all share one x.

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
