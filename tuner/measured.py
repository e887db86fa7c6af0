"""Derive costs and failures from a run's own measurements: plain samples in, plain values out."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from lowdiff.errors import ConfigError
from lowdiff.tuner.choice import Setting
from lowdiff.tuner.costs import Costs, Estimate, slope_and_intercept
from lowdiff.tuner.failures import KINDS, FailureHistory

#: Number of recent samples used. Storage changes, so only recent behaviour counts; with this many
#: samples, one outlier moves no median.
_RECENT_BATCHES, _RECENT_SNAPSHOTS = 15, 5
#: Share of a snapshot's bytes from which on a batch counts as of similar size.
_LIKE_SIZE = 0.25

#: Replay time of one element: docs/benchmarks.md measures 1 to 3.1 ns.
ASSUMED_REPLAY_SECONDS_PER_ELEMENT = 3e-9
ASSUMED_RESTART_SECONDS = 60.0
ASSUMED_WRITE_BYTES_PER_SECOND = 500e6
#: Bandwidth of copying a snapshot, from device to host or in memory.
ASSUMED_COPY_BYTES_PER_SECOND = 2e9
#: Bandwidth of one node to the others, and default of ``lowdiff plan --network``. No run measures
#: it.
ASSUMED_NETWORK_BYTES_PER_SECOND = 10e9

Facts = Mapping[str, float | str]

#: Facts that must be equal before samples of one incarnation stand in for another's.
_MACHINE = ("processor", "cores", "world_size")


@dataclass(frozen=True, slots=True)
class MeasuredIncarnation:
    """Measurements of one rank in one incarnation.

    Attributes:
        incarnation: Number of the incarnation.
        samples: Recent samples by name; seconds and bytes.
        facts: Single values by name.
    """

    incarnation: int
    samples: Mapping[str, Sequence[float]]
    facts: Facts


@dataclass(frozen=True, slots=True)
class Past:
    """A new incarnation's knowledge of the earlier ones.

    Attributes:
        incarnations: Measurements of this rank, oldest incarnation first.
        facts: Facts about the restart that begins this incarnation.
        setting: Last setting of the newest incarnation, on rank 0; None if unknown.
    """

    incarnations: tuple[MeasuredIncarnation, ...]
    facts: dict[str, float | str]
    setting: Setting | None

    def attached(self) -> dict[str, float | str]:
        """Return the facts once the restart is over: its gap ends now, without the recovery."""
        gap = number(self.facts, "gap_seconds")
        if not gap:
            return self.facts
        since = time.time() - number(self.facts, "began_unix_seconds")
        return {
            **self.facts,
            "gap_seconds": gap + since - number(self.facts, "recovery_seconds"),
        }


@dataclass(frozen=True, slots=True)
class Measured:
    """Costs, and how well each is known.

    Attributes:
        costs: Costs, each the median of its estimate.
        estimates: Name of a cost -> median, spread and source.
    """

    costs: Costs
    estimates: Mapping[str, Estimate]


def number(facts: Facts, name: str, default: float = 0.0) -> float:
    """Return a fact that is a number."""
    value = facts.get(name, default)
    return default if isinstance(value, str) else float(value)


def failures_of(incarnations: Sequence[MeasuredIncarnation]) -> FailureHistory:
    """Return the failures of a run, and the time in which they could happen.

    The newest incarnation counts as exposure, too, because its not having failed is evidence.
    """
    kinds = [str(incarnation.facts.get("restart", "")) for incarnation in incarnations]
    counts = {kind: kinds.count(kind) for kind in KINDS}
    alive = (
        number(incarnation.facts, "seen_unix_seconds")
        - number(incarnation.facts, "began_unix_seconds")
        for incarnation in incarnations
    )
    return FailureHistory(sum(max(0.0, seconds) for seconds in alive), **counts)


def measure(
    incarnations: Sequence[MeasuredIncarnation], *, world_size: int, num_hosts: int = 1
) -> Measured:
    """Return costs from the newest incarnation; costs of restarts come from all incarnations.

    If the newest incarnation has no sample of a cost (a snapshot, say), the newest incarnation with
    one stands in, provided that ranks and machine are the same. A cost without any sample is
    assumed, and its estimate says so.

    Args:
        incarnations: Measurements, oldest incarnation first.
        world_size: Number of ranks.
        num_hosts: Machines of the ranks. Each machine reads what all of them have written.

    Raises:
        ConfigError: If no incarnation has taken enough steps to measure a step.
    """
    newest = next(
        (
            incarnation
            for incarnation in reversed(incarnations)
            if incarnation.samples.get("iteration_seconds")
        ),
        None,
    )
    if newest is None:
        raise ConfigError(
            "no step of this run was measured yet; let it train for some steps, or plan without "
            "it: lowdiff plan --params 7e9 --gpus 8 --mtbf 4h --disk 2GB/s"
        )
    alike = [
        incarnation for incarnation in incarnations if _machine(incarnation) == _machine(newest)
    ]
    elements = number(newest.facts, "elements", 1.0)
    estimates = _training(alike, elements) | _writing(alike) | _storing(newest.samples)
    estimates |= _recovery(incarnations, estimates, elements, num_hosts)
    values = {name: estimate.median for name, estimate in estimates.items()}
    costs = Costs(**values, world_size=world_size)
    return Measured(costs, estimates)


def _machine(incarnation: MeasuredIncarnation) -> list[float | str | None]:
    return [incarnation.facts.get(name) for name in _MACHINE]


def _newest_with(
    incarnations: Sequence[MeasuredIncarnation], *samples: str, fact: str | None = None
) -> MeasuredIncarnation:
    """Return the newest incarnation that has all these samples and the fact; an empty one if none."""
    for incarnation in reversed(incarnations):
        if all(map(incarnation.samples.get, samples)) and (
            fact is None or number(incarnation.facts, fact)
        ):
            return incarnation
    return MeasuredIncarnation(-1, {}, {})


def _training(incarnations: Sequence[MeasuredIncarnation], elements: float) -> dict[str, Estimate]:
    written = number(_newest_with(incarnations, fact="snapshot_bytes").facts, "snapshot_bytes")
    size = Estimate(written, written, written, 1) if written else Estimate.assumed(4 * elements)
    copied = size.median / ASSUMED_COPY_BYTES_PER_SECOND
    return {
        "step_seconds": _positive(_known(incarnations, "iteration_seconds", 1.0)),
        "differential_seconds": _known(incarnations, "differential_seconds", 0.0),
        "snapshot_seconds": _positive(_known(incarnations, "snapshot_seconds", copied)),
        "staged_bytes": _known(incarnations, "step_bytes", 0.0),
        "snapshot_bytes": size,
    }


def _writing(incarnations: Sequence[MeasuredIncarnation]) -> dict[str, Estimate]:
    """Measure bandwidth by snapshots, which are large, and latency by batches, which are small."""
    timed = _newest_with(incarnations, "snapshot_write_seconds", fact="snapshot_bytes")
    size = number(timed.facts, "snapshot_bytes")
    recent = timed.samples.get("snapshot_write_seconds", ())[-_RECENT_SNAPSHOTS:]
    samples = _newest_with(incarnations, *(f"batch_{name}" for name in _BATCH)).samples
    batches = list(
        zip(
            *(samples.get(f"batch_{name}", ())[-_RECENT_BATCHES:] for name in _BATCH),
            strict=False,
        )
    )
    timings = [(seconds, size) for seconds, size, _ in batches]
    bandwidth = _bandwidth(recent, size, timings)
    latency = _latencies(timings, bandwidth)
    each = [size / steps for _, size, steps in batches if steps]
    staged = _known(incarnations, "step_bytes", 0.0).median
    return {
        "write_bytes_per_second": _positive(bandwidth),
        "write_latency_seconds": Estimate.of(latency) or Estimate.assumed(0.01),
        "differential_bytes": Estimate.of(each) or Estimate.assumed(staged),
        "encode_seconds": _known(incarnations, "encode_seconds", 0.0),
    }


_BATCH = ("seconds", "bytes", "steps")


def _bandwidth(
    snapshots: Sequence[float], snapshot_bytes: float, batches: Sequence[tuple[float, float]]
) -> Estimate:
    """Return bytes per second from seconds of snapshots and from seconds and bytes of batches.

    Snapshots are normally much larger than batches, so their rate is the bandwidth. With batches of
    similar size (a small model), latency dominates both, and a snapshot has more of it because it
    is fsynced more often. Latency only slows a write down, so the bandwidth is not below any rate,
    and the highest rate is the best estimate: the ninth decile, as a clock may jump. Much smaller
    batches do not count: if they are faster, the cause is a cache.
    """
    rates = [snapshot_bytes / seconds for seconds in snapshots if seconds > 0]
    found = Estimate.of(rates)
    if found is None:
        return Estimate.assumed(ASSUMED_WRITE_BYTES_PER_SECOND)
    alike = [
        size / seconds
        for seconds, size in batches
        if seconds > 0 and size >= _LIKE_SIZE * snapshot_bytes
    ]
    fastest = Estimate.of([*rates, *alike]) if alike else None
    return found if fastest is None else replace(fastest, median=fastest.high)


def _storing(samples: Mapping[str, Sequence[float]]) -> dict[str, Estimate]:
    """Return the store's bandwidth and latency, separated in the same way; empty without a store.

    Use one incarnation only, because an earlier one may have had another store.
    """
    snapshots = _uploads(samples, "snapshots", _RECENT_SNAPSHOTS)
    batches = _uploads(samples, "segments", _RECENT_BATCHES)
    bandwidth = Estimate.of([size / seconds for seconds, size in snapshots or batches])
    if bandwidth is None:
        return {}
    latency = _latencies(batches, bandwidth)
    return {
        "store_bytes_per_second": _positive(bandwidth),
        "store_latency_seconds": Estimate.of(latency) or Estimate.assumed(0.0),
    }


def _latencies(sent: Sequence[tuple[float, float]], bandwidth: Estimate) -> list[float]:
    """Return the part of each upload's seconds that its bytes do not explain."""
    return [max(0.0, seconds - size / bandwidth.median) for seconds, size in sent]


