"""Lineage: which incarnation owns which steps.

A new incarnation starts from step ``s`` of its parent; the parent's steps after ``s`` are void. The
history of a run is thus a chain of spans, each owned by exactly one incarnation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lowdiff.types import Fence


@dataclass(frozen=True, slots=True)
class Span:
    """The steps that one incarnation owns.

    Attributes:
        incarnation: The owner.
        world_size: Number of its ranks, which is the number of records of each of its steps.
        base: Step that it started from; its first own step is ``base + 1``.
        last: Its last valid step, inclusive; None while it is the newest.
    """

    incarnation: int
    world_size: int
    base: int
    last: int | None

    def owns(self, step: int) -> bool:
        """Return whether a differential of this step in this incarnation is valid."""
        return self.base < step and (self.last is None or step <= self.last)

    def holds(self, step: int) -> bool:
        """Return whether a snapshot of this step in this incarnation is valid."""
        return self.base <= step and (self.last is None or step <= self.last)


def lineage(fences: Mapping[int, Fence], last: int | None = None) -> tuple[Span, ...]:
    """Return the chain that leads to the newest incarnation, oldest first.

    Args:
        fences: Rank 0's fence of every incarnation whose fences are complete. An incarnation
            that died before all its ranks had written their fences never committed anything.
        last: Last valid step of the newest incarnation; None for all.
    """
    spans: list[Span] = []
    number = max(fences, default=None)
    while number is not None and number in fences:
        fence = fences[number]
        if last is None or last >= fence.base_step:
            spans.append(Span(number, fence.world_size, fence.base_step, last))
        last = fence.base_step if last is None else min(last, fence.base_step)
        number = fence.parent
    return tuple(reversed(spans))
