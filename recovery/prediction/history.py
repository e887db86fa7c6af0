"""Parameters at steps of the past, and a state with predicted ones."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from lowdiff.errors import ConfigError
from lowdiff.recovery.engine import recover
from lowdiff.recovery.state import SCALAR_STATE, OptimizerState, RecoveredState


@dataclass(frozen=True, slots=True, eq=False)
class History:
    """Parameters at several steps, oldest first.

    Attributes:
        steps: Ascending; distances may differ.
        parameters: Name -> values, ``[len(steps), numel]``, float32.

    Raises:
        ConfigError: If steps do not ascend, or are not as many as the values.
    """

    steps: tuple[int, ...]
    parameters: Mapping[str, torch.Tensor]

    def __post_init__(self) -> None:
        if not self.steps or any(later <= earlier for earlier, later in pairwise(self.steps)):
            raise ConfigError(f"the steps of a history ascend, got {self.steps}")
        for name, values in self.parameters.items():
            if values.dim() != 2 or len(values) != len(self.steps):
                raise ConfigError(
                    f"{name} has values of shape {list(values.shape)} for {len(self.steps)} steps"
                )

    @classmethod
    def of_states(cls, states: Iterable[RecoveredState]) -> History:
        """Return the history of some states of one run, oldest first.

        Raises:
            ConfigError: If the model was changed between them.
        """
        steps: list[int] = []
        rows: list[dict[str, torch.Tensor]] = []
        for state in states:
            row = {name: values.float().cpu() for name, values in state.parameters.items()}
            if rows and {n: v.shape for n, v in row.items()} != {
                n: v.shape for n, v in rows[0].items()
            }:
                raise ConfigError(
                    f"the model of step {state.step} has other parameters than that of step "
                    f"{steps[0]}; give steps of one model"
                )
            steps.append(state.step)
            rows.append(row)
        if not rows:
            raise ConfigError("a history has at least one state")
        return cls(
            tuple(steps), {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
        )

    @classmethod
    def of_run(
        cls, run: str | Path, steps: Sequence[int], *, staging: str | Path | None = None
    ) -> History:
        """Recover some steps of a run: snapshots, and with a log any step.

        Takes 4 bytes per parameter and step, and one state more.

        Raises:
            StepNotFound: If the run does not hold a step.
            ConfigError: As above.
        """
        return cls.of_states(recover(run, step, staging=staging) for step in sorted(set(steps)))

    def until(self, step: int) -> History:
        """Return the part up to a step."""
        count = sum(own <= step for own in self.steps)
        return History(
            self.steps[:count], {name: own[:count] for name, own in self.parameters.items()}
        )

    def at(self, steps: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return values at other steps within the history, interpolated linearly.

        Args:
            steps: float64 ``[k]``, from the first step to the last.
        """
        known = torch.tensor(self.steps, dtype=torch.float64)
        right = torch.searchsorted(known, steps).clamp_(1, len(known) - 1)
        share = ((steps - known[right - 1]) / (known[right] - known[right - 1])).float()[:, None]
        return {
            name: torch.lerp(own[right - 1], own[right], share)
            for name, own in self.parameters.items()
        }


def predicted_state(
    state: RecoveredState, parameters: Mapping[str, torch.Tensor], step: int
) -> RecoveredState:
    """Return a state of a later step with predicted parameters.

    Moments, buffers, items and whatever else is no trained parameter stay as they are; the optimizers' counts of
    steps advance.

    Args:
        state: The last one that is known; not changed.
        parameters: Name -> flat values, as many as the parameter has.
        step: The step that they are predicted for.

    Raises:
        ConfigError: If the step is not later, or values are missing, of another size or not finite.
    """
    if step <= state.step:
        raise ConfigError(f"step {step} is not behind step {state.step}, so nothing is predicted")
    made = {}
    for name, values in state.parameters.items():
        found = parameters.get(name)
        if found is None or found.numel() != values.numel() or not bool(found.isfinite().all()):
            raise ConfigError(f"the prediction has no usable values of {name}")
        made[name] = found.to(values.dtype).to(values.device)
    lost = step - state.step
    optimizers = [
        OptimizerState(
            [dict(group) for group in optimizer.groups],
            {name: _advanced(entries, lost) for name, entries in optimizer.state.items()},
        )
        for optimizer in state.optimizers
    ]
    return replace(state, step=step, parameters=made, optimizers=optimizers)


def _advanced(entries: Mapping[str, Any], lost: int) -> dict[str, Any]:
    """Return one parameter's entries with its count of steps ahead; a parameter that never stepped has none."""
    return {
        key: value + lost if key == "step" and key in SCALAR_STATE else value
        for key, value in entries.items()
    }
