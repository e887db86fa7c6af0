"""Tuner: decides how often to snapshot, from plain measurements."""

from lowdiff.tuner.choice import Limits
from lowdiff.tuner.policy import Tuning

__all__ = ["Limits", "Tuning"]
