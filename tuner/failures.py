"""Failure rates as a Bayesian estimate: the job's own failures combined with the user's prior."""

from __future__ import annotations

import math
from dataclasses import dataclass

from lowdiff.errors import ConfigError

#: Staging survived; staging was lost; not known, for which the worse is assumed.
KINDS = ("process", "node", "unknown")

#: Weight without a prior: half a failure before the first second (Jeffreys).
_JEFFREYS = 0.5


@dataclass(frozen=True, slots=True)
class FailurePrior:
    """Expected failures before the run has failed often enough to estimate them.

    Attributes:
        mtbf_seconds: Mean time between failures of the whole job, of all kinds.
        weight_failures: Number of observed failures that have the same weight as this prior.
        node_share: Share of failures that lose staging memory, in [0, 1].

    Raises:
        ConfigError: If a value is out of range.
    """

    mtbf_seconds: float
    weight_failures: float = 2.0
    node_share: float = 0.5

    def __post_init__(self) -> None:
        if not 0 < self.mtbf_seconds < math.inf:
            raise ConfigError(f"the MTBF must be positive, got {self.mtbf_seconds} s")
        if not 0 < self.weight_failures < math.inf:
            raise ConfigError(f"a prior weighs more than 0 failures, got {self.weight_failures}")
        _check_share(self.node_share)


def _check_share(node_share: float) -> None:
    if not 0 <= node_share <= 1:
        raise ConfigError(f"node_share is a share, 0 to 1, got {node_share}")


@dataclass(frozen=True, slots=True)
class FailureHistory:
    """Failures of one job.

    Attributes:
        exposure_seconds: Time in which failures could happen: of all incarnations, attach to end.
        process: Failures that staging memory survived.
        node: Failures that lost staging memory.
        unknown: Failures of unknown kind.
    """

    exposure_seconds: float
    process: int = 0
    node: int = 0
    unknown: int = 0

    @property
    def failures(self) -> int:
        """Return the number of failures of all kinds."""
        return self.process + self.node + self.unknown

    def scaled(self, factor: float) -> FailureHistory:
        """Return the expected failures of a job ``factor`` times as large."""
        return FailureHistory(self.exposure_seconds / factor, self.process, self.node, self.unknown)


@dataclass(frozen=True, slots=True)
class Rate:
    """Posterior of one kind's mean time between failures.

    Attributes:
        mtbf_seconds: One over the posterior mean of the rate; inf if it never happens.
        low_seconds: Lower end of the 90 % credible interval.
        high_seconds: Upper end of this interval.
        failures: Number of observed failures.
    """

    mtbf_seconds: float
    low_seconds: float
    high_seconds: float
    failures: int


@dataclass(frozen=True, slots=True)
class FailureRates:
    """Failure rates that the cost model uses.

    Attributes:
        process: Failures that staging memory survives.
        node: Failures that lose staging memory, and failures of unknown kind.
        total: All failures.
    """

    process: Rate
    node: Rate
    total: Rate

    @classmethod
    def known(cls, mtbf_seconds: float, *, node_share: float = 0.5) -> FailureRates:
        """Return exactly known rates, for plans and tests.

        Raises:
            ConfigError: If a value is out of range; an infinite MTBF means that the job never
                fails.
        """
        if not mtbf_seconds > 0:
            raise ConfigError(f"the MTBF must be positive, got {mtbf_seconds} s")
        _check_share(node_share)
        kinds = (
            math.inf if not share else mtbf_seconds / share
            for share in (1 - node_share, node_share)
        )
        return cls(*(Rate(m, m, m, 0) for m in (*kinds, mtbf_seconds)))


def estimate_rates(history: FailureHistory, prior: FailurePrior | None) -> FailureRates:
    """Return posterior rates: a gamma prior per rate and Poisson failures give a gamma posterior.

    A prior of mean time ``M_0`` and weight ``w`` is a gamma of shape ``w`` and rate ``w M_0``;
    ``n`` failures in ``t`` seconds make it shape ``w + n``, rate ``w M_0 + t``. Failures of unknown
    kind count as the loss of a node, the worse.

    Raises:
        ConfigError: If there is neither history nor prior.
    """
    if prior is None and history.exposure_seconds <= 0:
        raise ConfigError(
            "no failure was observed, so the time between failures cannot be estimated; state the "
            "expected one, for example --mtbf 4h"
        )
    if prior is None:
        shapes, rate = (_JEFFREYS / 2, _JEFFREYS / 2), 0.0
    else:
        node = prior.weight_failures * prior.node_share
        shapes = prior.weight_failures - node, node
        rate = prior.weight_failures * prior.mtbf_seconds
    rate += history.exposure_seconds
    counts = history.process, history.node + history.unknown
    process, node_rate = (
        _posterior(shape, rate, count) for shape, count in zip(shapes, counts, strict=True)
    )
    return FailureRates(process, node_rate, _posterior(sum(shapes), rate, history.failures))


def _posterior(shape: float, rate: float, failures: int) -> Rate:
    total = shape + failures
    if total == 0:
        return Rate(math.inf, math.inf, math.inf, 0)
    # A high rate is a short time, so low and high change places.
    low, high = (rate / max(gamma_quantile(total, q), 1e-300) for q in (0.95, 0.05))
    return Rate(rate / total, low, high, failures)


def gamma_quantile(shape: float, q: float) -> float:
    """Return a quantile of the gamma distribution of rate 1, by bisection to 1e-9 of its value."""
    low, high = 0.0, max(1.0, 2 * shape)
    while _gamma_share(shape, high) < q:
        high *= 2
    while high - low > 1e-9 * high and high > 1e-280:
        middle = (low + high) / 2
        if _gamma_share(shape, middle) < q:
            low = middle
        else:
            high = middle
    return high


def _gamma_share(shape: float, x: float) -> float:
    """Return the regularised lower incomplete gamma function, by its series (DLMF 8.7.1)."""
    if x <= 0:
        return 0.0
    term = total = 1.0 / shape
    n = shape
    while term > total * 1e-16:
        n += 1
        term *= x / n
        total += term
    return min(1.0, total * math.exp(shape * math.log(x) - x - math.lgamma(shape)))
