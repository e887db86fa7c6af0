"""Monte-Carlo of training under failures, one event per failure, all replicas at once.

Time between failures is drawn beforehand as a trace, so strategies and settings are compared under
the same failures. A step in flight is lost by any failure; a failure during a recovery begins it
anew. Many steps lie between failures, so nothing is done per step: a loop of ``interval`` steps and
a stall is periodic, and where in it a failure falls is arithmetic.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lowdiff.errors import ConfigError
from lowdiff.tuner.failures import FailureRates
from lowdiff.tuner.strategies import Recovery, Strategy

_PROCESS, _NODE, _GROUP = range(3)

Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class FailureModel:
    """How failures come.

    Attributes:
        mtbf_seconds: Mean time between them.
        node_share: Share that lose a node.
        group_share: Share of those that take several nodes at once.
        shape: Of the Weibull distribution of the times: 1 is exponential; below it failures
            cluster, as after a repair that did not help (about 0.7 on large clusters).
    """

    mtbf_seconds: float
    node_share: float = 0.5
    group_share: float = 0.05
    shape: float = 1.0

    def __post_init__(self) -> None:
        if not (self.mtbf_seconds > 0 and self.shape > 0):
            raise ConfigError("mean time and Weibull shape of failures must be positive")
        if not (0 <= self.node_share <= 1 and 0 <= self.group_share <= 1):
            raise ConfigError("shares of kinds of failures lie between 0 and 1")

    @classmethod
    def of(cls, rates: FailureRates, *, group_share: float = 0.05) -> FailureModel:
        """Exponential failures at estimated rates."""
        total = rates.total.mtbf_seconds
        return cls(total, min(1.0, total / rates.node.mtbf_seconds), group_share)


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """Failures of several replicas of a run.

    Attributes:
        gaps: Seconds between failures, [replicas, failures].
        kinds: 0 process, 1 node, 2 several nodes; [replicas, failures].
    """

    gaps: Array
    kinds: npt.NDArray[np.int8]


def draw_trace(
    model: FailureModel, *, failures: int, replicas: int, rng: np.random.Generator
) -> Trace:
    """Draw so many failures for each replica."""
    size = (replicas, failures)
    gaps = rng.weibull(model.shape, size) * (model.mtbf_seconds / math.gamma(1 + 1 / model.shape))
    node = rng.random(size) < model.node_share
    group = rng.random(size) < model.group_share
    return Trace(gaps, np.where(node, np.where(group, _GROUP, _NODE), _PROCESS).astype(np.int8))


def trace_for(
    model: FailureModel, *, horizon_seconds: float, replicas: int, rng: np.random.Generator
) -> Trace:
    """A trace that reaches the horizon in every replica: mean plus ten standard deviations."""
    mean = horizon_seconds / model.mtbf_seconds
    second = math.gamma(1 + 2 / model.shape) / math.gamma(1 + 1 / model.shape) ** 2
    failures = math.ceil(mean + 10 * math.sqrt(mean * max(1.0, second - 1)) + 20)
    return draw_trace(model, failures=failures, replicas=replicas, rng=rng)


@dataclass(frozen=True, slots=True)
class Simulated:
    """A strategy's outcome; shares are of wall time, means over replicas.

    Attributes:
        effective_share: Useful training time over wall time.
        standard_error: Of its mean; 0 with one replica.
        stalls: Share spent on saving.
        recovering: Share spent on restarts, loading and replay.
        lost: Share spent on steps that a failure took.
        failures: Failures per replica.
        lost_steps: Steps taken by a failure, mean.
    """

    strategy: Strategy
    effective_share: float
    standard_error: float
    stalls: float
    recovering: float
    lost: float
    failures: float
    lost_steps: float

    @property
    def waste(self) -> float:
        """Wasted seconds per second of useful training; inf without progress."""
        return 1 / self.effective_share - 1 if self.effective_share else math.inf


def simulate(
    strategy: Strategy,
    trace: Trace,
    *,
    useful_step_seconds: float,
    horizon_seconds: float | None = None,
) -> Simulated:
    """Run a strategy through a trace until the horizon; None: until the trace's last failure."""
    replicas, failures = trace.gaps.shape
    ends = np.full(replicas, math.inf if horizon_seconds is None else horizon_seconds)
    clock, steps, wait, recovering, lost, seen = (np.zeros(replicas) for _ in range(6))
    for event in range(failures):
        gap = np.minimum(trace.gaps[:, event], ends - clock)
        if not gap.any():
            break
        is_failure = trace.gaps[:, event] <= ends - clock
        recovering += np.minimum(gap, wait)
        running = np.maximum(gap - wait, 0.0)
        reached = _advance(strategy, steps, running)
        restored, next_wait = _after_failure(
            strategy, trace.kinds[:, event], start=steps, reached=reached
        )
        lost += np.where(is_failure, reached - restored, 0.0)
        seen += is_failure
        # Nothing was gained before a failure that came during a recovery: it begins anew.
        wait = np.where(is_failure, next_wait, np.maximum(wait - gap, 0.0))
        steps = np.where(is_failure, restored, reached)
        clock += gap
    wall = clock if horizon_seconds is None else ends
    if horizon_seconds is not None and np.any(clock < ends):
        raise ConfigError("the trace of failures ends before the horizon; draw a longer one")
    useful = steps * useful_step_seconds / wall
    lost_share = lost * strategy.loop_seconds / wall
    recovery_share = recovering / wall
    return Simulated(
        strategy=strategy,
        effective_share=float(useful.mean()),
        standard_error=float(useful.std(ddof=1) / math.sqrt(replicas)) if replicas > 1 else 0.0,
        stalls=max(0.0, float((1 - useful - lost_share - recovery_share).mean())),
        recovering=float(recovery_share.mean()),
        lost=float(lost_share.mean()),
        failures=float(seen.mean()),
        lost_steps=float(lost.sum() / max(1.0, seen.sum())),
    )


