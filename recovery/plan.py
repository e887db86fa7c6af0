"""The cheapest exact way to a step: which snapshot, then which differentials of which ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lowdiff.errors import StepNotFound
from lowdiff.persistence.catalog import Catalog, SnapshotSet, StoredRecord, has_cycle
from lowdiff.persistence.lineage import Span, lineage


@dataclass(frozen=True, slots=True, eq=False)
class PlannedStep:
    """One differential to replay.

    Attributes:
        shards: Its records, one per rank, in rank order.
    """

    step: int
    incarnation: int
    shards: tuple[StoredRecord, ...]

    @property
    def bytes(self) -> int:
        """Bytes to read."""
        return sum(shard.record.header.body_bytes for shard in self.shards)


@dataclass(frozen=True, slots=True, eq=False)
class RecoveryPlan:
    """How to reach ``step``.

    Attributes:
        base: Snapshot to start from.
        steps: Differentials ``base.step + 1 .. step``.
        incarnation: The incarnation whose state at ``step`` this is.
        cycle: Differentials that bring a rolling base to its own step.
    """

    step: int
    incarnation: int
    base: SnapshotSet
    steps: tuple[PlannedStep, ...]
    cycle: tuple[PlannedStep, ...] = ()

    @property
    def reads(self) -> tuple[PlannedStep, ...]:
        """All differentials that are replayed, in order."""
        return (*self.cycle, *self.steps)

    @property
    def loaded_bytes(self) -> int:
        """What the base takes in memory: until their step, a rolling one's blocks wait as copies."""
        return self.base.bytes * (2 if self.base.is_rolling else 1)


def usable_snapshots(catalog: Catalog) -> list[SnapshotSet]:
    """Snapshots that lie on the run's history and have all they need, oldest first."""
    spans = {span.incarnation: span for span in spans_of(catalog)}
    return [
        s
        for s in catalog.snapshots
        if s.incarnation in spans and spans[s.incarnation].holds(s.step) and has_cycle(catalog, s)
    ]


def cycle_of(catalog: Catalog, snapshot: SnapshotSet) -> tuple[PlannedStep, ...]:
    """The differentials that a usable snapshot needs to be of one step."""
    number, ranks = snapshot.incarnation, range(len(snapshot.manifests))
    return tuple(
        PlannedStep(step, number, tuple(catalog.records[number, rank][step] for rank in ranks))
        for step in range(snapshot.first_base + 1, snapshot.step + 1)
    )


def recoverable(catalog: Catalog) -> list[tuple[int, int]]:
    """Ranges of steps, both ends inclusive, that can be rebuilt."""
    spans = spans_of(catalog)
    ranges: list[tuple[int, int]] = []
    for base in usable_snapshots(catalog):
        if ranges and base.step <= ranges[-1][1]:
            continue
        last = base.step
        while _planned(catalog, spans, last + 1) is not None:
            last += 1
        if ranges and base.step == ranges[-1][1] + 1:
            ranges[-1] = (ranges[-1][0], last)
        else:
            ranges.append((base.step, last))
    return ranges


def plan_recovery(catalog: Catalog, step: int | None = None) -> RecoveryPlan:
    """Plan the way to ``step``, or to the newest step there is.

    Raises:
        StepNotFound: If no snapshot and unbroken sequence of differentials leads there.
    """
    spans = spans_of(catalog)
    ranges = recoverable(catalog)
    target = ranges[-1][1] if step is None and ranges else step
    if target is None:
        raise StepNotFound(catalog.root, step, ranges, _why_nothing(catalog, spans))
    bases = [s for s in usable_snapshots(catalog) if s.step <= target]
    if not bases or not any(first <= target <= last for first, last in ranges):
        raise StepNotFound(catalog.root, target, ranges, _why(catalog, spans, bases, target))
    base = bases[-1]
    steps = [_planned(catalog, spans, t) for t in range(base.step + 1, target + 1)]
    planned = tuple(s for s in steps if s is not None)
    assert len(planned) == len(steps)
    incarnation = planned[-1].incarnation if planned else base.incarnation
    return RecoveryPlan(target, incarnation, base, planned, cycle_of(catalog, base))


def steps_after(catalog: Catalog, base: int, last: int | None) -> tuple[PlannedStep, ...]:
    """The unbroken sequence of replayable steps after ``base``, up to ``last``."""
    spans = spans_of(catalog)
    steps: list[PlannedStep] = []
    step = base + 1
    while last is None or step <= last:
        planned = _planned(catalog, spans, step)
        if planned is None:
            break
        steps.append(planned)
        step += 1
    return tuple(steps)


def spans_of(catalog: Catalog) -> tuple[Span, ...]:
    """Which incarnation owns which steps of the run's history."""
    return lineage({n: incarnation.fence for n, incarnation in catalog.incarnations.items()})


def _planned(catalog: Catalog, spans: Sequence[Span], step: int) -> PlannedStep | None:
    """The differential of a step, if all ranks of its incarnation stored a replayable one."""
    for span in spans:
        if span.owns(step):
            found = [
                catalog.records.get((span.incarnation, rank), {}).get(step)
                for rank in range(span.world_size)
            ]
            shards = tuple(f for f in found if f is not None)
            if len(shards) == span.world_size and not all(s.record.header.rebases for s in shards):
                return PlannedStep(step, span.incarnation, shards)
    return None


def _why(catalog: Catalog, spans: Sequence[Span], bases: Sequence[SnapshotSet], target: int) -> str:
    if not bases:
        return "no snapshot lies at or before it"
    for step in range(bases[-1].step + 1, target + 1):
        if _planned(catalog, spans, step) is None:
            owner = next((span for span in spans if span.owns(step)), None)
            if owner is not None and catalog.collected.holds(owner.incarnation, step):
                return f"retention removed the differential of step {step}"
            missing = [
                str(rank)
                for rank in range(owner.world_size if owner else 0)
                if step not in catalog.records.get((owner.incarnation if owner else 0, rank), {})
            ]
            return f"the differential of step {step} is missing for rank {', '.join(missing)}"
    return "it is not part of the run's history"


def _why_nothing(catalog: Catalog, spans: Sequence[Span]) -> str:
    if not spans:
        return "no incarnation has the fences of all its ranks"
    if not catalog.snapshots:
        return "it holds no complete snapshot"
    return "no snapshot belongs to the run's newest history"
