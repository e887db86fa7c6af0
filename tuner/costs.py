"""What checkpointing and failures cost, term by term (docs/tuning.md has each with its unit).

The choice is of two numbers: ``f`` steps between full snapshots and ``b`` differentials per
durable write. All waste is in seconds per second of useful training, where useful is what the same
steps would take without checkpoints and failures.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace

from lowdiff.errors import ConfigError
from lowdiff.tuner.failures import FailureRates

#: When the writer ends a segment, which goes to the store as a whole.
_SEGMENT_SECONDS, _SEGMENT_BYTES = 10.0, 16 << 20


@dataclass(frozen=True, slots=True)
class Costs:
    """One rank's costs; every rank has its own disk share and the slowest counts.

    Attributes:
        step_seconds: One training step without checkpointing (``T``).
        differential_seconds: Training time that one differential takes (``d``).
        snapshot_seconds: Training time that one full snapshot takes (``C``).
        staged_bytes: One differential in staging memory.
        differential_bytes: One differential as written, encoded (``s``).
        snapshot_bytes: One rank's shard of a full snapshot (``S``).
        encode_seconds: Processor time of the writer for one differential (``e``).
        write_latency_seconds: What a durable write takes whatever its size (``L``).
        write_bytes_per_second: Durable bandwidth of one rank (``W``).
        load_seconds: Loading a snapshot at a restart (``R``).
        replay_seconds: Replaying one differential (``r``).
        restart_seconds: From a failure until training goes on, without loading and replay: noticing,
            scheduling, imports, locks, the new writer.
        store_latency_seconds: What an upload takes whatever its size; 0 without a store.
        store_bytes_per_second: What one rank uploads (``W_s``); 0 without a store.
        residual_bytes: Error feedback in ``snapshot_bytes``, which only lowdiff saves.
        world_size: Ranks.

    Raises:
        ConfigError: If a value cannot be.
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
    """Costs of snapshots that hold no error feedback: copied, written and loaded as much faster."""
    share = 1 - costs.residual_bytes / costs.snapshot_bytes if costs.residual_bytes else 1.0
    return replace(
        costs,
        snapshot_seconds=share * costs.snapshot_seconds,
        snapshot_bytes=share * costs.snapshot_bytes,
        load_seconds=share * costs.load_seconds,
        residual_bytes=0.0,
    )


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
        lost_steps: Training again what a failure took.
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
        """All causes."""
        return float(sum(getattr(self, field.name) for field in fields(self)))

    @property
    def seconds_per_hour(self) -> float:
        """Wasted seconds per hour of useful training."""
        return 3600 * self.total


def written_bytes_per_step(costs: Costs, f: float) -> float:
    """What one rank writes, and uploads if there is a store: ``s + S/f``."""
    return costs.differential_bytes + costs.snapshot_bytes / f


def disk_seconds_per_step(costs: Costs, f: float, b: float) -> float:
    """Time of the disk for one step: ``L/b + s/W + S/(f W)``."""
    transfer = written_bytes_per_step(costs, f) / costs.write_bytes_per_second
    return costs.write_latency_seconds / b + transfer


def loop_seconds(costs: Costs, f: float, b: float) -> float:
    """One step with checkpointing: ``T + d + C/f``, or what the writer takes if that is longer."""
    own = costs.step_seconds + costs.differential_seconds + costs.snapshot_seconds / f
    return max(own, disk_seconds_per_step(costs, f, b), costs.encode_seconds)


def writer_share(costs: Costs, f: float, b: float) -> float:
    """Busy share of the writer's slowest part, disk or core; above 1 training waits for it."""
    own = costs.step_seconds + costs.differential_seconds + costs.snapshot_seconds / f
    return max(disk_seconds_per_step(costs, f, b), costs.encode_seconds) / own


def store_share(costs: Costs, f: float, b: float) -> float:
    """What a rank uploads over what its store takes: ``(s + S/f) / (W_s T')``; 0 without a store.

    Above 1 the store falls ever further behind; training never waits for it. Latency does not count:
    a segment is uploaded as one.
    """
    if not costs.store_bytes_per_second:
        return 0.0
    sent = written_bytes_per_step(costs, f) / costs.store_bytes_per_second
    return sent / loop_seconds(costs, f, b)


