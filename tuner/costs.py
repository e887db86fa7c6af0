"""Costs of checkpointing and failures, estimated and term by term (docs/tuning.md lists each with its unit).

Two numbers are chosen: ``f`` steps between full snapshots and ``b`` differentials per durable
write. Waste is in seconds per second of useful training. Useful training is the time that the same
steps would take without checkpoints and failures.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np

from lowdiff.errors import ConfigError
from lowdiff.tuner.failures import FailureRates


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


#: Age and size at which the writer ends a segment; a store receives a segment as a whole.
_SEGMENT_SECONDS, _SEGMENT_BYTES = 10.0, 16 << 20


@dataclass(frozen=True, slots=True)
class Costs:
    """Costs of one rank. Every rank has its own share of the disk, and the slowest rank counts.

    Attributes:
        step_seconds: One training step without checkpointing (``T``).
        differential_seconds: Training time that one differential takes (``d``).
        snapshot_seconds: Training time that one full snapshot takes (``C``).
        staged_bytes: One differential in staging memory.
        differential_bytes: One differential as written, encoded (``s``).
        snapshot_bytes: One rank's share of a full snapshot (``S``).
        encode_seconds: Processor time of the writer for one differential (``e``).
        write_latency_seconds: Time of a durable write beyond what its size explains (``L``).
        write_bytes_per_second: Durable bandwidth of one rank (``W``).
        load_seconds: Loading a snapshot at a restart (``R``).
        replay_seconds: Replaying one differential (``r``).
        restart_seconds: From a failure until training goes on, without loading and replay:
            noticing, scheduling, imports, locks, the new writer.
        store_latency_seconds: Time of an upload beyond what its size explains; 0 without a store.
        store_bytes_per_second: Upload bandwidth of one rank (``W_s``); 0 without a store.
        residual_bytes: Error feedback in ``snapshot_bytes``; only lowdiff saves this.
        world_size: Number of ranks.

    Raises:
        ConfigError: If a value is out of range.
    """

    step_seconds: float
    differential_seconds: float
    snapshot_seconds: float
    staged_bytes: float
    differential_bytes: float
    snapshot_bytes: float
    encode_seconds: float
    write_latency_seconds: float
    write_bytes_per_second: float
    load_seconds: float
    replay_seconds: float
    restart_seconds: float
    store_latency_seconds: float = 0.0
    store_bytes_per_second: float = 0.0
    residual_bytes: float = 0.0
    world_size: int = 1

    def __post_init__(self) -> None:
        positive = ("step_seconds", "snapshot_seconds", "write_bytes_per_second", "replay_seconds")
        for field in fields(self):
            value = getattr(self, field.name)
            least = "positive" if field.name in positive else "at least 0"
            if not (value > 0 or (value == 0 and field.name not in positive)) or value == math.inf:
                raise ConfigError(f"{field.name} must be {least}, got {value}")


def without_residual(costs: Costs) -> Costs:
    """Return costs of snapshots without error feedback, which are copied, written and loaded faster."""
    share = 1 - costs.residual_bytes / costs.snapshot_bytes if costs.residual_bytes else 1.0
    return replace(
        costs,
        snapshot_seconds=share * costs.snapshot_seconds,
        snapshot_bytes=share * costs.snapshot_bytes,
        load_seconds=share * costs.load_seconds,
        residual_bytes=0.0,
    )


def snapshot_write_seconds(costs: Costs) -> float:
    """Return the time to write one rank's share of a snapshot durably: ``L + S/W``."""
    return costs.write_latency_seconds + costs.snapshot_bytes / costs.write_bytes_per_second


