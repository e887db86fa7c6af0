"""Error feedback: the part of a gradient that a rank did not send is added to its next gradient.

The residual rotates through slots: a step reads the current slot and writes the next one. When the
step commits, the entries that an optimizer consumed become current. A step that is skipped or never
finished thus leaves no trace. The residual is stored in the loss's own unit, without the loss
scale, so it means the same under another scale and without a scaler.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from lowdiff.core import devices
from lowdiff.core.layout import shaped, torch_dtype
from lowdiff.protocols import Arriving, LossScale, ResidualStore, WholePair
from lowdiff.types import Layout, ResidualLayout, ResidualMark

NUM_SLOTS = 3


def residuals_of(layout: Layout) -> Layout:
    """Return one residual per parameter in its own dtype; float32 for float16 parameters.

    A loss scale exists because float16 does not hold gradients without one. Residuals have no
    scale.
    """
    return Layout(
        tuple(
            replace(spec, dtype="float32") if spec.dtype == "float16" else spec
            for spec in layout.parameters
        )
    )


@dataclass(slots=True, eq=False)
class Scaled:
    """A loss scale that the host knows."""

    value: float = 1.0
    _there: torch.Tensor | None = None

    def __call__(self) -> float:
        """See `LossScale`."""
        return self.value

    def on(self, device: torch.device) -> torch.Tensor:
        """See `LossScale.on`."""
        if self._there is None or self._there.device != device:
            self._there = torch.full((), self.value, dtype=torch.float32, device=device)
        return self._there


class RotatingResidual:
    """A ``ResidualStore`` over slots, each of which holds the residuals of all parameters.

    Large because subclasses place the slots, and everything else about them is here.

    Args:
        slots: `NUM_SLOTS` of them, uint8 ``[slot_bytes]`` as `ResidualLayout` has it.
        layout: Of the residuals.
        loss_scale: By what gradients are multiplied.
    """

    def __init__(
        self, slots: Sequence[torch.Tensor], layout: Layout, loss_scale: LossScale | None = None
    ) -> None:
        self._place(slots, layout)
        self.layout = layout
        self.loss_scale = Scaled() if loss_scale is None else loss_scale
        self.slot = 0
        #: Layout index written in this step -> parameter whose optimizer decides whether it counts.
        self._written: dict[int, int] = {}
        self._settled: set[int] = set()
        #: Layout index -> scratch memory for exchanges after the optimizer's step, which are
        #: discarded.
        self._scratch: dict[int, torch.Tensor] = {}
        self._whole_scratch: torch.Tensor | None = None
        self._used: set[int] = set()
        #: Whether the next slot has been written to since its previous content was needed.
        self._is_open = False

    @classmethod
    def zeros(
        cls,
        layout: Layout,
        device: torch.device,
        loss_scale: LossScale | None = None,
    ) -> RotatingResidual:
        """Return a store in ordinary memory of a device, which is lost with the process."""
        return cls(zero_slots(layout, device), layout, loss_scale)

    def _place(self, slots: Sequence[torch.Tensor], layout: Layout) -> None:
        """Take slots, and look at the parameters in them."""
        self._whole = slots
        self._slots = [views_of(slot, layout) for slot in slots]

    @property
    def device(self) -> torch.device:
        """Where the residual lies."""
        return self._whole[0].device

    def whole_pairs(self, parameters: Iterable[int]) -> list[WholePair]:
        """See ``ResidualStore.whole_pairs``."""
        self._open()
        source, target = self._whole[self.slot], self._whole[self._next]
        fresh: list[int] = []
        again: list[int] = []
        spare: list[int] = []
        for i in parameters:
            (spare if i in self._settled else again if i in self._written else fresh).append(i)
        pairs = [WholePair(fresh, source, target), WholePair(again, target, target)]
        if spare:
            if self._whole_scratch is None:
                self._whole_scratch = torch.empty_like(target)
            pairs.append(WholePair(spare, target, self._whole_scratch))
        return [pair for pair in pairs if pair.parameters]

    def _open(self) -> None:
        if not self._is_open:
            self._reuse(self._next)
            self._is_open = True

    def pair(self, parameter: int) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``ResidualStore.pair``."""
        self._open()
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
        """Declare that the optimizer consumed what was exchanged of these parameters; None means all.

        The optimizer ignores a further backward pass through these parameters in the same step, so
        the residual ignores it as well.
        """
        self._settled |= {
            i for i, of in self._written.items() if parameters is None or of in parameters
        }

    def unsettle(self, parameters: Collection[int]) -> None:
        """Undo `settle` of parameters whose optimizer, as it turned out, consumed nothing."""
        self._settled -= {i for i, of in self._written.items() if of in parameters}

    def advance(self) -> None:
        """Commit the step: make settled entries current and undo all others."""
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
        self._whole_scratch = None

    def current(self) -> dict[int, torch.Tensor]:
        """Return the flat residual of every parameter that has one, by layout index."""
        return {i: self._slots[self.slot][i] for i in sorted(self._used)}

    def named(self) -> dict[str, torch.Tensor]:
        """Return the residuals by parameter name, each with its shape.

        Before anything was left out they are the zeros of the smallest one: an image without any residual is one of
        which the residual was lost.
        """
        specs = self.layout.parameters
        known = self.current()
        if not known and specs:
            smallest = min(range(len(specs)), key=lambda i: specs[i].numel)
            known = {smallest: self._slots[self.slot][smallest]}
        return {specs[i].name: shaped(values, specs[i]) for i, values in known.items()}

    def load(self, residuals: Sequence[torch.Tensor | None]) -> None:
        """Replace the current residual; None keeps a parameter's residual."""
        for parameter, residual in enumerate(residuals):
            if residual is not None:
                self._slots[self.slot][parameter].copy_(residual)
                self._used.add(parameter)

    def copy(self, step: int, *, is_first: bool = False) -> Arriving | None:
        """Begin to copy the current residual to the place that `mark` names.

        Args:
            step: The step that the residual belongs to.
            is_first: Whether this incarnation has not copied a residual yet.

        Returns:
            What is on its way; None where it lies there already, or survives in no case.
        """
        return None

    def move(self, path: Path) -> None:
        """Move the residual that survives the process to another file.

        Raises:
            StorageError: If there is no memory for the file.
        """

    def mark(self) -> ResidualMark | None:
        """Return where the current residual survives the process; None if it does not survive."""
        return None

    def read(self, mark: ResidualMark, target: memoryview) -> bool:
        """Copy the residual that a mark names; for any thread.

        Args:
            mark: See `mark`.
            target: As many bytes as a slot has where residuals survive the process.

        Returns:
            Whether it was still there.
        """
        return False

    def _reuse(self, slot: int) -> None:
        """Prepare a slot whose content is about to be overwritten; for subclasses."""

    def _complete(self, slot: int) -> None:
        """Finish a slot that now holds the current residual; for subclasses."""

    @property
    def _next(self) -> int:
        return (self.slot + 1) % NUM_SLOTS


