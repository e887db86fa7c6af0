"""Decide which snapshots and segments may go: a pure function of an inventory and a policy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from lowdiff.persistence.run.fences import Span
from lowdiff.persistence.run.journal import Pin
from lowdiff.types import Retention

_HOUR_SECONDS = 3600.0


@dataclass(frozen=True, slots=True)
class StoredSnapshot:
    """One snapshot folder.

    Attributes:
        complete: Whether the snapshot exists, with all manifests; otherwise it is a leftover.
        written_seconds: When the snapshot became complete, in seconds since the epoch.
        unreadable: Whether the snapshot may be complete but cannot be read now. Then it stays, and
            so does everything that may be needed in its place.
    """

    incarnation: int
    step: int
    path: Path
    bytes: int
    complete: bool
    written_seconds: float
    unreadable: bool = False


@dataclass(frozen=True, slots=True)
class StoredSegment:
    """One segment of one rank; it ends where the next segment begins."""

    incarnation: int
    rank: int
    first: int
    path: Path
    bytes: int


@dataclass(frozen=True, slots=True)
class Inventory:
    """Everything of a run that retention decides about.

    Attributes:
        spans: The run's lineage.
        bases: Steps from which incarnations that have not begun yet will start.
    """

    spans: tuple[Span, ...]
    snapshots: tuple[StoredSnapshot, ...]
    segments: tuple[StoredSegment, ...]
    bases: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Removal:
    """A snapshot folder or a segment to be removed."""

    path: Path
    is_snapshot: bool
    bytes: int
    reason: str


@dataclass(frozen=True, slots=True)
class Kept:
    """Steps that stay: ``first`` to ``last`` inclusive, or all from ``first`` on if ``last`` is None.

    Attributes:
        first: A step with a snapshot, from which the other steps are replayed.
    """

    first: int
    last: int | None
    reason: str


@dataclass(frozen=True, slots=True)
class CollectionPlan:
    """Decision of retention.

    Attributes:
        removals: Files to remove, in this order.
        kept: Steps that stay, ascending.
        collected: ``(incarnation, first, last)``, inclusive: steps of the run's history that may be
            missing from now on.
        bytes_kept: Bytes of all files that stay.
    """

    removals: tuple[Removal, ...] = ()
    kept: tuple[Kept, ...] = ()
    collected: tuple[tuple[int, int, int], ...] = ()
    bytes_kept: int = 0

    @property
    def bytes_removed(self) -> int:
        """Return the bytes of all files to remove."""
        return sum(removal.bytes for removal in self.removals)


def plan_collection(
    inventory: Inventory, policy: Retention, pins: Sequence[Pin], *, now_seconds: float
) -> CollectionPlan:
    """Decide which files to remove.

    Snapshots off the lineage never count as kept. Without a snapshot on the lineage, nothing goes.

    Args:
        inventory: All files.
        policy: The policy to apply.
        pins: Pinned steps; void pins keep nothing.
        now_seconds: Current time, in seconds since the epoch.
    """
    valid = [s for s in inventory.snapshots if s.complete and is_on(inventory.spans, s)]
    # A set, because a run that is closed and opened again takes its last snapshot twice.
    steps = sorted({s.step for s in valid})
    if not steps:
        return CollectionPlan(bytes_kept=_total_bytes(inventory))
    targets = {pin.step: f"pinned: {pin.label}" for pin in pins if is_valid(inventory.spans, pin)}
    targets.update(dict.fromkeys(inventory.bases, "where an incarnation begins"))
    unreadable = [s for s in inventory.snapshots if s.unreadable and is_on(inventory.spans, s)]
    start = _window(valid, unreadable, steps, policy, now_seconds)
    planner = _Planner(inventory, policy, steps, targets, unreadable)
    if policy.snapshots is None or len(steps) < policy.snapshots:
        everything = (Kept(start, None, "the newest snapshots"),)
        plan = CollectionPlan(kept=everything, bytes_kept=_total_bytes(inventory))
    else:
        plan = planner.plan(start, void_stays=True)
    # When space is short, void files go first, then the window's oldest snapshot, and so on. With an
    # unreadable snapshot the window stays: it must not make room for files that only wait for it.
    for shorter in (step for step in steps if start <= step and not unreadable):
        if policy.total_bytes is None or plan.bytes_kept <= policy.total_bytes:
            break
        plan = planner.plan(shorter, void_stays=False)
    return plan


def is_on(spans: Sequence[Span], snapshot: StoredSnapshot) -> bool:
    """Return whether a snapshot lies on the lineage."""
    return any(s.incarnation == snapshot.incarnation and s.holds(snapshot.step) for s in spans)


def is_valid(spans: Sequence[Span], pin: Pin) -> bool:
    """Return whether a pinned step is still part of the run's history."""
    return owner_of(spans, pin.step) == pin.incarnation


def owner_of(spans: Sequence[Span], step: int) -> int | None:
    """Return the incarnation that owns a step; a base that no incarnation before it made is its own as well."""
    for before, span in zip((None, *spans), spans):  # noqa: B905  the last one is before none
        if step == span.base and (before is None or before.last != span.base):
            return span.incarnation
    return next((span.incarnation for span in spans if span.owns(step)), None)


def _total_bytes(inventory: Inventory) -> int:
    return sum(s.bytes for s in inventory.snapshots) + sum(s.bytes for s in inventory.segments)


