"""The online policy: small, rare and explained steps towards the setting that wastes least.

Settings move on a grid, intervals by factors of the square root of 2, batches by factors of 2, so
that a choice is a small number, which ranks can tell each other with a gradient's exchange.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from lowdiff.errors import ConfigError
from lowdiff.tuner.choice import Limits, Setting, is_allowed, largest_batch
from lowdiff.tuner.costs import Costs, store_share, waste, writer_share
from lowdiff.tuner.failures import FailurePrior, FailureRates
from lowdiff.tuner.units import readable_bytes, readable_seconds

INTERVAL_LEVELS, BATCH_LEVELS = 31, 13
#: At most a factor of 2 for the interval and for the batch at a time.
_INTERVAL_STRIDE, _BATCH_STRIDE = 2, 1
#: A change must save so much of the waste that settings can change, and so many seconds an hour.
_LEAST_GAIN, _LEAST_SECONDS_PER_HOUR = 0.1, 0.5


@dataclass(frozen=True, slots=True)
class Tuning:
    """What ``snapshot_every="auto"`` and ``batch_size="auto"`` go by.

    Attributes:
        mtbf_hours: Expected time between failures of the whole job, until it has a history.
        node_share: Share of failures that lose staging memory, likewise.
        limits: What must be kept.
        every_steps: Steps between two looks at the measurements.

    Raises:
        ConfigError: If a value cannot be.
    """

    mtbf_hours: float = 24.0
    node_share: float = 0.5
    limits: Limits = field(default_factory=Limits)
    every_steps: int = 16

    def __post_init__(self) -> None:
        if self.every_steps < 1:
            raise ConfigError(f"every_steps counts steps, at least 1, got {self.every_steps}")
        if not self.mtbf_hours > 0:
            raise ConfigError(f"mtbf_hours must be positive, got {self.mtbf_hours}")
        _ = self.prior  # refuses what cannot be

    @property
    def prior(self) -> FailurePrior:
        """As a distribution."""
        return FailurePrior(3600 * self.mtbf_hours, node_share=self.node_share)


@dataclass(frozen=True, slots=True)
class Levels:
    """A setting on the grid.

    Attributes:
        interval: 0 to ``INTERVAL_LEVELS - 1``: ``2 ** (interval / 2)`` steps, rounded.
        batch: 0 to ``BATCH_LEVELS - 1``: ``2 ** batch`` differentials.
    """

    interval: int
    batch: int

    @property
    def setting(self) -> Setting:
        """In steps and differentials."""
        return Setting(round(2 ** (self.interval / 2)), 1 << self.batch)

    @classmethod
    def near(cls, setting: Setting) -> Levels:
        """The grid's point nearest to a setting."""
        return cls(
            min(INTERVAL_LEVELS - 1, round(2 * math.log2(setting.snapshot_every))),
            min(BATCH_LEVELS - 1, round(math.log2(setting.batch_size))),
        )


@dataclass(frozen=True, slots=True)
class Move:
    """A change that pays.

    Attributes:
        levels: Where to.
        reasons: Why, in sentences.
    """

    levels: Levels
    reasons: tuple[str, ...]


def move(
    now: Levels, costs: Costs, rates: FailureRates, limits: Limits, *, tunes: tuple[bool, bool]
) -> Move | None:
    """The change to make now, or None while none pays.

    Hysteresis: waste must fall by a tenth of what depends on the setting, and by half a second per
    hour; unless a limit is broken now and would be less so.

    Args:
        now: Where the run is.
        costs: As measured lately.
        rates: As estimated.
        limits: What must be kept.
        tunes: Whether the interval, and whether the batch, may change.
    """
    wide = _INTERVAL_STRIDE if tunes[0] else 0
    high = _BATCH_STRIDE if tunes[1] else 0
    near = [
        Levels(interval, batch)
        for interval in range(now.interval - wide, now.interval + wide + 1)
        for batch in range(now.batch - high, now.batch + high + 1)
        if 0 <= interval < INTERVAL_LEVELS and 0 <= batch < BATCH_LEVELS
    ]
    best = min(near, key=lambda levels: _badness(levels, costs, rates, limits))
    if best == now:
        return None
    old, new = (waste(costs, rates, *_numbers(levels)) for levels in (now, best))
    breaks = not is_allowed(costs, limits, now.setting)
    fixed = old.differentials + old.restarts + old.loads
    gain = old.total - new.total
    pays = gain > _LEAST_GAIN * (old.total - fixed) and 3600 * gain > _LEAST_SECONDS_PER_HOUR
    if not (pays or breaks):
        return None
    change = f"from {old.seconds_per_hour:.1f} to {new.seconds_per_hour:.1f} seconds per hour"
    reasons = [f"expected waste falls {change}"]
    if breaks:
        busy, sent = (share(costs, *_numbers(now)) for share in (writer_share, store_share))
        store = f", the store {sent:.0%}" if costs.store_bytes_per_second else ""
        reasons.append(f"a limit is not kept now; the writer is {busy:.0%} busy{store}")
    reasons.append(
        f"a step takes {readable_seconds(costs.step_seconds)}, a snapshot "
        f"{readable_seconds(costs.snapshot_seconds)} of training, a durable write "
        f"{readable_seconds(costs.write_latency_seconds)} and a second per "
        f"{readable_bytes(costs.write_bytes_per_second)}, replay "
        f"{readable_seconds(costs.replay_seconds)} a step, and a failure comes every "
        f"{readable_seconds(rates.total.mtbf_seconds)}"
    )
    return Move(best, tuple(reasons))


def _badness(
    levels: Levels, costs: Costs, rates: FailureRates, limits: Limits
) -> tuple[int, bool, float, float]:
    """Limits first; among settings that break them, the nearest to keeping them; then waste."""
    excess = max(0, levels.setting.batch_size - largest_batch(costs, limits)[0])
    allowed = is_allowed(costs, limits, levels.setting)
    numbers = _numbers(levels)
    busy = 0.0 if allowed else max(writer_share(costs, *numbers), store_share(costs, *numbers))
    return excess, not allowed, busy, waste(costs, rates, *numbers).total


def _numbers(levels: Levels) -> tuple[int, int]:
    setting = levels.setting
    return setting.snapshot_every, setting.batch_size
