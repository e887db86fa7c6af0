"""How often to snapshot: plain measurements in, plain decisions out."""

from lowdiff.tuner.choice import Limits
from lowdiff.tuner.policy import Tuning

__all__ = ["Limits", "Tuning"]