def zero_slots(layout: Layout, device: torch.device) -> list[torch.Tensor]:
    """Allocate zeroed slots for a `RotatingResidual`."""
    size = ResidualLayout(layout).slot_bytes
    return [torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(NUM_SLOTS)]


def views_of(slot: torch.Tensor, layout: Layout) -> list[torch.Tensor]:
    """Return the flat residual of every parameter in a slot, sharing its memory."""
    ranges = zip(ResidualLayout(layout).ranges, layout.parameters, strict=True)
    return [slot[start:stop].view(torch_dtype(spec.dtype)) for (start, stop), spec in ranges]


class ErrorFeedback:
    """Error feedback around a biased compressor, parameter by parameter.

    A compressor compresses gradient plus residual, and the residual keeps what was not sent:

        total = feedback.total(parameter, gradient)
        ...                                # send some of it
        feedback.sent(parameter, what)     # or, for single entries, sent_at(parameter, positions)

    Under a loss scale, the total is scaled like the gradient.

    Reference: Karimireddy et al., "Error Feedback Fixes SignSGD and other Gradient Compression
    Schemes", ICML 2019, Algorithm 2 (EF-SGD); the learning rate stays with the optimizer, so the
    residual is in the gradient's units.
    """

    def __init__(self, store: ResidualStore) -> None:
        self._store = store

    def total(self, parameter: int, gradient: torch.Tensor) -> torch.Tensor:
        """Return gradient plus residual, in the next residual's memory and dtype.

        Args:
            parameter: Layout index.
            gradient: Flat; not changed.
        """
        source, target = self._store.pair(parameter)
        scale = self._store.loss_scale()
        if scale == 1.0:
            return torch.add(gradient, source, out=target)
        return torch.mul(source, scale, out=target).add_(gradient)

    def sent(self, parameter: int, what: torch.Tensor) -> None:
        """Keep the total minus what was sent of it (flat, the total's shape and dtype)."""
        self.sent_in_pieces(parameter, [(slice(None), what)])

    def sent_in_pieces(self, parameter: int, pieces: Iterable[tuple[slice, torch.Tensor]]) -> None:
        """Keep the total minus what was sent of it, piece by piece.

        Args:
            parameter: Layout index.
            pieces: Where each lies and what it is (flat, the total's dtype). Each is taken right after the iterator
                has made it, while it is in the processor's cache.
        """
        _, target = self._store.pair(parameter)
        sums = []
        for place, piece in pieces:
            left = target[place].sub_(piece)
            if devices.may_look(left):
                sums.append(left.sum())
        is_finite = bool(sums) and bool(torch.stack(sums).sum().isfinite())
        self._finish(parameter, target, is_finite=is_finite)

    def sent_at(
        self,
        parameter: int,
        positions: torch.Tensor | None,
        values: torch.Tensor | None = None,
        *,
        is_finite: bool = False,
    ) -> None:
        """Keep the total except for the entries at ``positions``; None if nothing was sent.

        Args:
            parameter: Layout index.
            positions: int64, flat.
            values: The values sent, if they were rounded to a dtype other than the total's.
            is_finite: Whether the total is known to have no NaN and no infinity.
        """
        _, target = self._store.pair(parameter)
        if positions is not None and values is not None:
            target.index_add_(0, positions, values.to(target.dtype), alpha=-1)
        elif positions is not None:
            target.index_fill_(0, positions, 0.0)
        self._finish(parameter, target, is_finite=is_finite)

    def left(self, parameter: int) -> None:
        """Keep the total as it is now: the caller has subtracted what was sent in place."""
        _, target = self._store.pair(parameter)
        self._finish(parameter, target)

    def _finish(self, parameter: int, residual: torch.Tensor, *, is_finite: bool = False) -> None:
        scale = self._store.loss_scale()
        if scale != 1.0:
            residual.div_(scale)
        is_finite = is_finite and scale >= 1.0  # dividing by less than 1 may overflow
        if not devices.may_look(residual) or not (is_finite or bool(residual.sum().isfinite())):
            # Without this, an overflow that no scaler skips would come back in every later step.
            residual.nan_to_num_(0.0, 0.0, 0.0)
        self._store.written(parameter)


def is_used(gradient: torch.Tensor) -> bool:
    """Return whether any entry is not zero; True on an accelerator, where looking would stop the host.

    DDP drops the average of a parameter that no rank used. Sending the residual in such a step
    would lose it, so the residual waits for the next real gradient.
    """
    if not devices.may_look(gradient):
        return True
    return bool(gradient[:256].any()) or bool(gradient.any())
