"""Recovery: plan, replay, verify, export."""

from lowdiff.recovery.engine import recover
from lowdiff.recovery.optimizers import register_optimizer
from lowdiff.recovery.state import RecoveredState

__all__ = ["RecoveredState", "recover", "register_optimizer"]
