"""Predict the state of steps that are lost, from states of the past; inexact, and only where a user's own loss says so."""

from lowdiff.recovery.prediction.gate import choose
from lowdiff.recovery.prediction.history import History, predicted_state
from lowdiff.recovery.prediction.predictors import (
    AutoRegressive,
    DampedLinear,
    Predictor,
    Stale,
    backtest,
)
from lowdiff.recovery.prediction.temporal import Temporal
from lowdiff.types import Decision

__all__ = [
    "AutoRegressive",
    "DampedLinear",
    "Decision",
    "History",
    "Predictor",
    "Stale",
    "Temporal",
    "backtest",
    "choose",
    "predicted_state",
]