def _advance(strategy: Strategy, steps: Array, running: Array) -> Array:
    """Steps done after running on for some seconds, the one in flight by its finished part."""
    interval, one = strategy.interval_steps, strategy.step_seconds
    if math.isinf(interval):
        return np.asarray(steps + running / one)
    cycle = interval * one + strategy.stall_seconds
    # A stall ends a cycle, so a state on the boundary begins the next one.
    phase = np.mod(steps, interval)
    position = phase * one + running
    cycles = np.floor(position / cycle)
    within = np.minimum((position - cycles * cycle) / one, interval)
    return np.asarray(steps - phase + cycles * interval + within)


def _after_failure(
    strategy: Strategy,
    kinds: npt.NDArray[np.int8],
    *,
    start: Array,
    reached: Array,
) -> tuple[Array, Array]:
    """Step that each replica goes back to, and the time until it goes on from there."""
    restored, wait = np.empty_like(start), np.empty_like(start)
    for kind, recovery in enumerate((strategy.process, strategy.node, strategy.group)):
        chosen = kinds == kind
        if chosen.any():
            found = _saved(strategy, recovery, start[chosen], reached[chosen])
            restored[chosen] = found
            wait[chosen] = recovery.fixed_seconds + _replay(strategy, recovery, found)
    return restored, wait


def _saved(strategy: Strategy, recovery: Recovery, start: Array, reached: Array) -> Array:
    """Newest step that survives."""
    if math.isinf(recovery.grain_steps):
        return np.zeros_like(reached)
    lag, grain = recovery.lag_seconds / strategy.loop_seconds, recovery.grain_steps
    saved = np.floor(np.maximum(reached - lag, 0.0) / grain) * grain
    return np.asarray(np.maximum(saved, start) if recovery.start_is_safe else saved)


def _replay(strategy: Strategy, recovery: Recovery, restored: Array) -> Array:
    if not recovery.replay_seconds:
        return np.zeros_like(restored)
    lag = recovery.base_lag_seconds / strategy.loop_seconds
    base = np.floor(np.maximum(restored - lag, 0.0) / recovery.base_steps) * recovery.base_steps
    return np.asarray((restored - base) * recovery.replay_seconds)
