"""How often to snapshot: plain measurements in, plain decisions out."""

from lowdiff.tuner.interval import SnapshotCosts, best_interval, wasted_share

__all__ = ["SnapshotCosts", "best_interval", "wasted_share"]
