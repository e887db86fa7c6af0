"""A run as a whole: looked at while it may be training, and the replays that lead from snapshot to snapshot."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from lowdiff.persistence.files.paths import RunFolder
from lowdiff.persistence.run.catalog import Catalog, SnapshotSet, scan
from lowdiff.recovery.damage import Finding, gap_after
from lowdiff.recovery.plan import recoverable, steps_after, usable_snapshots

_LOOKS_SECONDS = 5.0


@dataclass(frozen=True, slots=True, eq=False)
class Leg:
    """A replay.

    Attributes:
        target: The snapshot it leads to; None if it ends elsewhere.
        last: The last step it leads to.
        gap: Why it leads to no later one, where that is a loss.
    """

    base: SnapshotSet
    target: SnapshotSet | None
    last: int
    gap: Finding | None = None


def looked_at(folder: RunFolder, root: Path) -> Catalog:
    """Return everything, compared with its checksums, which takes a while: a live run goes on meanwhile.

    A snapshot that came after differentials were listed makes those that lead to it look lost, and
    so does retention that was at them. So a gap counts if another look still has it, at what led
    to the snapshots of the look before: within a life, a writer makes that durable before them.
    """
    catalog = scan(folder, [root], check_all=True)
    deadline = time.monotonic() + _LOOKS_SECONDS
    while True:
        legs = legs_of(catalog)
        if legs and not any(leg.gap for leg in legs):
            return catalog
        known = {s.folder for s in catalog.snapshots} | {e.path.parent for e in catalog.damage}
        now = scan(folder, [root], check_all=True)
        before = replace(now, snapshots=tuple(s for s in now.snapshots if s.folder in known))
        # Retention begins with the oldest: while the newest is there, so is all that follows it.
        if _newest_snapshot(before) >= max(_newest_snapshot(catalog), 0):
            return before
        if time.monotonic() > deadline:
            return before if before.snapshots else now
        catalog = now


def _newest_snapshot(catalog: Catalog) -> int:
    return max((snapshot.step for snapshot in usable_snapshots(catalog)), default=-1)


def legs_of(catalog: Catalog) -> list[Leg]:
    """Return all replays to do, in order of steps."""
    snapshots = usable_snapshots(catalog)
    legs = []
    for base, target in pairwise(snapshots):
        last = base.step + len(steps_after(catalog, base.step, target.step))
        if last == target.step:
            legs.append(Leg(base, target, last))
        elif (gap := gap_after(catalog, last)) or last > base.step:
            legs.append(Leg(base, None, last, gap))
    newest = newest_recoverable(catalog)
    if snapshots and (newest > snapshots[-1].step or not legs):
        legs.append(Leg(snapshots[-1], None, newest))
    return legs


def newest_recoverable(catalog: Catalog) -> int:
    """Return the newest step that can be rebuilt, -1 if none can."""
    return max((last for _, last in recoverable(catalog)), default=-1)
