"""Recovery: plan, replay, verify, export. Names load on first use: `inspection` needs no torch."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lowdiff.recovery.engine import recover
    from lowdiff.recovery.follower import Follower
    from lowdiff.recovery.replay.optimizers import register_optimizer
    from lowdiff.recovery.replay.replayer import ReplayOptions
    from lowdiff.recovery.state import RecoveredState

__all__ = ["Follower", "RecoveredState", "ReplayOptions", "recover", "register_optimizer"]

_HOMES = {
    "Follower": "lowdiff.recovery.follower",
    "RecoveredState": "lowdiff.recovery.state",
    "ReplayOptions": "lowdiff.recovery.replay.replayer",
    "recover": "lowdiff.recovery.engine",
    "register_optimizer": "lowdiff.recovery.replay.optimizers",
}

# Hidden from type checkers, which would otherwise accept any name at all.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(_HOMES[name]), name)
