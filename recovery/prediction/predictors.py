"""Predictors of parameters in closed form: the last state, a damped trend, shared auto-regression.

Source: Wang et al., 'Rehabilitating over Recomputing' (CPSR): after a failure the parameters of the failed step are
predicted from checkpoints of the past; histories are denoised by dropping high frequencies over time (FDD). We fit to
one run's own history and share a handful of weights among all of its parameters.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import torch

from lowdiff.errors import ConfigError
from lowdiff.recovery.prediction.history import History

_DAMPINGS = (0.0, 0.25, 0.5, 0.75, 1.0)
_RIDGE = 1e-3


class Predictor(Protocol):
    """Says what a run's parameters would have been at a later step."""

    @property
    def name(self) -> str:
        """Return what it is called in decisions."""

    @property
    def least_states(self) -> int:
        """Return how many states a history must have."""

    def predict(self, history: History, step: int) -> dict[str, torch.Tensor]:
        """Return flat float32 values by parameter's name.

        Args:
            history: At least ``least_states`` states.
            step: Behind the history's last one.
        """


def backtest(predictor: Predictor, history: History) -> list[tuple[int, float]]:
    """Return how well each state of a history is predicted from the states before it.

    Returns:
        Pairs of the number of states that were seen and the mean squared error of one parameter, for
        `lowdiff.tuner.lost_tail.PredictorCurve`. What a predictor refuses is left out.
    """
    found = []
    for seen in range(predictor.least_states, len(history.steps)):
        try:
            made = predictor.predict(history.until(history.steps[seen - 1]), history.steps[seen])
        except ConfigError:
            continue
        errors = [(made[n] - own[seen]).double().square() for n, own in history.parameters.items()]
        found.append((seen, float(torch.cat(errors).mean())))
    return found


@dataclass(frozen=True, slots=True)
class Stale:
    """The last state as it is: what every other predictor must beat."""

    name: str = "stale"
    least_states: int = 1

    def predict(self, history: History, step: int) -> dict[str, torch.Tensor]:
        """See ``Predictor.predict``."""
        return {name: own[-1].clone() for name, own in history.parameters.items()}


@dataclass(frozen=True, slots=True)
class DampedLinear:
    """The last movement goes on, by a share of it that would have predicted the last state best.

    Reference: Gardner and McKenzie, "Forecasting Trends in Time Series", Management Science 1985 (damped trend).
    """

    name: str = "damped linear"
    least_states: int = 2

    def predict(self, history: History, step: int) -> dict[str, torch.Tensor]:
        """See ``Predictor.predict``."""
        damping = 0.5 if len(history.steps) < 3 else self._best(history)
        return _moved(history, damping, step)

    def _best(self, history: History) -> float:
        before = history.until(history.steps[-2])
        errors = {}
        for damping in _DAMPINGS:
            made = _moved(before, damping, history.steps[-1])
            errors[damping] = sum(
                float((made[n] - own[-1]).double().square().sum())
                for n, own in history.parameters.items()
            )
        return min(errors, key=lambda damping: errors[damping])


def _moved(history: History, damping: float, step: int) -> dict[str, torch.Tensor]:
    """Return the last state, moved on by a share of what its last movement would come to."""
    before, last = history.steps[-2:]
    share = damping * (step - last) / (last - before)
    return {n: own[-1] + share * (own[-1] - own[-2]) for n, own in history.parameters.items()}


@dataclass(frozen=True, slots=True)
class AutoRegressive:
    """Each movement is a sum of the last ones, by weights that all parameters share.

    The history is laid on even distances that divide the distance to the predicted step; weights are those of least
    squares, with a ridge.

    Attributes:
        window: Movements that count.
        kept: Share of the frequencies over time that stay (FDD), lowest first; 1 keeps all.

    Raises:
        ConfigError: If a setting is out of range.
    """

    window: int = 3
    kept: float = 1.0

    def __post_init__(self) -> None:
        if self.window < 1:
            raise ConfigError(f"window counts movements, at least 1, got {self.window}")
        if not 0 < self.kept <= 1:
            raise ConfigError(f"kept is a share in (0, 1], got {self.kept}")

    @property
    def name(self) -> str:
        """See ``Predictor.name``."""
        return "auto-regressive" if self.kept == 1 else "denoised auto-regressive"

    @property
    def least_states(self) -> int:
        """See ``Predictor.least_states``: each weight needs a movement behind its window."""
        return self.window + 2

    def predict(self, history: History, step: int) -> dict[str, torch.Tensor]:
        """See ``Predictor.predict``."""
        last = history.steps[-1]
        usual = statistics.median(later - earlier for earlier, later in pairwise(history.steps))
        num_ahead = max(1, round((step - last) / usual))
        spacing = (step - last) / num_ahead
        count = min(len(history.steps), int((last - history.steps[0]) / spacing) + 1)
        if count < self.least_states:
            raise ConfigError(
                f"{len(history.steps)} states over {last - history.steps[0]} steps are too few to predict "
                f"{step - last} steps with a window of {self.window}"
            )
        even = last - spacing * torch.arange(count - 1, -1, -1, dtype=torch.float64)
        values = history.at(even)
        if self.kept < 1:
            values = {name: denoised(own, self.kept) for name, own in values.items()}
        moves = {name: own.diff(dim=0) for name, own in values.items()}
        weights = self._weights(moves)
        made = {}
        for name, own in moves.items():
            recent, total = list(own[-self.window :]), history.parameters[name][-1].clone()
            for _ in range(num_ahead):
                ahead = torch.einsum("w,wn->n", weights, torch.stack(recent))
                total += ahead
                recent = [*recent[1:], ahead]
            made[name] = total
        return made

    def _weights(self, moves: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the weights of least squares, oldest movement first, float32 ``[window]``."""
        gram = torch.zeros(self.window, self.window, dtype=torch.float64)
        right = torch.zeros(self.window, dtype=torch.float64)
        for own in moves.values():
            for k in range(self.window, len(own)):
                seen = own[k - self.window : k].double()
                gram += seen @ seen.T
                right += seen @ own[k].double()
        ridge = _RIDGE * max(float(gram.diagonal().mean()), 1e-300)
        gram += ridge * torch.eye(self.window, dtype=torch.float64)
        found: torch.Tensor = torch.linalg.solve(gram, right)
        return found.float()


def denoised(values: torch.Tensor, kept: float) -> torch.Tensor:
    """Drop high frequencies over time from what goes beyond the line from the first state to the last.

    Args:
        values: ``[n, numel]``, at even distances.
        kept: Share of the frequencies that stay, lowest first.
    """
    if not values.numel():
        return values
    count = len(values)
    shares = torch.linspace(0, 1, count)[:, None]
    line = torch.lerp(values[:1], values[-1:], shares)
    spectrum = torch.fft.rfft(values - line, dim=0)
    spectrum[math.ceil(kept * len(spectrum)) :] = 0
    back: torch.Tensor = torch.fft.irfft(spectrum, n=count, dim=0)
    return line + back
