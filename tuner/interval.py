"""The full-snapshot interval that wastes least, in closed form."""

from __future__ import annotations

import math
from dataclasses import dataclass

from lowdiff.errors import ConfigError


@dataclass(frozen=True, slots=True)
class SnapshotCosts:
    """What the choice of interval weighs; all in seconds.

    Attributes:
        step_seconds: One training step (``T``).
        snapshot_seconds: Training time that one full snapshot costs (``C``).
        replay_seconds: Replaying one differential (``r``).
        failure_seconds: Mean time between failures (``M``).
        load_seconds: Loading a snapshot (``R_load``).

    Raises:
        ConfigError: If a duration that must be positive is not.
    """

    step_seconds: float
    snapshot_seconds: float
    replay_seconds: float
    failure_seconds: float
    load_seconds: float = 0.0

    def __post_init__(self) -> None:
        for name in ("step_seconds", "snapshot_seconds", "replay_seconds", "failure_seconds"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} must be positive, got {getattr(self, name)}")


def wasted_share(costs: SnapshotCosts, interval: float) -> float:
    """Expected waste per second of training with a snapshot every ``interval`` steps.

    Snapshots cost ``C / (f T)``; a failure, one in ``M`` seconds, costs the load and the replay of
    half an interval: ``(R_load + r f / 2) / M``. Steps of an unfinished batch are left out: a
    process crash loses none.
    """
    snapshots = costs.snapshot_seconds / (interval * costs.step_seconds)
    recovery = (costs.load_seconds + costs.replay_seconds * interval / 2) / costs.failure_seconds
    return snapshots + recovery


def best_interval(costs: SnapshotCosts) -> int:
    """Steps between snapshots that minimise `wasted_share`: ``sqrt(2 C M / (r T))``.

    Where `Young <https://doi.org/10.1145/361147.361115>`_ weighs lost work against snapshots, here
    replay takes the place of lost work, and is cheaper by ``r / T``.
    """
    optimum = math.sqrt(
        2
        * costs.snapshot_seconds
        * costs.failure_seconds
        / (costs.replay_seconds * costs.step_seconds)
    )
    neighbours = (max(1, math.floor(optimum)), max(1, math.ceil(optimum)))
    return min(neighbours, key=lambda interval: wasted_share(costs, interval))
