"""Choose the settings that waste least within the user's limits, and explain the choice."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from lowdiff.errors import ConfigError
from lowdiff.tuner.costs import (
    Costs,
    Waste,
    batch_seconds,
    best_interval,
    disk_seconds_per_step,
    fixed_recovery_seconds,
    loop_seconds,
    recovery_seconds,
    waste,
    writer_share,
    written_bytes_per_step,
)  # fmt: skip
from lowdiff.tuner.failures import FailureRates
from lowdiff.tuner.units import readable_bytes, readable_seconds

MAX_BATCH = 4096
MAX_INTERVAL = 1_000_000


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits that the user sets; None for no limit.

    Attributes:
        writer_share: Largest busy share of the writer's disk. The writer's core may be busy all the
            time.
        staging_bytes: Staging memory of one rank for a snapshot's image and two batches. Copies of
            the error-feedback residual are not included.
        loss_steps: Steps that the loss of a node may take: at most ``2 b`` are at risk.
        bytes_per_hour: Bytes that all ranks may write in an hour of training.
        total_bytes: Bytes that the run folder may hold, of all ranks.
        kept_snapshots: Number of snapshots that retention keeps, with the differentials after them.

    Raises:
        ConfigError: If a value is out of range.
    """

    writer_share: float = 0.8
    staging_bytes: float | None = None
    loss_steps: int | None = None
    bytes_per_hour: float | None = None
    total_bytes: float | None = None
    kept_snapshots: int = 2

    def __post_init__(self) -> None:
        if not 0 < self.writer_share <= 1:
            raise ConfigError(f"writer_share is a share, 0 to 1, got {self.writer_share}")
        if not is_count(self.kept_snapshots) or self.kept_snapshots < 1:
            raise ConfigError(
                f"kept_snapshots counts snapshots: give an int, at least 1, got {self.kept_snapshots!r}"
            )
        if self.loss_steps is not None and not is_count(self.loss_steps):
            raise ConfigError(
                f"loss_steps counts steps: give an int, at least 2, or None, got {self.loss_steps!r}"
            )
        if self.loss_steps is not None and self.loss_steps < 2:
            raise ConfigError(
                f"losing a node can take two steps even if each is written by itself, so "
                f"loss_steps is at least 2, got {self.loss_steps}"
            )
        for name in ("staging_bytes", "bytes_per_hour", "total_bytes"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"{name} must be positive, got {value}")

    def with_snapshots(self, snapshots: int | None) -> Limits:
        """Return limits with retention's number of snapshots; unchanged if there is none."""
        return self if snapshots is None else replace(self, kept_snapshots=snapshots)


def is_count(value: object) -> bool:
    """Return whether a value is a whole number; True and False are not."""
    return isinstance(value, int) and not isinstance(value, bool)


@dataclass(frozen=True, slots=True)
class Setting:
    """One pair of settings.

    Attributes:
        snapshot_every: Steps between full snapshots (``f``).
        batch_size: Differentials per durable write (``b``).
    """

    snapshot_every: int
    batch_size: int


@dataclass(frozen=True, slots=True)
class Choice:
    """A recommendation.

    Attributes:
        setting: The settings to use.
        waste: Expected waste with these settings.
        reasons: Reasons for the choice, in sentences.
        broken: Limits that no setting keeps, in sentences; the choice then ignores them.
    """

    setting: Setting
    waste: Waste
    reasons: tuple[str, ...]
    broken: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Intervals:
    """Intervals that are allowed for one batch size; none if the shortest is above the longest.

    Attributes:
        low: The shortest interval; infinite if no interval is long enough.
        high: The longest interval; 0 if no interval is short enough.
        low_because: The limit that sets ``low``; empty if there is none.
        high_because: The limit that sets ``high``; empty if there is none.
    """

    low: float
    high: float
    low_because: str
    high_because: str


