"""Rotating slots on tmpfs for a rank's error-feedback residual (design rule R3).

The residual of step ``t`` is written straight into its slot while the step is computed, at no
extra copy. Three slots suffice: staging ``t`` precedes this rank's first residual write of
``t + 1``, and a rank can only reach the writes of ``t + 2`` once every rank has staged ``t``.
"""

from __future__ import annotations

from pathlib import Path

from lowdiff.persistence.memory import MappedFile, read_view
from lowdiff.types import Layout

_ALIGNMENT = 64


class ResidualLayout:
    """Byte ranges of every parameter inside a slot."""

    def __init__(self, layout: Layout) -> None:
        self.ranges: list[tuple[int, int]] = []
        offset = 0
        for spec in layout.parameters:
            size = spec.nbytes
            self.ranges.append((offset, offset + size))
            offset += size + (-size % _ALIGNMENT)
        self.slot_bytes = max(offset, _ALIGNMENT)


def create_slots(path: Path, layout: Layout, num_slots: int) -> list[list[memoryview]]:
    """Allocate all slots, zeroed; one view per slot and parameter, sharing the file's memory."""
    ranges = ResidualLayout(layout)
    file = MappedFile(path, num_slots * ranges.slot_bytes)
    return [_views(file.view, ranges, slot) for slot in range(num_slots)]


def read_slot(path: Path, layout: Layout, num_slots: int, slot: int) -> list[memoryview] | None:
    """Views of one slot left behind by a dead trainer, or None if the file does not fit."""
    ranges = ResidualLayout(layout)
    try:
        view = read_view(path)
    except FileNotFoundError:
        return None
    if len(view) != num_slots * ranges.slot_bytes or not 0 <= slot < num_slots:
        return None
    return _views(view, ranges, slot)


def _views(view: memoryview, ranges: ResidualLayout, slot: int) -> list[memoryview]:
    base = slot * ranges.slot_bytes
    return [view[base + start : base + stop] for start, stop in ranges.ranges]
