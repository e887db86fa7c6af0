"""What multiplied the gradients between their exchange and the optimizer, as far as it is known."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler


class Scaling:
    """The loss scale that exchanged gradients carry, and coefficients of clipping."""

    def __init__(self, scaler: GradScaler | None) -> None:
        self._scaler = scaler
        self._scale = self._loss_scale()
        self._clipped_by: tuple[float, ...] = ()

    @property
    def factors(self) -> tuple[float, ...]:
        """What gradients were probably multiplied by since their exchange, in order."""
        if self._scale == 1.0:
            return self._clipped_by
        # As ``GradScaler.unscale_`` computes it: a float32.
        inverse = float(torch.tensor(self._scale).double().reciprocal().float())
        return (inverse, *self._clipped_by)

    def clip_grad_norm_(
        self, parameters: torch.Tensor | Iterable[torch.Tensor], max_norm: float, **options: Any
    ) -> torch.Tensor:
        """Clip as PyTorch does, and note by what; returns the total norm, shape ``[]``."""
        own = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        total = torch.nn.utils.clip_grad_norm_(own, max_norm, **options)
        coefficient = torch.clamp(float(max_norm) / (total + 1e-6), max=1.0)
        self._clipped_by = (*self._clipped_by, float(coefficient))
        return total

    def end_step(self) -> float:
        """Forget the step's clipping; returns the new loss scale over the old one."""
        old, self._scale = self._scale, self._loss_scale()
        self._clipped_by = ()
        return self._scale / old

    def _loss_scale(self) -> float:
        """Scale of the gradients that the hook will see; the residual is in its units."""
        return 1.0 if self._scaler is None else float(self._scaler.get_scale())
