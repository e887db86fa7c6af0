"""Error feedback: what a rank did not send is added to its next gradient.

The residual rotates through slots: a step reads the current slot and writes the next one, and
becomes current when it commits. So a step that is skipped, or never finished, leaves no trace.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lowdiff.layout import torch_dtype
from lowdiff.types import Layout, ResidualMark

NUM_SLOTS = 3


class RotatingResidual:
    """A ``ResidualStore`` over given slots of flat tensors, one per parameter and slot."""

    def __init__(self, slots: Sequence[Sequence[torch.Tensor]]) -> None:
        self._slots = slots
        self.slot = 0
        self._written: set[int] = set()
        self._used: set[int] = set()

    @classmethod
    def zeros(cls, layout: Layout, device: torch.device) -> RotatingResidual:
        """Slots in ordinary memory of a device, lost with the process."""
        return cls(
            [
                [
                    torch.zeros(spec.numel, dtype=torch_dtype(spec.dtype), device=device)
                    for spec in layout.parameters
                ]
                for _ in range(NUM_SLOTS)
            ]
        )

    def pair(self, parameter: int) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``ResidualStore.pair``."""
        target = self._slots[self._next][parameter]
        if parameter in self._written:
            return target, target
        return self._slots[self.slot][parameter], target

    def written(self, parameter: int) -> None:
        """See ``ResidualStore.written``."""
        self._written.add(parameter)
        self._used.add(parameter)

    def advance(self, *, stepped: bool, scale_ratio: float = 1.0) -> None:
        """Commit the step: its residual becomes current, unless the step was skipped.

        Args:
            stepped: False leaves the residual as it was before the step.
            scale_ratio: New loss scale over the old one; the residual is in scaled units.
        """
        fresh = self._written if stepped else set()
        if fresh or scale_ratio != 1.0:
            for parameter in self._used - fresh:
                self._slots[self._next][parameter].copy_(self._slots[self.slot][parameter])
            self.slot = self._next
        if scale_ratio != 1.0:
            # Not in place of the old one, which the record before this still names.
            for parameter in self._used:
                self._slots[self.slot][parameter].mul_(scale_ratio)
        self._written.clear()

    def current(self) -> dict[int, torch.Tensor]:
        """Flat residual of every parameter that has one, by layout index."""
        return {i: self._slots[self.slot][i] for i in sorted(self._used)}

    def load(self, residuals: Sequence[torch.Tensor | None]) -> None:
        """Replace the current residual; None leaves a parameter's as it is."""
        for parameter, residual in enumerate(residuals):
            if residual is not None:
                self._slots[self.slot][parameter].copy_(residual)
                self._used.add(parameter)

    def mark(self) -> ResidualMark | None:
        """Where the current residual survives the process; None if it does not."""
        return None

    @property
    def _next(self) -> int:
        return (self.slot + 1) % NUM_SLOTS
