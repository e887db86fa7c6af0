"""The residual in staging: written where it survives the process, at no extra copy (rule R3)."""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import numpy as np
import torch
from crc32c import crc32c

from lowdiff.compressors.feedback import (
    NUM_COPIED_SLOTS,
    NUM_SLOTS,
    RotatingResidual,
    zero_slots,
)
from lowdiff.host_copy import HostCopies
from lowdiff.layout import byte_view, torch_dtype
from lowdiff.persistence.residual import create_slots, read_slot
from lowdiff.types import Layout, ResidualMark

#: Steps between two copies of an accelerator's residual; not measured yet.
COPIED_EVERY = 16


class StagedResidual(RotatingResidual):
    """A CPU residual whose slots lie in staging; records name the slot and its checksum."""

    def __init__(self, path: Path, layout: Layout, loss_scale: Callable[[], float]) -> None:
        slots = create_slots(path, layout, NUM_SLOTS)
        super().__init__([_tensors(views, layout) for views in slots], layout, loss_scale)
        self._checksums = [_checksum(tensor) for tensor in self._slots[self.slot]]
        self._fresh: dict[int, int] = {}

    def written(self, parameter: int, *, of: int | None = None) -> None:
        """See ``ResidualStore.written``; checksums the residual while it is in the cache."""
        super().written(parameter, of=of)
        if parameter not in self._settled:
            self._fresh[parameter] = _checksum(self._slots[self._next][parameter])

    def advance(self, *, carried: Collection[int] = ()) -> None:
        """See ``RotatingResidual.advance``."""
        for parameter in self._settled:
            self._checksums[parameter] = self._fresh[parameter]
        super().advance(carried=carried)
        self._fresh = {parameter: self._fresh[parameter] for parameter in self._written}

    def load(self, residuals: Sequence[torch.Tensor | None]) -> None:
        """See ``RotatingResidual.load``."""
        super().load(residuals)
        self._checksums = [_checksum(tensor) for tensor in self._slots[self.slot]]

    def mark(self) -> ResidualMark:
        """Names the current slot in a record."""
        return ResidualMark(self.slot, combined(self._checksums))


class CopiedResidual(RotatingResidual):
    """A residual on an accelerator, of which staging gets a copy every few steps.

    A copy at every step would cost more than all else. Of the steps between two copies recovery is
    exact in state, and goes on with the last copy.
    """

    def __init__(
        self, path: Path, layout: Layout, device: torch.device, loss_scale: Callable[[], float]
    ) -> None:
        super().__init__(zero_slots(layout, device), layout, loss_scale)
        slots = create_slots(path, layout, NUM_COPIED_SLOTS)
        self._targets = [_tensors(views, layout) for views in slots]
        self._target = 0
        self._mark: ResidualMark | None = None

    def copy(self, step: int, copies: HostCopies, *, is_first: bool = False) -> None:
        """See ``RotatingResidual.copy``."""
        self._mark = None
        if not is_first and step % COPIED_EVERY:
            return
        fetched = [copies.fetch(tensor) for tensor in self._slots[self.slot]]

        def write() -> None:
            self._target = (self._target + 1) % NUM_COPIED_SLOTS
            for target, values in zip(self._targets[self._target], fetched, strict=True):
                target.copy_(values)
            checksums = [_checksum(target) for target in self._targets[self._target]]
            self._mark = ResidualMark(self._target, combined(checksums))

        copies.then(write)

    def mark(self) -> ResidualMark | None:
        """Names the copy in the record of its step; None in all others."""
        return self._mark


def read_residual(path: Path, layout: Layout, mark: ResidualMark) -> list[torch.Tensor] | None:
    """The residual a record names, or None if its slot no longer holds it."""
    views = read_slot(path, layout, NUM_SLOTS, mark.slot)
    if views is None:
        views = read_slot(path, layout, NUM_COPIED_SLOTS, mark.slot)
    if views is None or combined([crc32c(view) for view in views]) != mark.checksum:
        return None
    return _tensors([memoryview(bytearray(view)) for view in views], layout)


def combined(checksums: Sequence[int]) -> int:
    """CRC-32C over per-parameter CRC-32Cs."""
    return int(crc32c(struct.pack(f"<{len(checksums)}I", *checksums)))


def _checksum(tensor: torch.Tensor) -> int:
    return int(crc32c(byte_view(tensor))) if tensor.numel() else 0


def _tensors(views: Sequence[memoryview], layout: Layout) -> list[torch.Tensor]:
    return [
        torch.from_numpy(np.frombuffer(view, np.uint8)).view(torch_dtype(spec.dtype))
        for view, spec in zip(views, layout.parameters, strict=True)
    ]