def store_lag_steps(costs: Costs, f: float, b: float) -> float:
    """Mean steps that a store which keeps up is behind: a batch and a segment filled, written, sent."""
    step_seconds = loop_seconds(costs, f, b)
    held = _SEGMENT_SECONDS / step_seconds
    if costs.differential_bytes:
        held = min(held, _SEGMENT_BYTES / costs.differential_bytes)
    sent = (
        costs.store_latency_seconds + held * costs.differential_bytes / costs.store_bytes_per_second
    )
    return (b - 1 + held) / 2 + (batch_seconds(costs, b) + sent) / step_seconds


def batch_seconds(costs: Costs, b: float) -> float:
    """From a full batch to its fsync: ``L + b (s/W + e)``."""
    per_step = costs.differential_bytes / costs.write_bytes_per_second + costs.encode_seconds
    return costs.write_latency_seconds + b * per_step


def lost_steps(costs: Costs, f: float, b: float) -> tuple[float, float]:
    """Mean steps that a process crash and the loss of a node take.

    A process crash: half of the step in flight. The loss of a node besides: a half-filled batch,
    ``(b - 1)/2``, and the steps that come while one is written; never more than ``2 b``.
    """
    behind = (b - 1) / 2 + batch_seconds(costs, b) / loop_seconds(costs, f, b)
    return 0.5, 0.5 + min(behind, 2 * b)


def replayed_steps(costs: Costs, f: float, b: float) -> float:
    """Mean steps from the newest durable snapshot: ``(f - 1)/2``, and those while it is written."""
    writing = costs.snapshot_bytes / costs.write_bytes_per_second
    return (f - 1) / 2 + writing / loop_seconds(costs, f, b)


def waste(costs: Costs, rates: FailureRates, f: float, b: float) -> Waste:
    """Expected waste to first order in the failure rate: one restart per failure."""
    step = costs.step_seconds
    loop = loop_seconds(costs, f, b)
    own = step + costs.differential_seconds + costs.snapshot_seconds / f
    # The rate is per second of running, and running takes longer than the useful part of it.
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
    """Mean time from a failure until training goes on."""
    replay = costs.replay_seconds * replayed_steps(costs, f, b)
    return costs.restart_seconds + costs.load_seconds + replay


def effective_share(costs: Costs, rates: FailureRates, f: float, b: float) -> float:
    """Effective training time ratio: useful seconds per second, failures while recovering included.

    Exponential failures of rate ``q`` make a recovery of ``H`` seconds, begun anew whenever
    another failure comes, take ``(exp(q H) - 1)/q`` on average (Daly 2006, eq. 9); ``1/q``
    seconds of running follow, of which what is lost counts for nothing.
    """
    process, node = (1 / rate.mtbf_seconds for rate in (rates.process, rates.node))
    q = process + node
    loop = loop_seconds(costs, f, b)
    if q == 0:
        return costs.step_seconds / loop
    writing = costs.snapshot_bytes / costs.write_bytes_per_second / loop
    fixed = costs.restart_seconds + costs.load_seconds + costs.replay_seconds * writing
    # Replay is evenly spread over f steps: the mean of exp(q r n) over n from 0 to f - 1.
    spread = q * costs.replay_seconds
    if q * fixed + spread * f > 600:
        return 0.0  # it never gets through a recovery
    grown = math.expm1(spread * f) / (f * math.expm1(spread))
    lost = sum(
        rate / q * steps * loop
        for rate, steps in zip((process, node), lost_steps(costs, f, b), strict=True)
    )
    running = max(0.0, 1 - q * lost)
    return costs.step_seconds / loop * running / (math.exp(q * fixed) * grown)


def best_interval(costs: Costs, rates: FailureRates) -> float:
    """Steps between snapshots that waste least: ``sqrt(2 C (M + K) / (r (T + d)))``.

    Where Young (1974, https://doi.org/10.1145/361147.361115) weighs lost work against snapshots,
    here replay takes the place of lost work, and is cheaper by ``r / T``. ``C`` also delays the
    failures: a rate is per second of running; the exact minimiser of ``waste`` follows from its
    two terms in ``1/f`` and ``f``, with ``K``, what a recovery takes besides, counted.
    """
    if math.isinf(rates.total.mtbf_seconds):
        return math.inf
    own = costs.step_seconds + costs.differential_seconds
    weighed = max(0.0, rates.total.mtbf_seconds + fixed_recovery_seconds(costs))
    return math.sqrt(2 * costs.snapshot_seconds * weighed / (costs.replay_seconds * own))


def fixed_recovery_seconds(costs: Costs) -> float:
    """Starting and loading, less the half step by which ``(f - 1)/2`` is below ``f/2`` (``K``)."""
    return costs.restart_seconds + costs.load_seconds - costs.replay_seconds / 2
