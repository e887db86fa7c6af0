"""The chooser: of what strategies hold in memory, it takes the newest step that all ranks reach."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path

from lowdiff.persistence.run.catalog import Catalog
from lowdiff.persistence.run.fences import Span
from lowdiff.persistence.run.records import reach
from lowdiff.recovery.plan import PlannedStep, confirm_steps, spans_of, steps_after
from lowdiff.recovery.sources.source import Source
from lowdiff.recovery.sources.strategies import HELD


@dataclass(frozen=True, slots=True, eq=False)
class MemoryPlan:
    """How to reach ``step`` from what lies in memory.

    Attributes:
        incarnation: Whose memory.
        common: The step that every share is brought to by itself.
        sources: One per rank.
        steps: Differentials ``common + 1 .. step``.
        first: The earliest step that can be had this way.
    """

    step: int
    incarnation: int
    common: int
    sources: tuple[Source, ...]
    steps: tuple[PlannedStep, ...]
    first: int

    @property
    def range(self) -> tuple[int, int]:
        """First and last step that can be had this way."""
        return self.first, self.step

    @property
    def paths(self) -> tuple[Path, ...]:
        """The files that are read, one per rank; a trainer that attaches meanwhile removes them."""
        return tuple(source.path for source in self.sources)


def plan_in_memory(
    catalog: Catalog, step: int | None, passed_over: dict[int, str] | None = None
) -> MemoryPlan | None:
    """Plan the way to ``step``, or to the newest step, from what lies in memory; None if none leads.

    The differentials on the way are read first; where one is not what is listed, the plan is made
    again with what is there.

    Args:
        catalog: What there is.
        step: Which step; None for the newest.
        passed_over: Gets steps that survivors saved and that cannot be had, and why.

    Raises:
        RunInUse: If the trainer is gone, and somebody else keeps the memory for long.
    """
    while True:
        plan = _way(catalog, step, {} if passed_over is None else passed_over)
        if plan is None or confirm_steps(catalog, plan.common + 1, plan.step):
            return plan


def _way(catalog: Catalog, step: int | None, passed_over: dict[int, str]) -> MemoryPlan | None:
    """Return the way in the newest incarnation of the run's history whose ranks have a step in common."""
    for span in reversed(spans_of(catalog)):
        fence = catalog.incarnations[span.incarnation]
        held = HELD[fence.strategy]
        # The folders of further ranks are left alone once a rank has nothing.
        by_rank = list(
            takewhile(
                bool, (held(catalog, fence, rank, passed_over) for rank in range(span.world_size))
            )
        )
        plan = _way_from(catalog, span, step, by_rank) if len(by_rank) == span.world_size else None
        if plan is not None:
            return plan
    return None


def _way_from(
    catalog: Catalog, span: Span, step: int | None, by_rank: Sequence[Sequence[Source]]
) -> MemoryPlan | None:
    """Return the way to ``step``, or to the newest step, from sources of every rank; None if none leads."""
    plan: MemoryPlan | None = None
    for common in sorted({s.reach for sources in by_rank for s in sources}, reverse=True):
        if not span.holds(common) or (step is not None and common > step):
            continue
        nearest = [_nearest(sources, common) for sources in by_rank]
        steps = steps_after(catalog, common, step)
        reached = steps[-1].step if steps else common
        chosen = tuple(source for source in nearest if source is not None)
        if len(chosen) < span.world_size or step not in (None, reached):
            continue
        if plan is None:
            plan = MemoryPlan(reached, span.incarnation, common, chosen, steps, first=common)
        elif reached >= plan.first - 1:  # all steps from here on lie in memory
            plan = replace(plan, first=common)
    return plan


def _nearest(sources: Sequence[Source], common: int) -> Source | None:
    """Return the source from which a rank's own records lead to ``common``, with the least to replay."""
    for source in sorted((s for s in sources if s.reach <= common), key=lambda s: -s.step):
        source.records.confirm(source.step + 1, common)
        if reach([source.records], source.step, common) == common:
            return source
    return None