@dataclass(frozen=True, slots=True)
class Waste:
    """Expected waste, in seconds per second of useful training, by cause.

    Attributes:
        differentials: Training time that differentials take.
        snapshots: Training time that snapshots take.
        backpressure: Waiting for a writer that does not keep up.
        restarts: Noticing failures, scheduling, starting up.
        loads: Loading snapshots.
        replay: Replaying differentials.
        lost_steps: Training again the steps that a failure took.
    """

    differentials: float
    snapshots: float
    backpressure: float
    restarts: float
    loads: float
    replay: float
    lost_steps: float

    @property
    def total(self) -> float:
        """Return the sum of all causes."""
        return float(sum(getattr(self, field.name) for field in fields(self)))

    @property
    def seconds_per_hour(self) -> float:
        """Return wasted seconds per hour of useful training."""
        return 3600 * self.total


def written_bytes_per_step(costs: Costs, f: float) -> float:
    """Return the bytes per step that one rank writes, and uploads with a store: ``s + S/f``."""
    return costs.differential_bytes + costs.snapshot_bytes / f


def disk_seconds_per_step(costs: Costs, f: float, b: float) -> float:
    """Return the disk's time per step: ``L/b + s/W + S/(f W)``."""
    transfer = written_bytes_per_step(costs, f) / costs.write_bytes_per_second
    return costs.write_latency_seconds / b + transfer


def loop_seconds(costs: Costs, f: float, b: float) -> float:
    """Return the time of one step: ``T + d + C/f``, or the writer's time if that is longer."""
    own = costs.step_seconds + costs.differential_seconds + costs.snapshot_seconds / f
    return max(own, disk_seconds_per_step(costs, f, b), costs.encode_seconds)


def writer_share(costs: Costs, f: float, b: float) -> float:
    """Return the busy share of the writer's slower part, disk or core; above 1 training waits."""
    own = costs.step_seconds + costs.differential_seconds + costs.snapshot_seconds / f
    return max(disk_seconds_per_step(costs, f, b), costs.encode_seconds) / own


def store_share(costs: Costs, f: float, b: float) -> float:
    """Return the share of the store's bandwidth in use: ``(s + S/f) / (W_s T')``; 0 without a store.

    Above 1 the store falls ever further behind; training never waits for the store. Latency does
    not count, because a segment is uploaded as one object.
    """
    if not costs.store_bytes_per_second:
        return 0.0
    sent = written_bytes_per_step(costs, f) / costs.store_bytes_per_second
    return sent / loop_seconds(costs, f, b)


def store_lag_steps(costs: Costs, f: float, b: float) -> float:
    """Return how many steps a store that keeps up is behind on average.

    A batch and a segment must first be filled, written and sent.
    """
    step_seconds = loop_seconds(costs, f, b)
    held = _SEGMENT_SECONDS / step_seconds
    if costs.differential_bytes:
        held = min(held, _SEGMENT_BYTES / costs.differential_bytes)
    sent = (
        costs.store_latency_seconds + held * costs.differential_bytes / costs.store_bytes_per_second
    )
    return (b - 1 + held) / 2 + (batch_seconds(costs, b) + sent) / step_seconds


def batch_seconds(costs: Costs, b: float) -> float:
    """Return the time from a full batch to its fsync: ``L + b (s/W + e)``."""
    per_step = costs.differential_bytes / costs.write_bytes_per_second + costs.encode_seconds
    return costs.write_latency_seconds + b * per_step


def lost_steps(costs: Costs, f: float, b: float) -> tuple[float, float]:
    """Return the mean steps lost by a process crash and by the loss of a node.

    A process crash takes half of the step in flight. The loss of a node also takes a half-filled
    batch, ``(b - 1)/2``, and the steps made while a batch is written; never more than ``2 b``.
    """
    behind = (b - 1) / 2 + batch_seconds(costs, b) / loop_seconds(costs, f, b)
    return 0.5, 0.5 + min(behind, 2 * b)


def replayed_steps(costs: Costs, f: float, b: float) -> float:
    """Return mean steps since the newest durable snapshot: ``(f - 1)/2`` plus its write time."""
    writing = costs.snapshot_bytes / costs.write_bytes_per_second
    return (f - 1) / 2 + writing / loop_seconds(costs, f, b)


