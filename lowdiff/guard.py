"""Noticing what replay could not reproduce (design rules R6, R9, R12)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lowdiff.attached import Attached
from lowdiff.errors import UnsupportedOptimizer, UsageError


@dataclass(frozen=True, slots=True, eq=False)
class _Watched:
    """Tensors of one optimizer, listed once: looking them up at every step would cost more.

    Attributes:
        owners: Parameters that had state when they were listed.
    """

    owners: set[torch.Tensor]
    tensors: list[torch.Tensor]


class StepGuard:
    """Watches what happens to parameters and optimizer state outside ``optimizer.step``."""

    def __init__(self, attached: Attached) -> None:
        self._attached = attached
        self._groups = [_group_ids(optimizer) for optimizer in attached.optimizers]
        self._watched = [self._tensors(i) for i in range(len(attached.optimizers))]
        self._last = [self._fingerprint(i) for i in range(len(attached.optimizers))]
        self._known = {id(parameter) for parameter in attached.parameters}
        self._gradients: dict[int, list[int | None]] = {}
        self._hook_ids: dict[int, int] = {}

    def registered(self, index: int, handle: torch.utils.hooks.RemovableHandle) -> None:
        """Remember which pre-hook of an optimizer is ours."""
        self._hook_ids[index] = handle.id

    def before_step(self, index: int, arguments: Sequence[Any]) -> bool:
        """Check an optimizer that is about to step.

        Returns:
            Whether its parameters or state were changed since they were last seen.

        Raises:
            UsageError: If its groups changed, or a later hook could change the gradients.
            UnsupportedOptimizer: If it is called with a closure.
        """
        optimizer = self._attached.optimizers[index]
        if any(callable(argument) for argument in arguments):
            raise UnsupportedOptimizer(
                "optimizer.step(closure) may evaluate the gradient several times, which a "
                "differential cannot record; call backward() first and step() without a closure "
                "(under Lightning: examples/lightning_trainer.py)"
            )
        if _group_ids(optimizer) != self._groups[index]:
            raise UsageError(
                "the optimizer's parameter groups changed after attach; close the checkpointer "
                "and attach again with the new groups"
            )
        thawed = [
            parameter
            for group in optimizer.param_groups
            for parameter in group["params"]
            if parameter.grad is not None and id(parameter) not in self._known
        ]
        if thawed:
            raise UsageError(
                f"a parameter of shape {tuple(thawed[0].shape)} was frozen at attach and has a "
                "gradient now; close the checkpointer and attach again after unfreezing"
            )
        if next(reversed(optimizer._optimizer_step_pre_hooks)) != self._hook_ids[index]:
            raise UsageError(
                "a step pre-hook was registered on the optimizer after attach and could change "
                "the gradient unseen; register it before attach"
            )
        return self._fingerprint(index) != self._last[index]

    def gradients_read(self, index: int) -> None:
        """Note the gradients as they were read; nothing may write them from here on."""
        self._gradients[index] = self._gradient_versions(index)

    def after_step(self, index: int, *, scaled: bool) -> None:
        """Note the state that the optimizer left.

        Raises:
            UsageError: If the gradients were written while it stepped.
        """
        # A fused kernel unscales the gradients itself, in place.
        if not scaled and self._gradient_versions(index) != self._gradients[index]:
            raise UsageError(
                "gradients were changed between lowdiff's reading and the optimizer's step; "
                "change them before optimizer.step()"
            )
        if self._attached.optimizers[index].state.keys() != self._watched[index].owners:
            self._watched[index] = self._tensors(index)  # made in this step
        self._last[index] = self._fingerprint(index)

    def at_commit(self) -> bool:
        """Whether anything was changed since the optimizers stepped; forgets it."""
        now = [self._fingerprint(i) for i in range(len(self._attached.optimizers))]
        changed = now != self._last
        self._last = now
        return changed

    def _fingerprint(self, index: int) -> tuple[int, list[int]]:
        """What changes with every write to a parameter or state tensor of an optimizer."""
        watched = self._watched[index]
        return id(self._attached.optimizers[index].state), [t._version for t in watched.tensors]

    def _tensors(self, index: int) -> _Watched:
        state = self._attached.optimizers[index].state
        own = [
            parameter
            for parameter, owner in zip(
                self._attached.parameters, self._attached.owner, strict=True
            )
            if owner == index
        ]
        values = [value for parameter in own for value in state.get(parameter, {}).values()]
        tensors = [*own, *(value for value in values if isinstance(value, torch.Tensor))]
        return _Watched(set(state), tensors)

    def _gradient_versions(self, index: int) -> list[int | None]:
        return [
            None if parameter.grad is None else parameter.grad._version
            for parameter, owner in zip(
                self._attached.parameters, self._attached.owner, strict=True
            )
            if owner == index
        ]


def _group_ids(optimizer: torch.optim.Optimizer) -> list[list[int]]:
    return [[id(parameter) for parameter in group["params"]] for group in optimizer.param_groups]
