"""Take the best of several predictions, if the user's own loss says that it is better than the last state."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch

from lowdiff.errors import ConfigError
from lowdiff.recovery.prediction.history import History
from lowdiff.recovery.prediction.predictors import AutoRegressive, DampedLinear, Predictor, Stale
from lowdiff.recovery.prediction.temporal import Temporal
from lowdiff.types import Decision

#: What is tried where the user names nothing.
PREDICTORS: tuple[Predictor, ...] = (
    DampedLinear(),
    AutoRegressive(),
    AutoRegressive(kept=0.5),
    Temporal(),
)
#: Loss on what is held out of a model with these parameters, name -> flat values.
Validate = Callable[[Mapping[str, torch.Tensor]], float]


def choose(
    history: History,
    step: int,
    validate: Validate,
    *,
    predictors: Sequence[Predictor] = PREDICTORS,
    margin: float = 0.01,
) -> tuple[Decision, dict[str, torch.Tensor] | None]:
    """Predict a step in several ways, and take the best if it beats the last state by a margin.

    Args:
        history: Ends with the last state that is known.
        step: The step that training had reached.
        validate: Called with each candidate. If it raises, or its loss of the last state is no finite number,
            nothing is predicted.
        predictors: What is tried.
        margin: Share of the last state's loss by which the best must lie below it.

    Returns:
        The decision, and the parameters that were taken, flat by name; None if none were.

    Raises:
        ConfigError: If the step is not behind the history, or the margin is negative.
    """
    base = history.steps[-1]
    if step <= base:
        raise ConfigError(f"step {step} is not behind step {base}, so nothing is lost")
    if not margin >= 0:
        raise ConfigError(f"margin is a share of the loss, at least 0, got {margin}")
    losses: dict[str, float] = {}
    refused: dict[str, str] = {}
    best: tuple[float, str, dict[str, torch.Tensor]] | None = None

    def decided(chosen: str, reason: str) -> Decision:
        return Decision(base, step, losses, refused, chosen, reason)

    for predictor in (Stale(), *predictors):
        if len(history.steps) < predictor.least_states:
            refused[predictor.name] = (
                f"needs {predictor.least_states} states, the history has {len(history.steps)}"
            )
            continue
        try:
            made = predictor.predict(history, step)
        except (ConfigError, RuntimeError, MemoryError) as error:
            refused[predictor.name] = str(error)
            continue
        if not all(bool(values.isfinite().all()) for values in made.values()):
            refused[predictor.name] = "its values are not finite"
            if predictor == Stale():
                return decided("", "the last state is not finite; nothing is predicted"), None
            continue
        try:
            found = float(validate(made))
        except Exception as error:  # noqa: BLE001  whatever the user's function raises
            return decided("", f"validate raised {error!r}; nothing is predicted"), None
        loss = losses[predictor.name] = found if math.isfinite(found) else math.inf
        if losses[Stale().name] == math.inf:
            return decided(
                "", "the last state's loss is no finite number; nothing is predicted"
            ), None
        if predictor != Stale() and (best is None or loss < best[0]):
            best = loss, predictor.name, made
    stale = losses[Stale().name]
    if best is None:
        return decided("", "no predictor made a candidate; nothing is predicted"), None
    needed = stale - margin * abs(stale)
    if not best[0] < needed:
        reason = (
            f"the best, {best[1]}, has loss {best[0]:.6g}, and {needed:.6g} was needed to beat the last state's "
            f"{stale:.6g}; nothing is predicted"
        )
        return decided("", reason), None
    return decided(best[1], f"loss {best[0]:.6g}, the last state's is {stale:.6g}"), best[2]
