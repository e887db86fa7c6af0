"""From what a run recorded of itself to costs and failures: plain samples in, plain values out."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from lowdiff.errors import ConfigError
from lowdiff.tuner.choice import Setting
from lowdiff.tuner.costs import Costs
from lowdiff.tuner.estimates import Estimate, slope_and_intercept
from lowdiff.tuner.failures import KINDS, FailureHistory

#: Storage changes, so only its newest behaviour counts; one hiccup among so many moves nothing.
_RECENT_BATCHES, _RECENT_SNAPSHOTS = 15, 5
#: A batch of at least so much of a snapshot's bytes is of like size.
_LIKE_SIZE = 0.25

#: Replay of one element by a block: measured here at 1 to 3.1 ns (docs/benchmarks.md).
ASSUMED_REPLAY_SECONDS_PER_ELEMENT = 3e-9
ASSUMED_RESTART_SECONDS = 60.0
ASSUMED_WRITE_BYTES_PER_SECOND = 500e6
#: A device-to-host or memory copy of a snapshot.
ASSUMED_COPY_BYTES_PER_SECOND = 2e9
#: One node's, to the others; no run measures it. The default of ``lowdiff plan --network`` as well.
ASSUMED_NETWORK_BYTES_PER_SECOND = 10e9

Facts = Mapping[str, float | str]

#: Facts of a life that must be the same for its samples to stand in for those of another.
_MACHINE = ("processor", "cores", "world_size")


@dataclass(frozen=True, slots=True)
class Life:
    """What one incarnation recorded, of the rank that is looked at.

    Attributes:
        incarnation: Its number.
        samples: Recent samples by name; seconds and bytes.
        facts: Single values by name.
    """

    incarnation: int
    samples: Mapping[str, Sequence[float]]
    facts: Facts


@dataclass(frozen=True, slots=True)
class Past:
    """What a new incarnation knows of the earlier ones.

    Attributes:
        lives: Of this rank, oldest first.
        facts: About the restart that begins this incarnation.
        setting: What the newest of them used last, on rank 0; None if nobody knows.
    """

    lives: tuple[Life, ...]
    facts: dict[str, float | str]
    setting: Setting | None

    def attached(self) -> dict[str, float | str]:
        """Facts of the restart, now that it is over: its gap lasted until now, less the recovery."""
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
        costs: Medians.
        estimates: By the name of the cost: median, spread and source.
    """

    costs: Costs
    estimates: Mapping[str, Estimate]


def number(facts: Facts, name: str, default: float = 0.0) -> float:
    """A fact that is a number."""
    value = facts.get(name, default)
    return default if isinstance(value, str) else float(value)


def failures_of(lives: Sequence[Life]) -> FailureHistory:
    """Failures that a run has had, and the time in which they could happen.

    The newest life counts as exposure, too: that it has not failed yet is evidence.
    """
    kinds = [str(life.facts.get("restart", "")) for life in lives]
    counts = {kind: kinds.count(kind) for kind in KINDS}
    alive = (
        number(life.facts, "seen_unix_seconds") - number(life.facts, "began_unix_seconds")
        for life in lives
    )
    return FailureHistory(sum(max(0.0, seconds) for seconds in alive), **counts)


def measure(lives: Sequence[Life], *, world_size: int, num_hosts: int = 1) -> Measured:
    """Costs as the newest lives show them, those of restarts from all lives.

    The newest life counts; what it has not seen yet, a snapshot, say, is taken from the newest one
    that has, of as many ranks on such a machine. What was never seen is assumed, and said so by its
    estimate.

    Args:
        lives: Oldest first.
        world_size: Ranks.
        num_hosts: Machines that they are on. Each reads what all of them have written.

    Raises:
        ConfigError: If no life has taken enough steps to know how long one takes.
    """
    newest = next((life for life in reversed(lives) if life.samples.get("iteration_seconds")), None)
    if newest is None:
        raise ConfigError(
            "no step of this run was measured yet; let it train for some steps, or plan without "
            "it: lowdiff plan --params 7e9 --gpus 8 --mtbf 4h --disk 2GB/s"
        )
    alike = [life for life in lives if _machine(life) == _machine(newest)]
    elements = number(newest.facts, "elements", 1.0)
    estimates = _training(alike, elements) | _writing(alike) | _storing(newest.samples)
    estimates |= _recovery(lives, estimates, elements, num_hosts)
    values = {name: estimate.median for name, estimate in estimates.items()}
    costs = Costs(**values, world_size=world_size)
    return Measured(costs, estimates)


def _machine(life: Life) -> list[float | str | None]:
    return [life.facts.get(name) for name in _MACHINE]