def recommend(costs: Costs, rates: FailureRates, limits: Limits) -> Choice:
    """Choose the best ``f`` in closed form for every allowed batch size, and the best pair of these.

    For a fixed ``b``, waste is convex in ``f``: the best allowed ``f`` is the one nearest to
    ``f*``.

    Raises:
        ConfigError: If failures come faster than a restart takes.
    """
    check_progress(costs, rates)
    broken: list[str] = []
    ideal = best_interval(costs, rates)
    most, most_because = largest_batch(costs, limits)
    if most < 1:
        broken.append(_no_room(costs, limits))
        most, most_because = 1, ""
    candidates: list[tuple[float, Setting, Intervals]] = []
    for b in range(1, most + 1):
        allowed = allowed_intervals(costs, limits, b)
        if allowed.low <= allowed.high:
            f = _whole(costs, rates, min(max(ideal, allowed.low), allowed.high), b, allowed)
            candidates.append((waste(costs, rates, f, b).total, Setting(f, b), allowed))
            if allowed.low <= ideal:
                break  # a larger batch allows no better interval and loses more steps
    if not candidates:
        broken += _conflict(costs, limits, most)
        candidates = _by_waste_alone(costs, rates, ideal, most)
    _, setting, allowed = min(candidates, key=lambda found: found[0])
    reasons = _reasons(costs, rates, limits, setting, ideal, allowed, most, most_because)
    chosen = waste(costs, rates, setting.snapshot_every, setting.batch_size)
    return Choice(setting, chosen, tuple(reasons), tuple(broken))


def _by_waste_alone(
    costs: Costs, rates: FailureRates, ideal: float, most: int
) -> list[tuple[float, Setting, Intervals]]:
    """Return settings by waste alone, for limits that no setting keeps; the least wait is best."""
    first = max(1, min(MAX_INTERVAL, math.ceil(ideal)))
    intervals = [first << k for k in range(16) if first << k <= MAX_INTERVAL]
    batches = [1 << k for k in range(13) if 1 << k <= most]
    return [
        (waste(costs, rates, f, b).total, Setting(f, b), Intervals(1, MAX_INTERVAL, "", ""))
        for f in intervals
        for b in batches
    ]


def check_progress(costs: Costs, rates: FailureRates) -> None:
    """Raise an error if failures come faster than a restart takes.

    Raises:
        ConfigError: If so; the message has both times.
    """
    least = recovery_seconds(costs, 1, 1)
    mtbf = rates.total.mtbf_seconds
    if mtbf <= least:
        raise ConfigError(
            f"a failure every {readable_seconds(mtbf)} is sooner than a restart takes "
            f"({readable_seconds(least)}: {readable_seconds(costs.restart_seconds)} to start, "
            f"{readable_seconds(costs.load_seconds)} to load): the job cannot progress, however "
            "often it is saved. Check the MTBF, or make restarts faster"
        )


def is_allowed(costs: Costs, limits: Limits, setting: Setting) -> bool:
    """Return whether a setting keeps all limits."""
    allowed = allowed_intervals(costs, limits, setting.batch_size)
    return (
        setting.batch_size <= largest_batch(costs, limits)[0]
        and allowed.low <= setting.snapshot_every <= allowed.high
    )


def stored_bytes(costs: Costs, limits: Limits, f: float) -> float:
    """Return the most bytes that the run folder holds: the kept snapshots and a new one, all ranks."""
    snapshots = (limits.kept_snapshots + 1) * costs.snapshot_bytes
    differentials = limits.kept_snapshots * f * costs.differential_bytes
    return costs.world_size * (snapshots + differentials)


def written_bytes_per_hour(costs: Costs, f: float, b: float) -> float:
    """Return the bytes that all ranks write in an hour of training."""
    per_step = written_bytes_per_step(costs, f)
    return 3600 / loop_seconds(costs, f, b) * per_step * costs.world_size


