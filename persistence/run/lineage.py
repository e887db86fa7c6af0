"""Which incarnation owns which steps.

A new incarnation starts from step ``s`` of its parent; what the parent recorded beyond ``s`` is
void. So the history of a run is a chain of spans, each owned by exactly one incarnation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lowdiff.types import Fence


@dataclass(frozen=True, slots=True)
class Span:
    """The steps one incarnation owns.

    Attributes:
        incarnation: The owner.
        world_size: Its number of ranks: so many shards does each of its steps have.
        base: The state it started from; its first own step is ``base + 1``.
        last: Its last step that counts, inclusive; None while it is the newest.
    """

    incarnation: int
    world_size: int
    base: int
    last: int | None

    def owns(self, step: int) -> bool:
        """Whether a differential of this step in this incarnation counts."""
        return self.base < step and (self.last is None or step <= self.last)

    def holds(self, step: int) -> bool:
        """Whether a snapshot of this step in this incarnation counts."""
        return self.base <= step and (self.last is None or step <= self.last)


def lineage(fences: Mapping[int, Fence], last: int | None = None) -> tuple[Span, ...]:
    """The chain that leads to the newest incarnation, oldest first.

    Args:
        fences: Rank 0's fence of every incarnation whose fences are complete. An incarnation
            that died before all its ranks had written theirs never committed anything.
        last: Last step of the newest that counts; None for all.
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
