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
        self._scale = 1.0
        self._seen: tuple[int, int] | None = None
        self._clipped_by: tuple[float, ...] = ()

    def loss_scale(self) -> float:
        """By what the gradients that are exchanged now were multiplied."""
        # It may be updated before or after a commit, or between two backward passes of a step.
        tensor = None if self._scaler is None else self._scaler._scale
        if self._scaler is not None and tensor is not None:
            seen = id(tensor), tensor._version
            if seen != self._seen:  # reading it stops the host on CUDA
                self._seen, self._scale = seen, float(self._scaler.get_scale())
        return self._scale

    def exchanged_at(self, scale: float) -> None:
        """Tell the scale of gradients that are exchanged outside a backward pass."""
        self._scale = scale

    @property
    def factors(self) -> tuple[float, ...]:
        """What gradients were probably multiplied by since their exchange, in order."""
        scale = self.loss_scale()
        if scale in (0.0, 1.0):
            return self._clipped_by
        # As ``GradScaler.unscale_`` computes it: a float32.
        inverse = float(torch.tensor(scale, device="cpu").double().reciprocal().float())
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

    def end_step(self) -> None:
        """Forget the step's clipping."""
        self._clipped_by = ()