def largest_batch(costs: Costs, limits: Limits) -> tuple[int, str]:
    """Return the largest batch within the limits, and the limit that sets it; below 1 if none."""
    found = [(float(MAX_BATCH), "")]
    if limits.loss_steps is not None:
        found.append((limits.loss_steps // 2, f"at most {limits.loss_steps} steps may be lost"))
    if limits.staging_bytes is not None:
        room = limits.staging_bytes - costs.snapshot_bytes
        memory = readable_bytes(limits.staging_bytes)
        because = f"2 b differentials and a snapshot fit into {memory}"
        if room < 0:
            found.append((0.0, because))
        elif costs.staged_bytes:
            found.append((room / (2 * costs.staged_bytes), because))
    most, because = min(found, key=lambda limit: limit[0])
    return math.floor(most), because


def allowed_intervals(costs: Costs, limits: Limits, b: int) -> Intervals:
    """Return the intervals at which the writer keeps up and storage suffices."""
    lows, highs = [(1.0, "")], [(float(MAX_INTERVAL), "")]
    own = costs.step_seconds + costs.differential_seconds
    spare = limits.writer_share * own - disk_seconds_per_step(costs, math.inf, b)
    writing = costs.snapshot_bytes / costs.write_bytes_per_second
    # A step takes C/f longer with snapshots; the disk uses this time for part of a snapshot.
    need = writing - limits.writer_share * costs.snapshot_seconds
    if spare <= 0 or costs.encode_seconds > own:
        lows.append((math.inf, "the writer cannot keep up"))
    else:
        lows.append((need / spare, "the writer must keep up with snapshots"))
    if limits.bytes_per_hour is not None:
        low = _least_interval(costs, limits.bytes_per_hour / costs.world_size / 3600)
        lows.append((low, f"{readable_bytes(limits.bytes_per_hour)} may be written in an hour"))
    if limits.total_bytes is not None:
        snapshots = (limits.kept_snapshots + 1) * costs.snapshot_bytes
        room = limits.total_bytes / costs.world_size - snapshots
        if costs.differential_bytes or room < 0:
            each = limits.kept_snapshots * costs.differential_bytes
            high = room / each if room >= 0 else 0.0
            highs.append((high, f"the run may hold {readable_bytes(limits.total_bytes)}"))
    low, low_because = max(lows, key=lambda limit: limit[0])
    high, high_because = min(highs, key=lambda limit: limit[0])
    store = min(_interval_of_store(costs, limits), high)
    if store > low:
        low, low_because = store, "the store must keep up with snapshots"
    low = low if math.isinf(low) else math.ceil(low - 1e-9)
    return Intervals(max(1.0, low), math.floor(high + 1e-9), low_because, high_because)


def _least_interval(costs: Costs, bytes_per_second: float) -> float:
    """Return the shortest interval at which a rank writes no more than a rate; infinite if none."""
    spare = bytes_per_second * (costs.step_seconds + costs.differential_seconds)
    spare -= costs.differential_bytes
    # A step takes C/f longer with snapshots, which is more time for the same bytes.
    extra = costs.snapshot_bytes - bytes_per_second * costs.snapshot_seconds
    return extra / spare if spare > 0 else math.inf


def _interval_of_store(costs: Costs, limits: Limits) -> float:
    """Return the shortest interval at which a store keeps up.

    Training never waits for a store. If differentials alone take half of the store's bandwidth,
    rarer snapshots would cost more than they help: then the store sets no limit, and the report
    warns that the store falls behind.
    """
    allowed = limits.writer_share * costs.store_bytes_per_second
    own = costs.step_seconds + costs.differential_seconds
    if allowed * own < 2 * costs.differential_bytes:
        return 1.0
    return _least_interval(costs, allowed)


def _whole(costs: Costs, rates: FailureRates, f: float, b: int, allowed: Intervals) -> int:
    """Return the better of the two whole numbers next to an interval."""
    near = {math.floor(f), math.ceil(f)}
    fitting = [n for n in near if allowed.low <= n <= allowed.high]
    return min(fitting, key=lambda n: waste(costs, rates, n, b).total)


def _no_room(costs: Costs, limits: Limits) -> str:
    """Say that memory is too small for any batch; only memory can be, as loss_steps allows b = 1."""
    assert limits.staging_bytes is not None
    least = readable_bytes(costs.snapshot_bytes + 2 * costs.staged_bytes)
    return (
        f"staging memory of {readable_bytes(limits.staging_bytes)} is too little: a snapshot of "
        f"{readable_bytes(costs.snapshot_bytes)} and, with b = 1, two differentials of "
        f"{readable_bytes(costs.staged_bytes)} need at least {least} on each rank"
    )


def _conflict(costs: Costs, limits: Limits, most: int) -> list[str]:
    """Name the limits that even the largest batch breaks; no other limit bounds its interval."""
    found = [*_writer_too_slow(costs, limits, most), *_storage_too_small(costs, limits)]
    if found:
        return found
    allowed = allowed_intervals(costs, limits, most)
    high_because = allowed.high_because or "no longer interval is considered"
    text = (
        f"{allowed.low_because}, which needs f of at least {allowed.low:,.0f}, but {high_because}, "
        f"which needs f of at most {allowed.high:,.0f}"
    )
    return [text]


def _writer_too_slow(costs: Costs, limits: Limits, most: int) -> Iterator[str]:
    """Say that the writer cannot keep up with differentials even without any snapshot."""
    own = costs.step_seconds + costs.differential_seconds
    if costs.encode_seconds > own:
        yield (
            f"the writer cannot keep up: compressing a step takes it "
            f"{readable_seconds(costs.encode_seconds)} of a core, a step "
            f"{readable_seconds(own)}; lower the density"
        )
    busy = disk_seconds_per_step(costs, math.inf, most) / own
    if busy >= limits.writer_share:
        larger = "larger batches, " if most < MAX_BATCH else ""
        yield (
            f"the writer cannot keep up: even without snapshots differentials alone keep the disk "
            f"busy for {busy:.0%} of a step with b = {most}, more than {limits.writer_share:.0%}; "
            f"{larger}more bandwidth or a lower density is needed"
        )


def _storage_too_small(costs: Costs, limits: Limits) -> Iterator[str]:
    """Say that a limit of bytes forbids what every interval needs."""
    own = costs.step_seconds + costs.differential_seconds
    hourly = 3600 / own * costs.differential_bytes * costs.world_size
    if limits.bytes_per_hour is not None and hourly >= limits.bytes_per_hour:
        yield (
            f"{readable_bytes(limits.bytes_per_hour)} may be written in an hour, but differentials "
            f"alone are {readable_bytes(hourly)}; raise --per-hour or lower the density"
        )
    if limits.total_bytes is None:
        return
    snapshots = (limits.kept_snapshots + 1) * costs.snapshot_bytes * costs.world_size
    least = stored_bytes(costs, limits, 1)
    if least > limits.total_bytes:
        alone, takes = "snapshots alone take", readable_bytes(snapshots)
        if snapshots <= limits.total_bytes:
            alone, takes = "snapshots, a step apart, take", readable_bytes(least)
        yield (
            f"the run may hold {readable_bytes(limits.total_bytes)}, but "
            f"{limits.kept_snapshots + 1} {alone} {takes}; raise --total"
        )


def _reasons(
    costs: Costs,
    rates: FailureRates,
    limits: Limits,
    setting: Setting,
    ideal: float,
    allowed: Intervals,
    most: int,
    most_because: str,
) -> list[str]:
    f, b = setting.snapshot_every, setting.batch_size
    found = [weighed(costs, rates, ideal)]
    if f > ideal + 1:
        why = allowed.low_because or "training would wait for snapshots even more"
        found.append(f"raised to {f:,}: {why}")
    elif f < ideal - 1:
        found.append(f"lowered to {f:,}: {allowed.high_because or 'no larger one is considered'}")
    found.append(why_batch(costs, f, b, most=most, allowed_share=limits.writer_share))
    if b == most and most_because:
        found.append(f"no larger batch: {most_because}")
    return found


def weighed(costs: Costs, rates: FailureRates, ideal: float) -> str:
    """Return the formula of `best_interval` with every number in it."""
    fixed = fixed_recovery_seconds(costs)
    sign = "-" if fixed < 0 else ""
    return (
        f"f = sqrt(2 C (M + K) / (r (T + d))) = {ideal:,.0f}: a snapshot takes C = "
        f"{readable_seconds(costs.snapshot_seconds)} of training, a failure comes every M = "
        f"{readable_seconds(rates.total.mtbf_seconds)}, a restart with its loading, less r/2, "
        f"takes K = {sign}{readable_seconds(abs(fixed))}, replaying one of the steps since "
        f"the snapshot r = {readable_seconds(costs.replay_seconds)}, and a step with its differential takes "
        f"T + d = {readable_seconds(costs.step_seconds + costs.differential_seconds)}"
    )


def why_batch(costs: Costs, f: int, b: int, *, most: int, allowed_share: float) -> str:
    """Explain the choice of a batch size; ``most`` is the largest that the limits allow."""
    busy = writer_share(costs, f, b)
    if busy > allowed_share + 1e-9:
        others = "" if most == 1 else ", and no larger batch would waste less"
        return (
            f"b = {b}: the writer is busy for {busy:.0%} of a step, more than the "
            f"{allowed_share:.0%} it should be{others}"
        )
    if b == 1:
        return "b = 1: the writer keeps up with every step by itself, so nothing is gained"
    return (
        f"b = {b}: a durable write takes {readable_seconds(batch_seconds(costs, b))}, and in "
        f"smaller batches the disk would be busy for more than {allowed_share:.0%}, or "
        "snapshots would have to be rarer"
    )
