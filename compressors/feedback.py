"""Error feedback: what a rank did not send is added to its next gradient.

The residual rotates through slots: a step reads the current slot and writes the next one, and
what an optimizer consumed becomes current when the step commits. So a step that is skipped, or
never finished, leaves no trace. It is in the loss's own unit, whatever scale the gradients of a step
carry, so that it means the same under another scale and without a scaler.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from lowdiff.core.layout import shaped, torch_dtype
from lowdiff.protocols import ResidualStore
from lowdiff.types import Layout, ResidualMark

NUM_SLOTS = 3


def residuals_of(layout: Layout) -> Layout:
    """One residual per parameter, of its dtype; of float16 parameters in float32.

    A loss scale exists because float16 does not hold gradients without one, and residuals have none.
    """
    return Layout(
        tuple(
            replace(spec, dtype="float32") if spec.dtype == "float16" else spec
            for spec in layout.parameters
        )
    )


class RotatingResidual:
    """A ``ResidualStore`` over given slots of flat tensors, one per parameter and slot."""

    def __init__(
        self,
        slots: Sequence[Sequence[torch.Tensor]],
        layout: Layout,
        loss_scale: Callable[[], float] = lambda: 1.0,
    ) -> None:
        self._slots = slots
        self.layout = layout
        self.loss_scale = loss_scale
        self.slot = 0
        #: What this step wrote -> the parameter whose optimizer decides whether it counts.
        self._written: dict[int, int] = {}
        self._settled: set[int] = set()
        #: Where exchanges after the optimizer's step write, which leave no trace.
        self._scratch: dict[int, torch.Tensor] = {}
        self._used: set[int] = set()
        #: Whether the next slot has been written to since its content was of use.
        self._is_open = False

    @classmethod
    def zeros(
        cls,
        layout: Layout,
        device: torch.device,
        loss_scale: Callable[[], float] = lambda: 1.0,
    ) -> RotatingResidual:
        """Slots in ordinary memory of a device, lost with the process."""
        return cls(zero_slots(layout, device), layout, loss_scale)

    def pair(self, parameter: int) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``ResidualStore.pair``."""
        if not self._is_open:
            self._reuse(self._next)
            self._is_open = True
        target = self._slots[self._next][parameter]
        if parameter in self._settled:
            if parameter not in self._scratch:
                self._scratch[parameter] = torch.empty_like(target)
            return target, self._scratch[parameter]
        if parameter in self._written:
            return target, target
        return self._slots[self.slot][parameter], target

    def written(self, parameter: int, *, of: int | None = None) -> None:
        """See ``ResidualStore.written``."""
        if parameter not in self._settled:
            self._written[parameter] = parameter if of is None else of
            self._used.add(parameter)

    def settle(self, parameters: Collection[int] | None = None) -> None:
        """What was exchanged of these parameters has been consumed; None means all of it.

        A further backward pass through them in the same step is of no consequence for an optimizer,
        so it is of none for the residual.
        """
        self._settled |= {
            i for i, of in self._written.items() if parameters is None or of in parameters
        }

    def advance(self) -> None:
        """Commit the step: what is settled becomes current, all else goes back to what it was before."""
        if self._settled:
            before, current = self.slot, self._next
            for i in self._used - self._settled:
                self._slots[current][i].copy_(self._slots[before][i])
            self.slot = current
            self._complete(current)
        self._is_open = False
        self._written = {}
        self._settled.clear()
        self._scratch.clear()

    def current(self) -> dict[int, torch.Tensor]:
        """Flat residual of every parameter that has one, by layout index."""
        return {i: self._slots[self.slot][i] for i in sorted(self._used)}

    def named(self) -> dict[str, torch.Tensor]:
        """The same by name, each with its shape."""
        specs = self.layout.parameters
        return {specs[i].name: shaped(values, specs[i]) for i, values in self.current().items()}

    def load(self, residuals: Sequence[torch.Tensor | None]) -> None:
        """Replace the current residual; None leaves a parameter's as it is."""
        for parameter, residual in enumerate(residuals):
            if residual is not None:
                self._slots[self.slot][parameter].copy_(residual)
                self._used.add(parameter)

    def copy(self, step: int, *, is_first: bool = False) -> None:
        """Copy the current residual to where `mark` names it, unless that is where it lies.

        Args:
            step: The step whose residual it is.
            is_first: Whether nothing was copied in this life.
        """

    def move(self, path: Path) -> None:
        """Keep in another file what is kept where it survives the process.

        Raises:
            StorageError: If there is no memory for it.
        """

    def mark(self) -> ResidualMark | None:
        """Where the current residual survives the process; None if it does not."""
        return None

    def _reuse(self, slot: int) -> None:
        """Called before what a slot holds is written over."""

    def _complete(self, slot: int) -> None:
        """Called once a slot holds the current residual."""

    @property
    def _next(self) -> int:
        return (self.slot + 1) % NUM_SLOTS


