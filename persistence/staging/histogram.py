"""Histograms with equal cost at every step: fixed exponential buckets and three numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

#: Number of buckets, for quantities from ``first`` to ``first * 2 ** (BUCKETS - 2)``; larger ones
#: are counted in the last bucket.
BUCKETS = 32


@dataclass(frozen=True, slots=True)
class HistogramValue:
    """Content of a histogram at one moment.

    Attributes:
        first: Inclusive upper bound of the first bucket; each further bound is twice as large.
        counts: Observations per bucket, ``BUCKETS`` of them; the last has no upper bound.
        sum: Sum of all observations.
        max: The largest observation, 0 before the first.
    """

    first: float
    counts: tuple[int, ...]
    sum: float
    max: float

    @property
    def count(self) -> int:
        """Return the number of observations."""
        return sum(self.counts)

    @property
    def bounds(self) -> tuple[float, ...]:
        """Return the inclusive upper bounds of the buckets."""
        return (*(self.first * 2.0**i for i in range(BUCKETS - 1)), math.inf)

    def quantile(self, q: float) -> float:
        """Estimate a quantile to within a factor of two; return 0 without observations.

        Values below ``first`` are known less exactly: they lie between 0 and ``first``.
        """
        wanted = q * self.count
        seen = 0
        low = 0.0
        for bound, count in zip(self.bounds, self.counts, strict=True):
            if count and seen + count >= wanted:
                high = min(bound, self.max)
                return low + (high - low) * max(0.0, wanted - seen) / count
            seen += count
            low = bound
        return 0.0

    def document(self) -> dict[str, Any]:
        """Return plain values; ``buckets`` are ``(upper bound, observations up to it)`` pairs."""
        total = 0
        buckets = []
        for bound, count in zip(self.bounds, self.counts, strict=True):
            total += count
            buckets.append((bound, total))
        return {
            "count": total,
            "sum": self.sum,
            "max": self.max,
            "p50": self.quantile(0.5),
            "p90": self.quantile(0.9),
            "p99": self.quantile(0.99),
            "buckets": buckets,
        }


class Histogram:
    """Counts observations. One thread observes; others may read ``value()``."""

    def __init__(self, start: HistogramValue) -> None:
        self._first = start.first
        self._counts = list(start.counts)
        self._sum = start.sum
        self._max = start.max

    def observe(self, quantity: float) -> None:
        """Add one observation, which is not negative."""
        mantissa, exponent = math.frexp(quantity / self._first)
        # An exact power of two belongs to the bucket that ends at this bound.
        index = exponent - (mantissa == 0.5)
        self._counts[min(max(index, 0), BUCKETS - 1)] += 1
        self._sum += quantity
        self._max = max(self._max, quantity)

    def value(self) -> HistogramValue:
        """Return the observations so far."""
        return HistogramValue(self._first, tuple(self._counts), self._sum, self._max)


#: Empty, for durations from a microsecond; those over 18 minutes share the last bucket.
SECONDS = HistogramValue(1e-6, (0,) * BUCKETS, 0.0, 0.0)
#: Empty, for sizes from 64 bytes; those over 64 GiB share the last bucket.
BYTES = HistogramValue(64.0, (0,) * BUCKETS, 0.0, 0.0)
#: Empty, for numbers of steps.
STEPS = HistogramValue(1.0, (0,) * BUCKETS, 0.0, 0.0)