def waste(costs: Costs, rates: FailureRates, f: float, b: float) -> Waste:
    """Return the expected waste to first order in the failure rate: one restart per failure."""
    step = costs.step_seconds
    loop = loop_seconds(costs, f, b)
    own = step + costs.differential_seconds + costs.snapshot_seconds / f
    # The rate counts per second of running, and running includes more than useful training.
    per_second = loop / step
    process, node = (per_second / rate.mtbf_seconds for rate in (rates.process, rates.node))
    lost_process, lost_node = (steps * loop for steps in lost_steps(costs, f, b))
    return Waste(
        differentials=costs.differential_seconds / step,
        snapshots=costs.snapshot_seconds / (f * step),
        backpressure=(loop - own) / step,
        restarts=(process + node) * costs.restart_seconds,
        loads=(process + node) * costs.load_seconds,
        replay=(process + node) * costs.replay_seconds * replayed_steps(costs, f, b),
        lost_steps=process * lost_process + node * lost_node,
    )


def recovery_seconds(costs: Costs, f: float, b: float) -> float:
    """Return the mean time from a failure until training goes on."""
    replay = costs.replay_seconds * replayed_steps(costs, f, b)
    return costs.restart_seconds + costs.load_seconds + replay


def effective_share(costs: Costs, rates: FailureRates, f: float, b: float) -> float:
    """Return useful seconds per second, including failures during recoveries.

    With exponential failures of rate ``q``, a recovery of ``H`` seconds that begins anew at every
    failure takes ``(exp(q H) - 1)/q`` on average (Daly 2006, eq. 9). It is followed by ``1/q``
    seconds of running, of which the lost steps do not count.
    """
    process, node = (1 / rate.mtbf_seconds for rate in (rates.process, rates.node))
    q = process + node
    loop = loop_seconds(costs, f, b)
    if q == 0:
        return costs.step_seconds / loop
    writing = costs.snapshot_bytes / costs.write_bytes_per_second / loop
    fixed = costs.restart_seconds + costs.load_seconds + costs.replay_seconds * writing
    # Replayed steps are evenly spread over f: take the mean of exp(q r n) for n from 0 to f - 1.
    spread = q * costs.replay_seconds
    if q * fixed + spread * f > 600:
        return 0.0  # no recovery ever ends
    grown = math.expm1(spread * f) / (f * math.expm1(spread))
    lost = sum(
        rate / q * steps * loop
        for rate, steps in zip((process, node), lost_steps(costs, f, b), strict=True)
    )
    running = max(0.0, 1 - q * lost)
    return costs.step_seconds / loop * running / (math.exp(q * fixed) * grown)


def best_interval(costs: Costs, rates: FailureRates) -> float:
    """Return the snapshot interval in steps that wastes least: ``sqrt(2 C (M + K) / (r (T + d)))``.

    Young (1974, https://doi.org/10.1145/361147.361115) weighs lost work against snapshots. Here,
    replay takes the place of lost work and is cheaper by ``r / T``. ``C`` also delays failures,
    because a rate counts per second of running. This is the exact minimum of ``waste``, from its
    two terms in ``1/f`` and ``f``, with ``K``, the fixed part of a recovery, included.
    """
    if math.isinf(rates.total.mtbf_seconds):
        return math.inf
    own = costs.step_seconds + costs.differential_seconds
    weighed = max(0.0, rates.total.mtbf_seconds + fixed_recovery_seconds(costs))
    return math.sqrt(2 * costs.snapshot_seconds * weighed / (costs.replay_seconds * own))


def fixed_recovery_seconds(costs: Costs) -> float:
    """Return ``K``: start and load time, less the half step between ``f/2`` and ``(f - 1)/2``."""
    return costs.restart_seconds + costs.load_seconds - costs.replay_seconds / 2