def zero_slots(layout: Layout, device: torch.device) -> list[list[torch.Tensor]]:
    """Memory for a `RotatingResidual`."""
    return [
        [
            torch.zeros(spec.numel, dtype=torch_dtype(spec.dtype), device=device)
            for spec in layout.parameters
        ]
        for _ in range(NUM_SLOTS)
    ]


class ErrorFeedback:
    """What every biased compressor does around its compression, parameter by parameter.

    It compresses gradient plus residual, and owes the difference to what went out of it:

        total = feedback.total(parameter, gradient)
        ...                                # send some of it
        feedback.sent(parameter, what)     # or, for single entries, sent_at(parameter, positions)

    Under a loss scale the total carries it, as the gradient does.

    Reference: Karimireddy et al., "Error Feedback Fixes SignSGD and other Gradient Compression
    Schemes", ICML 2019, Algorithm 2 (EF-SGD); the learning rate stays with the optimizer, so the
    residual is in the gradient's units.
    """

    def __init__(self, store: ResidualStore) -> None:
        self._store = store

    def total(self, parameter: int, gradient: torch.Tensor) -> torch.Tensor:
        """Gradient plus residual, in the memory of the next residual and of its dtype.

        Args:
            parameter: Layout index.
            gradient: Flat; left as it is.
        """
        source, target = self._store.pair(parameter)
        scale = self._store.loss_scale()
        if scale == 1.0:
            return torch.add(gradient, source, out=target)
        return torch.mul(source, scale, out=target).add_(gradient)

    def sent(self, parameter: int, what: torch.Tensor) -> None:
        """Owe the total less what was sent of it (flat, the total's shape and dtype)."""
        _, target = self._store.pair(parameter)
        self._finish(parameter, target.sub_(what))

    def sent_at(
        self,
        parameter: int,
        positions: torch.Tensor | None,
        values: torch.Tensor | None = None,
        *,
        is_finite: bool = False,
    ) -> None:
        """Owe the total but for the entries at ``positions``; None if nothing was sent.

        Args:
            parameter: Layout index.
            positions: int64, flat.
            values: What was sent there, if it was rounded to another dtype than the total's.
            is_finite: Whether the total is known to have no NaN and no infinity.
        """
        _, target = self._store.pair(parameter)
        if positions is not None and values is not None:
            target.index_add_(0, positions, values.to(target.dtype), alpha=-1)
        elif positions is not None:
            target.index_fill_(0, positions, 0.0)
        self._finish(parameter, target, is_finite=is_finite)

    def left(self, parameter: int) -> None:
        """Owe the total as it is now: what was sent has been taken off it in place."""
        _, target = self._store.pair(parameter)
        self._finish(parameter, target)

    def _finish(self, parameter: int, residual: torch.Tensor, *, is_finite: bool = False) -> None:
        scale = self._store.loss_scale()
        if scale != 1.0:
            residual.div_(scale)
        is_finite = is_finite and scale >= 1.0  # by less than 1 it may have overflowed just now
        if not residual.is_cpu or not (is_finite or bool(residual.sum().isfinite())):
            # One overflow that no scaler skips would otherwise come back in every later step.
            residual.nan_to_num_(0.0, 0.0, 0.0)
        self._store.written(parameter)


def is_used(gradient: torch.Tensor) -> bool:
    """Whether any entry is not zero; on an accelerator assumed, because looking would stop the host.

    DDP drops the average of a parameter that no rank used: what would be sent then would be lost,
    so its residual waits for the next real gradient.
    """
    if not gradient.is_cpu:
        return True
    return bool(gradient[:256].any()) or bool(gradient.any())