def _newest_with(lives: Sequence[Life], *samples: str, fact: str | None = None) -> Life:
    """The newest life that has samples of all these names, and a fact; one without any if none."""
    for life in reversed(lives):
        if all(map(life.samples.get, samples)) and (fact is None or number(life.facts, fact)):
            return life
    return Life(-1, {}, {})


def _training(lives: Sequence[Life], elements: float) -> dict[str, Estimate]:
    written = number(_newest_with(lives, fact="snapshot_bytes").facts, "snapshot_bytes")
    size = Estimate(written, written, written, 1) if written else Estimate.assumed(4 * elements)
    copied = size.median / ASSUMED_COPY_BYTES_PER_SECOND
    return {
        "step_seconds": _positive(_known(lives, "iteration_seconds", 1.0)),
        "differential_seconds": _known(lives, "differential_seconds", 0.0),
        "snapshot_seconds": _positive(_known(lives, "snapshot_seconds", copied)),
        "staged_bytes": _known(lives, "step_bytes", 0.0),
        "snapshot_bytes": size,
    }


def _writing(lives: Sequence[Life]) -> dict[str, Estimate]:
    """Snapshots are large and show the bandwidth, batches are small and show the latency."""
    timed = _newest_with(lives, "snapshot_write_seconds", fact="snapshot_bytes")
    size = number(timed.facts, "snapshot_bytes")
    recent = timed.samples.get("snapshot_write_seconds", ())[-_RECENT_SNAPSHOTS:]
    samples = _newest_with(lives, *(f"batch_{name}" for name in _BATCH)).samples
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
    staged = _known(lives, "step_bytes", 0.0).median
    return {
        "write_bytes_per_second": _positive(bandwidth),
        "write_latency_seconds": Estimate.of(latency) or Estimate.assumed(0.01),
        "differential_bytes": Estimate.of(each) or Estimate.assumed(staged),
        "encode_seconds": _known(lives, "encode_seconds", 0.0),
    }


_BATCH = ("seconds", "bytes", "steps")


def _bandwidth(
    snapshots: Sequence[float], snapshot_bytes: float, batches: Sequence[tuple[float, float]]
) -> Estimate:
    """Bytes per second, of the seconds of snapshots and the seconds and bytes of batches.

    Snapshots are large beside batches, so their rate is the bandwidth. Where batches are of like
    size it need not be: of a small model both are latency, and a snapshot, which is fsynced more
    often than a batch, has more of it. But a latency only slows a write down, so the bandwidth is
    not below any rate, and the highest is nearest to it: the ninth decile, for a clock may jump.
    Batches that are much smaller do not count: if they are faster nevertheless, a cache is.
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
    """The store's bandwidth and latency, told apart in the same way; empty without a store.

    Of one life only: an earlier one may have had a store that was given up.
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
    """Of seconds and bytes: what the bytes do not explain."""
    return [max(0.0, seconds - size / bandwidth.median) for seconds, size in sent]


def _uploads(
    samples: Mapping[str, Sequence[float]], kind: str, recent: int
) -> list[tuple[float, float]]:
    """Seconds and bytes of the newest uploads of a kind."""
    seconds, sizes = (samples.get(f"{kind}_upload_{unit}", ()) for unit in ("seconds", "bytes"))
    return [(s, size) for s, size in zip(seconds, sizes, strict=False) if s > 0][-recent:]


def _recovery(
    lives: Sequence[Life], known: Mapping[str, Estimate], elements: float, num_hosts: int
) -> dict[str, Estimate]:
    """Load and replay are told apart by a line through restarts that replayed differently many."""
    recoveries = [life.facts for life in lives if "recovery_seconds" in life.facts]
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
    # The ranks of a machine write at once; then it reads what the ranks of all have written.
    written = known["snapshot_bytes"].median / known["write_bytes_per_second"].median

    def gaps(*kinds: str) -> Estimate | None:
        found = [life.facts for life in lives if "gap_seconds" in life.facts]
        return Estimate.of([number(f, "gap_seconds") for f in found if f.get("restart") in kinds])

    # What is left of a lost node's measurements was kept some seconds before its end.
    restart = gaps("process") or gaps("node", "unknown")
    return {
        "replay_seconds": _positive(replay),
        "load_seconds": Estimate.of(loads) or Estimate.assumed(num_hosts * written),
        "restart_seconds": restart or Estimate.assumed(ASSUMED_RESTART_SECONDS),
    }


def _known(lives: Sequence[Life], name: str, otherwise: float) -> Estimate:
    samples = _newest_with(lives, name).samples
    return Estimate.of(samples.get(name, ())) or Estimate.assumed(otherwise)


def _positive(estimate: Estimate) -> Estimate:
    """Where the model divides by it: a clock that did not move is not nothing."""
    if estimate.median > 0:
        return estimate
    return Estimate(1e-9, 1e-9, max(1e-9, estimate.high), estimate.count, estimate.source)
