"""The cheapest exact way to a step: which snapshot, then which differentials of which ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from lowdiff.errors import StepNotFound
from lowdiff.persistence.format.framing import StoredRecord
from lowdiff.persistence.run.catalog import Catalog, SnapshotSet
from lowdiff.persistence.run.fences import Span, lineage
from lowdiff.persistence.run.records import RankRecords, joined, reach
from lowdiff.types import Decision


@dataclass(frozen=True, slots=True, eq=False)
class PlannedStep:
    """One differential to replay.

    Attributes:
        sources: Where its records are, one per rank, in rank order.
    """

    step: int
    incarnation: int
    sources: tuple[RankRecords, ...]

    @property
    def shards(self) -> tuple[StoredRecord, ...]:
        """Its records, read now, so that of a long replay they are never all in memory.

        Raises:
            DamagedFile: If one is not there any more.
        """
        return tuple(source[self.step] for source in self.sources)


@dataclass(frozen=True, slots=True, eq=False)
class RecoveryPlan:
    """How to reach ``step``.

    Attributes:
        base: Snapshot to start from.
        steps: Differentials ``base.step + 1 .. step``.
        incarnation: The incarnation whose state at ``step`` this is.
    """

    step: int
    incarnation: int
    base: SnapshotSet
    steps: tuple[PlannedStep, ...]


def usable_snapshots(catalog: Catalog) -> list[SnapshotSet]:
    """Snapshots that lie on the run's history, oldest first."""
    spans = {span.incarnation: span for span in spans_of(catalog)}
    return [
        s
        for s in catalog.snapshots
        if s.incarnation in spans and spans[s.incarnation].holds(s.step)
    ]


def recoverable(catalog: Catalog, memory: tuple[int, int] | None = None) -> list[tuple[int, int]]:
    """Return the ranges of steps, both ends inclusive, that the disk and a range in memory lead to, ascending."""
    spans = spans_of(catalog)
    ranges: list[tuple[int, int]] = []
    for base in usable_snapshots(catalog):
        if ranges and base.step <= ranges[-1][1]:
            continue
        last = _reach(catalog, spans, base.step)
        if ranges and base.step == ranges[-1][1] + 1:
            ranges[-1] = (ranges[-1][0], last)
        else:
            ranges.append((base.step, last))
    return ranges if memory is None else joined([*ranges, memory])


def plan_recovery(catalog: Catalog, step: int | None = None) -> RecoveryPlan:
    """Plan the way to ``step``, or to the newest step there is.

    The differentials on the way are read first; where one is not what a footer lists, the plan is
    made again with what is there.

    Raises:
        StepNotFound: If no snapshot and unbroken sequence of differentials leads there.
    """
    spans = spans_of(catalog)
    target, base = _way(catalog, spans, step)
    # What ends the way to the newest step counts too: that no step follows, or one that cannot be
    # replayed.
    while not confirm_steps(catalog, base.step + 1, target + (step is None)):
        target, base = _way(catalog, spans, step)
    planned = steps_after(catalog, base.step, target)
    assert len(planned) == target - base.step
    incarnation = planned[-1].incarnation if planned else base.incarnation
    return RecoveryPlan(target, incarnation, base, planned)


def _way(catalog: Catalog, spans: Sequence[Span], step: int | None) -> tuple[int, SnapshotSet]:
    """Which step, and the snapshot that leads to it."""
    ranges = recoverable(catalog)
    target = ranges[-1][1] if step is None and ranges else step
    if target is None:
        raise StepNotFound(catalog.root, step, ranges, _why_nothing(catalog, spans))
    bases = [s for s in usable_snapshots(catalog) if s.step <= target]
    if not bases or not any(first <= target <= last for first, last in ranges):
        raise StepNotFound(catalog.root, target, ranges, why_not(catalog, target))
    return target, bases[-1]


def confirm_steps(catalog: Catalog, first: int, last: int) -> bool:
    """Read the history's steps from one to another that are only listed; whether all are there."""
    return all(
        catalog.of(span.incarnation, rank).confirm(
            max(first, span.base + 1), _least(last, span.last)
        )
        for span in spans_of(catalog)
        for rank in range(span.world_size)
    )


def _least(last: int, limit: int | None) -> int:
    return last if limit is None else min(last, limit)


