"""The residual in staging: written where it survives the process, at no extra copy."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from lowdiff.compressors.feedback import (
    NUM_SLOTS,
    RotatingResidual,
    zero_slots,
)
from lowdiff.core import devices
from lowdiff.core.layout import torch_dtype
from lowdiff.persistence.staging.residual_slots import ResidualSlots, read_slot
from lowdiff.protocols import LossScale
from lowdiff.types import Layout, ResidualMark

#: Steps between two copies of an accelerator's residual; not measured yet.
COPIED_EVERY = 16


class StagedResidual(RotatingResidual):
    """A CPU residual whose slots lie in staging, where records name them."""

    def __init__(self, path: Path, layout: Layout, loss_scale: LossScale) -> None:
        self._file = ResidualSlots(path, layout, NUM_SLOTS)
        super().__init__(_slots_in(self._file), layout, loss_scale)
        self._mark = self._file.complete(self.slot)

    def load(self, residuals: Sequence[torch.Tensor | None]) -> None:
        """See ``RotatingResidual.load``."""
        self._reuse(self.slot)
        super().load(residuals)
        self._complete(self.slot)

    def move(self, path: Path) -> None:
        """See ``RotatingResidual.move``."""
        file = ResidualSlots(path, self.layout, NUM_SLOTS)
        # All slots: the residual of the step under way lies in the next one already.
        for slot in range(NUM_SLOTS):
            file.whole(slot)[:] = self._file.whole(slot)
        self._file = file
        self._place(_slots_in(file), self.layout)
        self._complete(self.slot)

    def mark(self) -> ResidualMark:
        """Names the current residual in a record."""
        return self._mark

    def read(self, mark: ResidualMark, target: memoryview) -> bool:
        """See ``RotatingResidual.read``."""
        return self._file.read(mark, target)

    def _reuse(self, slot: int) -> None:
        self._file.reuse(slot)

    def _complete(self, slot: int) -> None:
        self._mark = self._file.complete(slot)


class CopiedResidual(RotatingResidual):
    """A residual on an accelerator, of which staging gets a copy every few steps.

    A copy at every step would cost more than all else. Of the steps between two copies recovery is
    exact in state, and goes on with the last copy.
    """

    def __init__(
        self, path: Path, layout: Layout, device: torch.device, loss_scale: LossScale
    ) -> None:
        super().__init__(zero_slots(layout, device), layout, loss_scale)
        self._target = 0
        self.move(path)

    def copy(self, step: int, *, is_first: bool = False) -> ResidualCopy | None:
        """See ``RotatingResidual.copy``."""
        self._mark = None
        if not is_first and step % COPIED_EVERY:
            return None
        self._target = (self._target + 1) % NUM_SLOTS
        self._file.reuse(self._target)
        fetch = devices.fetch([self._whole[self.slot]])
        self._mark = self._file.promise(self._target)
        return ResidualCopy(fetch, self._targets[self._target], self._file, self._mark)

    def move(self, path: Path) -> None:
        """See ``RotatingResidual.move``; there is no copy in the new file yet."""
        self._file = ResidualSlots(path, self.layout, NUM_SLOTS)
        self._targets = _slots_in(self._file)
        self._mark = None

    def mark(self) -> ResidualMark | None:
        """Names the copy in the record of its step; None in all others."""
        return self._mark

    def read(self, mark: ResidualMark, target: memoryview) -> bool:
        """See ``RotatingResidual.read``."""
        return self._file.read(mark, target)


class ResidualCopy:
    """A copy of a residual on its way to staging, where its mark names it once it is there.

    Args:
        fetch: On its way to page-locked memory: to other memory the link reaches a fraction of its speed.
        target: Its slot in staging.
        file: Has the slot.
        mark: Names it there.
    """

    def __init__(
        self, fetch: devices.Fetch, target: torch.Tensor, file: ResidualSlots, mark: ResidualMark
    ) -> None:
        self._fetch = fetch
        self._target = target
        self._file = file
        self._mark = mark

    def arrive(self) -> None:
        """Have the mark name it; waits for it."""
        (values,) = self._fetch.arrived()
        self._target.copy_(values)
        self._file.keep(self._mark)


def read_residual(path: Path, layout: Layout, mark: ResidualMark) -> list[torch.Tensor] | None:
    """The residual a record names, or None if it is not there any more."""
    views = read_slot(path, layout, mark)
    if views is None:
        return None
    return _tensors([memoryview(bytearray(view)) for view in views], layout)


def _slots_in(file: ResidualSlots) -> list[torch.Tensor]:
    """Return the slots of a file, sharing its memory."""
    return [
        torch.from_numpy(np.frombuffer(file.whole(slot), np.uint8)) for slot in range(NUM_SLOTS)
    ]


def _tensors(views: Sequence[memoryview], layout: Layout) -> list[torch.Tensor]:
    return [
        torch.from_numpy(np.frombuffer(view, np.uint8)).view(torch_dtype(spec.dtype))
        for view, spec in zip(views, layout.parameters, strict=True)
    ]