def _window(
    valid: Sequence[StoredSnapshot],
    unreadable: Sequence[StoredSnapshot],
    steps: Sequence[int],
    policy: Retention,
    now_seconds: float,
) -> int:
    """Return the step of the oldest snapshot in the window."""
    start = steps[0 if policy.snapshots is None else -min(policy.snapshots, len(steps))]
    if policy.age_hours is not None:
        oldest_seconds = now_seconds - policy.age_hours * _HOUR_SECONDS
        young = (s.step for s in (*valid, *unreadable) if s.written_seconds > oldest_seconds)
        start = min([start, *young])
    return start


@dataclass(frozen=True, slots=True)
class _Planner:
    """Plans for one inventory and several windows.

    Attributes:
        steps: Steps of the snapshots on the lineage, ascending.
        targets: Single steps that stay -> the reason.
        unreadable: Snapshots on the lineage that may be complete.
    """

    inventory: Inventory
    policy: Retention
    steps: Sequence[int]
    targets: Mapping[int, str]
    unreadable: Sequence[StoredSnapshot]

    def plan(self, start: int, *, void_stays: bool) -> CollectionPlan:
        """Decide for the window that begins at step ``start``."""
        kept = [*self._kept_before(start), Kept(start, None, "the newest snapshots")]
        removals = [
            *self._old_snapshots(kept, start, void_stays),
            *self._old_segments(kept, start, void_stays),
        ]
        removed = sum(removal.bytes for removal in removals)
        return CollectionPlan(
            removals=tuple(removals),
            kept=tuple(kept),
            collected=tuple(self._collected(kept, start)),
            bytes_kept=_total_bytes(self.inventory) - removed,
        )

    def _kept_before(self, start: int) -> Iterator[Kept]:
        """Yield the part of each stretch between two snapshots that stays: up to the last wanted step.

        A stretch continues across a snapshot that cannot be read, as if that snapshot were missing.
        """
        # An unreadable snapshot before all others may be the base of every wanted step.
        oldest = [s.step for s in self.unreadable if s.step < self.steps[0]]
        for base, following in pairwise([*sorted(oldest)[:1], *self.steps]):
            if base >= start:
                break
            wanted = {step: why for step, why in self.targets.items() if base <= step < following}
            for_ever = self.policy.last_kept_step(base, following - 1)
            if for_ever is not None:
                wanted.setdefault(for_ever, f"every {self.policy.every_steps} steps")
            if wanted:
                reasons = "; ".join(wanted[step] for step in sorted(wanted))
                yield Kept(base, max(wanted), reasons)

    def _old_snapshots(
        self, kept: Sequence[Kept], start: int, void_stays: bool
    ) -> Iterator[Removal]:
        bases = {stretch.first for stretch in kept}
        newest = self.inventory.spans[-1].incarnation
        done = [s.step for s in self.inventory.snapshots if s.complete and s.incarnation == newest]
        for s in sorted(self.inventory.snapshots, key=lambda s: (s.step, s.incarnation)):
            if s.incarnation > newest:
                continue  # the snapshot of an incarnation that is just beginning
            if s.unreadable:
                continue
            if s.complete and is_on(self.inventory.spans, s):
                goes, why = s.step < start and s.step not in bases, "older than what is kept"
            elif s.complete:
                goes, why = s.step < start or not void_stays, "void: the run went back before it"
            else:
                # Ranks take snapshots in step order: once one is complete, no earlier one is being
                # written.
                finished = s.incarnation < newest or s.step < max(done, default=-1)
                goes, why = finished and s.step < start, "never completed"
            if goes:
                yield Removal(s.path, True, s.bytes, why)

    def _old_segments(
        self, kept: Sequence[Kept], start: int, void_stays: bool
    ) -> Iterator[Removal]:
        spans = {span.incarnation: span for span in self.inventory.spans}
        newest = self.inventory.spans[-1].incarnation
        for segment, end in _ends(self.inventory.segments):
            owner = spans.get(segment.incarnation)
            if segment.incarnation > newest:
                continue
            if owner is None or (owner.last is not None and segment.first > owner.last):
                passed = segment.first if owner is None else owner.last
                if not void_stays or (passed is not None and passed <= start):
                    yield _gone(segment, "void: the run went back before it")
                continue
            last = min((e for e in (end, owner.last) if e is not None), default=None)
            if last is not None and not any(
                max(segment.first, k.first + 1) <= (last if k.last is None else min(last, k.last))
                for k in kept
            ):
                yield _gone(segment, "older than what is kept")

    def _collected(self, kept: Sequence[Kept], start: int) -> Iterator[tuple[int, int, int]]:
        """Yield differentials up to ``start``, the window's first step, that nothing keeps."""
        for span in self.inventory.spans:
            first, limit = span.base + 1, start if span.last is None else min(span.last, start)
            for stretch in kept:
                if stretch.last is not None and stretch.last >= first and stretch.first < limit:
                    if first <= stretch.first:
                        yield span.incarnation, first, stretch.first
                    first = stretch.last + 1
            if first <= limit:
                yield span.incarnation, first, limit


def _ends(segments: Sequence[StoredSegment]) -> Iterator[tuple[StoredSegment, int | None]]:
    """Yield each segment with its last step, if the next segment's first step shows it."""
    ordered = sorted(segments, key=lambda s: (s.incarnation, s.rank, s.first))
    for segment, after in pairwise([*ordered, None]):
        assert segment is not None
        same = after is not None and (after.incarnation, after.rank) == (
            segment.incarnation,
            segment.rank,
        )
        yield segment, after.first - 1 if after is not None and same else None


def _gone(segment: StoredSegment, reason: str) -> Removal:
    return Removal(segment.path, False, segment.bytes, reason)
