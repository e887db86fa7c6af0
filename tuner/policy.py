"""Online policy: moves the settings in small, rare and explained steps to those that waste least.

Settings move on a grid: intervals by factors of the square root of 2, batches by factors of 2. A
choice is thus a small number, which ranks can send along with a gradient's exchange.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field

from lowdiff.errors import ConfigError
from lowdiff.tuner.choice import (
    MAX_INTERVAL,
    Intervals,
    Limits,
    Setting,
    allowed_intervals,
    is_count,
    largest_batch,
    stored_bytes,
)
from lowdiff.tuner.costs import Costs, store_share, waste, writer_share
from lowdiff.tuner.failures import FailurePrior, FailureRates
from lowdiff.tuner.units import readable_bytes, readable_seconds

INTERVAL_LEVELS, BATCH_LEVELS = 31, 13
#: Levels per move: at most a factor of 2 for the interval and for the batch.
_INTERVAL_STRIDE, _BATCH_STRIDE = 2, 1
#: Least gain of a change: share of the waste that settings influence, and seconds per hour.
_LEAST_GAIN, _LEAST_SECONDS_PER_HOUR = 0.1, 0.5


@dataclass(frozen=True, slots=True)
class Tuning:
    """Settings of ``snapshot_every="auto"`` and ``batch_size="auto"``.

    Attributes:
        mtbf_hours: Expected time between failures of the whole job, until failures are observed.
        node_share: Expected share of failures that lose staging memory, until failures are
            observed.
        limits: Limits to be kept.
        every_steps: Steps between two evaluations of the measurements.

    Raises:
        ConfigError: If a value is out of range.
    """

    mtbf_hours: float = 24.0
    node_share: float = 0.5
    limits: Limits = field(default_factory=Limits)
    every_steps: int = 16

    def __post_init__(self) -> None:
        if not is_count(self.every_steps) or self.every_steps < 1:
            raise ConfigError(
                f"every_steps counts steps: give an int, at least 1, got {self.every_steps!r}"
            )
        if not self.mtbf_hours > 0:
            raise ConfigError(f"mtbf_hours must be positive, got {self.mtbf_hours}")
        _ = self.prior  # raises ConfigError for values out of range

    @property
    def prior(self) -> FailurePrior:
        """Return the expected failures as a distribution."""
        return FailurePrior(3600 * self.mtbf_hours, node_share=self.node_share)


@dataclass(frozen=True, slots=True)
class Levels:
    """Settings as levels of the grid.

    Attributes:
        interval: 0 to ``INTERVAL_LEVELS - 1``: ``2 ** (interval / 2)`` steps, rounded.
        batch: 0 to ``BATCH_LEVELS - 1``: ``2 ** batch`` differentials.
    """

    interval: int
    batch: int

    @property
    def setting(self) -> Setting:
        """Return the settings in steps and differentials."""
        return Setting(round(2 ** (self.interval / 2)), 1 << self.batch)

    @classmethod
    def near(cls, setting: Setting) -> Levels:
        """Return the point of the grid nearest to a setting."""
        return cls(
            min(INTERVAL_LEVELS - 1, round(2 * math.log2(setting.snapshot_every))),
            min(BATCH_LEVELS - 1, round(math.log2(setting.batch_size))),
        )


_INTERVALS = [Levels(interval, 0).setting.snapshot_every for interval in range(INTERVAL_LEVELS)]


@dataclass(frozen=True, slots=True)
class Move:
    """A worthwhile change of the settings.

    Attributes:
        levels: The new levels.
        reasons: Reasons for the change, in sentences.
    """

    levels: Levels
    reasons: tuple[str, ...]


def move(
    now: Levels, costs: Costs, rates: FailureRates, limits: Limits, *, tunes: tuple[bool, bool]
) -> Move | None:
    """Return the change to make now, or None while no change is worthwhile.

    If a limit is broken, the change takes the shortest way to levels that keep all limits, and
    among equal ways the one of least waste. If no setting keeps the limits, waste decides alone, as
    in `choice.recommend`.

    Hysteresis: a change must reduce the part of the waste that settings influence by a tenth, and
    by half a second per hour, unless a limit is broken now and can be kept.

    Args:
        now: Levels that the run uses.
        costs: Costs as measured lately.
        rates: Estimated failure rates.
        limits: Limits to be kept.
        tunes: Whether the interval may change, and whether the batch may change.
    """
    wide = _INTERVAL_STRIDE if tunes[0] else 0
    high = _BATCH_STRIDE if tunes[1] else 0
    near = [
        Levels(interval, batch)
        for interval in range(now.interval - wide, now.interval + wide + 1)
        for batch in range(now.batch - high, now.batch + high + 1)
        if 0 <= interval < INTERVAL_LEVELS and 0 <= batch < BATCH_LEVELS
    ]
    goal = _Goal.of(now, costs, limits, tunes)
    best = min(near, key=lambda at: (goal.moves_from(at), waste(costs, rates, *_numbers(at)).total))
    if best == now:
        return None
    old, new = (waste(costs, rates, *_numbers(levels)) for levels in (now, best))
    breaks = goal.moves_from(now) > 0
    fixed = old.differentials + old.restarts + old.loads
    gain = old.total - new.total
    # While training waits for a writer that no setting relieves, any gain counts.
    is_much = gain > _LEAST_GAIN * (old.total - fixed) or old.backpressure > 0
    pays = is_much and 3600 * gain > _LEAST_SECONDS_PER_HOUR
    if not (pays or breaks):
        return None
    change = f"from {old.seconds_per_hour:.1f} to {new.seconds_per_hour:.1f} seconds per hour"
    reasons = [f"expected waste {'falls' if gain > 0 else 'grows'} {change}"]
    if breaks:
        reasons.append(f"a limit is not kept now; {_load(now, costs, limits)}")
    if goal.is_out_of_reach:
        reasons.append("no setting keeps all limits: waste decides where they cannot")
    reasons.append(
        f"a step takes {readable_seconds(costs.step_seconds)}, a snapshot "
        f"{readable_seconds(costs.snapshot_seconds)} of training, a durable write "
        f"{readable_seconds(costs.write_latency_seconds)} and a second per "
        f"{readable_bytes(costs.write_bytes_per_second)}, replay "
        f"{readable_seconds(costs.replay_seconds)} a step, and a failure comes every "
        f"{readable_seconds(rates.total.mtbf_seconds)}"
    )
    return Move(best, tuple(reasons))


@dataclass(frozen=True, slots=True)
class _Goal:
    """Levels of the grid that keep the limits.

    Attributes:
        intervals: Level of the batch -> first and last level of the interval.
        is_out_of_reach: Whether no setting keeps all limits. Limits of the interval then count for
            nothing, and the batch is as small as possible, or fixed.
    """

    intervals: Mapping[int, tuple[int, int]]
    is_out_of_reach: bool

    @classmethod
    def of(cls, now: Levels, costs: Costs, limits: Limits, tunes: tuple[bool, bool]) -> _Goal:
        """Return the goal among the levels that may change."""
        tunes_interval, tunes_batch = tunes
        lowest, highest = (0, INTERVAL_LEVELS - 1) if tunes_interval else (now.interval,) * 2
        most, _ = largest_batch(costs, limits)
        fitting = [batch for batch in range(BATCH_LEVELS) if 1 << batch <= most]
        batches = (fitting or [0]) if tunes_batch else [now.batch]
        inside: dict[int, tuple[int, int]] = {}
        beside: dict[int, tuple[int, int]] = {}
        for batch in batches:
            first, last = _on_grid(allowed_intervals(costs, limits, 1 << batch))
            if max(first, lowest) <= min(last, highest):
                inside[batch] = max(first, lowest), min(last, highest)
            elif lowest <= last == first - 1 < highest:
                beside[batch] = last, first
        # If two limits meet between two points of the grid, both points are equally near.
        found = inside or beside
        is_out_of_reach = not found or not set(batches) <= set(fitting)
        return cls(found or dict.fromkeys(batches, (lowest, highest)), is_out_of_reach)

    def moves_from(self, levels: Levels) -> int:
        """Return the number of moves to the goal; 0 at the goal."""
        return min(
            max(
                -(-abs(levels.batch - batch) // _BATCH_STRIDE),
                -(-max(first - levels.interval, levels.interval - last) // _INTERVAL_STRIDE),
            )
            for batch, (first, last) in self.intervals.items()
        )


def _on_grid(allowed: Intervals) -> tuple[int, int]:
    """Return the first and last level within a range; the last grid point stands for all beyond."""
    if allowed.low > MAX_INTERVAL:
        return INTERVAL_LEVELS, -1
    first = bisect_left(_INTERVALS, min(allowed.low, _INTERVALS[-1]))
    return first, bisect_right(_INTERVALS, allowed.high) - 1


def _load(levels: Levels, costs: Costs, limits: Limits) -> str:
    """Return in words how much of the limited resources a setting uses."""
    busy, sent = (share(costs, *_numbers(levels)) for share in (writer_share, store_share))
    found = f"the writer is {busy:.0%} busy"
    if costs.store_bytes_per_second:
        found += f", the store {sent:.0%}"
    if limits.total_bytes is not None:
        held = stored_bytes(costs, limits, levels.setting.snapshot_every)
        found += f", and the run comes to hold {readable_bytes(held)}"
    return found


def _numbers(levels: Levels) -> tuple[int, int]:
    setting = levels.setting
    return setting.snapshot_every, setting.batch_size