def _uploads(
    samples: Mapping[str, Sequence[float]], kind: str, recent: int
) -> list[tuple[float, float]]:
    """Return seconds and bytes of the newest uploads of a kind."""
    seconds, sizes = (samples.get(f"{kind}_upload_{unit}", ()) for unit in ("seconds", "bytes"))
    return [(s, size) for s, size in zip(seconds, sizes, strict=False) if s > 0][-recent:]


def _recovery(
    incarnations: Sequence[MeasuredIncarnation],
    known: Mapping[str, Estimate],
    elements: float,
    num_hosts: int,
) -> dict[str, Estimate]:
    """Separate load from replay by a line through restarts that replayed different numbers of steps."""
    recoveries = [
        incarnation.facts for incarnation in incarnations if "recovery_seconds" in incarnation.facts
    ]
    steps = [number(facts, "replayed_steps") for facts in recoveries]
    seconds = [number(facts, "recovery_seconds") for facts in recoveries]
    told = [
        number(facts, "replay_seconds") / number(facts, "replayed_steps")
        for facts in recoveries
        if number(facts, "replay_seconds") and number(facts, "replayed_steps")
    ]
    line = slope_and_intercept(steps, seconds) if len(set(steps)) > 1 else None
    replay = Estimate.of(told)
    if replay is None and line is not None and line[0] > 0:
        replay = Estimate(line[0], line[0], line[0], len(steps))
    replay = replay or Estimate.assumed(elements * ASSUMED_REPLAY_SECONDS_PER_ELEMENT)
    loads = [max(0.0, s - replay.median * n) for s, n in zip(seconds, steps, strict=True)]
    # The ranks of a machine write at once; a restart reads what the ranks of all machines wrote.
    written = known["snapshot_bytes"].median / known["write_bytes_per_second"].median

    def gaps(*kinds: str) -> Estimate | None:
        found = [
            incarnation.facts for incarnation in incarnations if "gap_seconds" in incarnation.facts
        ]
        return Estimate.of([number(f, "gap_seconds") for f in found if f.get("restart") in kinds])

    # The last measurements that remain of a lost node are some seconds older than its end.
    restart = gaps("process") or gaps("node", "unknown")
    return {
        "replay_seconds": _positive(replay),
        "load_seconds": Estimate.of(loads) or Estimate.assumed(num_hosts * written),
        "restart_seconds": restart or Estimate.assumed(ASSUMED_RESTART_SECONDS),
    }


def _known(incarnations: Sequence[MeasuredIncarnation], name: str, otherwise: float) -> Estimate:
    samples = _newest_with(incarnations, name).samples
    return Estimate.of(samples.get(name, ())) or Estimate.assumed(otherwise)


def _positive(estimate: Estimate) -> Estimate:
    """Replace zero, which a clock that did not move gives, because the cost model divides by it."""
    if estimate.median > 0:
        return estimate
    return Estimate(1e-9, 1e-9, max(1e-9, estimate.high), estimate.count, estimate.source)