def steps_after(catalog: Catalog, base: int, last: int | None) -> tuple[PlannedStep, ...]:
    """The unbroken sequence of replayable steps after ``base``, up to ``last``."""
    steps: list[PlannedStep] = []
    for span in spans_of(catalog):
        number, first = span.incarnation, base + len(steps) + 1
        if span.owns(first):
            sources = tuple(catalog.of(number, rank) for rank in range(span.world_size))
            end = reach(sources, first - 1, span.last if last is None else _least(last, span.last))
            steps += (PlannedStep(step, number, sources) for step in range(first, end + 1))
    return tuple(steps)


def _reach(catalog: Catalog, spans: Sequence[Span], step: int) -> int:
    """Last step of the unbroken sequence of replayable steps after a step."""
    for span in spans:
        if span.owns(step + 1):
            shards = [catalog.of(span.incarnation, rank) for rank in range(span.world_size)]
            step = max(step, reach(shards, step, span.last))
    return step


def bytes_of(steps: Sequence[PlannedStep]) -> int:
    """Bytes of the records of consecutive steps, framing included."""
    return sum(
        records.framed_bytes(own[0].step, own[-1].step)
        for _, group in groupby(steps, key=lambda step: step.incarnation)
        if (own := list(group))
        for records in own[0].sources
    )


def rebases(catalog: Catalog, spans: Sequence[Span], step: int) -> bool:
    """Whether all ranks have a step, and only a snapshot leads to it: it cannot be replayed."""
    owner = next((span for span in spans if span.owns(step)), None)
    if owner is None:
        return False
    ranks = (catalog.of(owner.incarnation, rank) for rank in range(owner.world_size))
    return all(records.rebases(step, step) for records in ranks)


def spans_of(catalog: Catalog) -> tuple[Span, ...]:
    """Which incarnation owns which steps of the run's history."""
    fences = catalog.incarnations
    # A life whose fence cannot be read is known by its records: it made void what others recorded
    # beyond the step it began from, also if nothing of its own comes back.
    newest = max(fences, default=-1)
    lost = {number for number in catalog.unreadable if number > newest}
    began = [own.begins for (n, _), own in list(catalog.records.items()) if n in lost]
    return lineage(fences, min((step for step in began if step is not None), default=None))


def decisions(catalog: Catalog) -> tuple[Decision, ...]:
    """What was decided about lost steps on the run's history, oldest first; inexact from the first predicted one on.

    A prediction counts once its snapshot was durable: it or a later one is there.
    """
    newest = max((snapshot.incarnation for snapshot in catalog.snapshots), default=-1)
    numbers = [span.incarnation for span in spans_of(catalog)]
    found = [(number, catalog.incarnations[number].lost_tail) for number in numbers]
    return tuple(
        decision
        for number, decision in found
        if decision is not None and (not decision.chosen or number <= newest)
    )


def was_predicted(catalog: Catalog, step: int) -> bool:
    """Whether a step was lost, and what follows goes on from a prediction."""
    return any(one.chosen and one.base_step < step <= one.step for one in decisions(catalog))


def why_not(catalog: Catalog, target: int) -> str:
    """Say why a step of the run's history cannot be rebuilt."""
    spans = spans_of(catalog)
    bases = [s for s in usable_snapshots(catalog) if s.step <= target]
    if not bases:
        return "no snapshot that can be read lies at or before it"
    step = _reach(catalog, spans, bases[-1].step) + 1
    if step > target:
        return "it is not part of the run's history"
    if was_predicted(catalog, step) and was_predicted(catalog, target + 1):
        return f"step {step} was lost, and the run went on from a prediction of a later one"
    owner = next((span for span in spans if span.owns(step)), None)
    if owner is not None and catalog.collected.holds(owner.incarnation, step):
        return f"retention removed the differential of step {step}"
    if owner is not None and not catalog.incarnations[owner.incarnation].logs_steps:
        return (
            f"step {step} was made with strategy {catalog.incarnations[owner.incarnation].strategy}, of which only steps in "
            "memory and those of snapshots come back"
        )
    if rebases(catalog, spans, step):
        return (
            f"parameters or optimizer state were changed outside the optimizer in step {step}, so "
            "only a snapshot leads to it, and none of it can be used"
        )
    missing = [
        str(rank)
        for rank in range(owner.world_size if owner else 0)
        if step not in catalog.of(owner.incarnation if owner else 0, rank)
    ]
    return f"the differential of step {step} is missing for rank {', '.join(missing)}"


def _why_nothing(catalog: Catalog, spans: Sequence[Span]) -> str:
    if not spans:
        return "no incarnation has the fences of all its ranks and a snapshot to begin from"
    if not catalog.snapshots:
        return "it holds no complete snapshot"
    return "no snapshot belongs to the run's newest history"
