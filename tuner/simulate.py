"""Monte-Carlo simulation of training under failures: one event per failure, all trials at once.

Times between failures are drawn beforehand as a trace, so that strategies and settings meet the
same failures. A failure loses the step in flight; a failure during a recovery restarts the
recovery. Many steps lie between failures, so the simulation does nothing per step: a loop of
``interval`` steps and one stall is periodic, and arithmetic finds a failure's place in the loop.
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
    """Distribution of failures.

    Attributes:
        mtbf_seconds: Mean time between failures.
        node_share: Share of failures that lose a node.
        group_share: Share of those that take several nodes at once.
        shape: Shape of the Weibull distribution of times: 1 is exponential; below 1 failures
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
        """Return exponential failures at estimated rates."""
        total = rates.total.mtbf_seconds
        return cls(total, min(1.0, total / rates.node.mtbf_seconds), group_share)


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """Failures of several trials of a run.

    Attributes:
        gaps: Seconds between failures, [trials, failures].
        kinds: 0 process, 1 node, 2 several nodes; [trials, failures].
    """

    gaps: Array
    kinds: npt.NDArray[np.int8]


def draw_trace(
    model: FailureModel, *, failures: int, trials: int, rng: np.random.Generator
) -> Trace:
    """Draw a number of failures for each trial."""
    size = (trials, failures)
    gaps = rng.weibull(model.shape, size) * (model.mtbf_seconds / math.gamma(1 + 1 / model.shape))
    node = rng.random(size) < model.node_share
    group = rng.random(size) < model.group_share
    return Trace(gaps, np.where(node, np.where(group, _GROUP, _NODE), _PROCESS).astype(np.int8))


def trace_for(
    model: FailureModel, *, horizon_seconds: float, trials: int, rng: np.random.Generator
) -> Trace:
    """Draw a trace that reaches the horizon in every trial: mean plus ten standard deviations."""
    mean = horizon_seconds / model.mtbf_seconds
    second = math.gamma(1 + 2 / model.shape) / math.gamma(1 + 1 / model.shape) ** 2
    failures = math.ceil(mean + 10 * math.sqrt(mean * max(1.0, second - 1)) + 20)
    return draw_trace(model, failures=failures, trials=trials, rng=rng)


@dataclass(frozen=True, slots=True)
class Simulated:
    """Outcome of one strategy; shares are of wall time, means over trials.

    Attributes:
        effective_share: Useful training time over wall time.
        standard_error: Standard error of ``effective_share``; 0 with one trial.
        stalls: Share spent on saving.
        recovering: Share spent on restarts, loading and replay.
        lost: Share spent on steps that a failure took.
        failures: Failures per trial.
        lost_steps: Mean number of steps that a failure takes.
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
        """Return wasted seconds per second of useful training; inf without progress."""
        return 1 / self.effective_share - 1 if self.effective_share else math.inf


def simulate(
    strategy: Strategy,
    trace: Trace,
    *,
    useful_step_seconds: float,
    horizon_seconds: float | None = None,
) -> Simulated:
    """Simulate a strategy under a trace until the horizon; None: until the trace's last failure."""
    trials, failures = trace.gaps.shape
    ends = np.full(trials, math.inf if horizon_seconds is None else horizon_seconds)
    clock, steps, wait, recovering, lost, seen = (np.zeros(trials) for _ in range(6))
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
        # A recovery that a failure interrupts gains nothing and begins anew.
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
        standard_error=float(useful.std(ddof=1) / math.sqrt(trials)) if trials > 1 else 0.0,
        stalls=max(0.0, float((1 - useful - lost_share - recovery_share).mean())),
        recovering=float(recovery_share.mean()),
        lost=float(lost_share.mean()),
        failures=float(seen.mean()),
        lost_steps=float(lost.sum() / max(1.0, seen.sum())),
    )


def _advance(strategy: Strategy, steps: Array, running: Array) -> Array:
    """Return the steps done after some more seconds; the step in flight counts by its finished part."""
    interval, one = strategy.interval_steps, strategy.step_seconds
    if math.isinf(interval):
        return np.asarray(steps + running / one)
    cycle = interval * one + strategy.stall_seconds
    # A stall ends a cycle, so a state on the boundary begins the next cycle.
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
    """Return the step to which each trial goes back, and the time until training goes on."""
    restored, wait = np.empty_like(start), np.empty_like(start)
    for kind, recovery in enumerate((strategy.process, strategy.node, strategy.group)):
        chosen = kinds == kind
        if chosen.any():
            found = _saved(strategy, recovery, start[chosen], reached[chosen])
            restored[chosen] = found
            wait[chosen] = recovery.fixed_seconds + _replay(strategy, recovery, found)
    return restored, wait


def _saved(strategy: Strategy, recovery: Recovery, start: Array, reached: Array) -> Array:
    """Return the newest step that survives."""
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
