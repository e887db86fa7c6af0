"""A gradient scaler's verdict on the gradients of a fused optimizer."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lowdiff.compressors.changes import read
from lowdiff.core import devices


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a gradient scaler tells a fused optimizer, which unscales and skips in its kernel.

    On an accelerator the host has not read it: it is a tensor ``[]``.

    Attributes:
        grad_scale: By what its gradients are still multiplied; None without a scaler, or where they were unscaled.
        found_inf: 1.0 where the kernel skips, else 0.0; None without a scaler.
        leaves_unwritten: Whether a step that is skipped leaves state which nobody has written.
    """

    grad_scale: float | torch.Tensor | None = None
    found_inf: float | torch.Tensor | None = None
    leaves_unwritten: bool = False

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer, *, waits: bool) -> Verdict:
        """Read what the scaler has put there.

        Args:
            optimizer: It is about to step.
            waits: Whether the host waits for it wherever it lies.
        """
        told = [getattr(optimizer, name, None) for name in ("grad_scale", "found_inf")]
        scale, found_inf = (
            # The scaler goes on with its own tensors.
            value.clone()
            if isinstance(value, torch.Tensor) and not waits and not devices.may_look(value)
            else None
            if value is None
            else float(value)
            for value in told
        )
        return cls(scale, found_inf, found_inf is not None and _leaves_unwritten_memory(optimizer))

    @property
    def is_late(self) -> bool:
        """Whether the host has not read it."""
        return any(isinstance(v, torch.Tensor) for v in (self.grad_scale, self.found_inf))

    @property
    def is_known_to_skip(self) -> bool:
        """Whether the host knows that the kernel skips."""
        return not isinstance(self.found_inf, torch.Tensor) and bool(self.found_inf)

    def arrived(self) -> tuple[float | None, float | None]:
        """Return scale and overflow; waits for them."""
        values = [v for v in (self.grad_scale, self.found_inf) if v is not None]
        numbers = iter(read(tuple(values)))
        scale = None if self.grad_scale is None else next(numbers)
        return scale, None if self.found_inf is None else next(numbers)


def _leaves_unwritten_memory(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step that a fused kernel skips leaves state that nobody has written.

    Before its first step with momentum torch's SGD allocates the buffers and leaves it to the kernel
    to fill them; the kernel does not, and SGD keeps them all the same.
    """
    return isinstance(optimizer, torch.optim.SGD) and any(
        parameter.grad is not None
        and optimizer.state.get(parameter, {}).get("momentum_buffer") is None
        for group in optimizer.param_groups
        if group["momentum"]
        for parameter in group["params"]
    )
