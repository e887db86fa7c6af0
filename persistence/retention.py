"""Which snapshots and segments may go, and removing them."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from lowdiff.persistence.catalog import SnapshotSet, complete_fences, complete_snapshots
from lowdiff.persistence.lineage import Span, lineage
from lowdiff.persistence.paths import RunFolder


@dataclass(frozen=True, slots=True)
class StoredSegment:
    """One segment of one rank, by name."""

    incarnation: int
    first: int
    path: Path


@dataclass(frozen=True, slots=True)
class Collection:
    """What may be removed.

    Attributes:
        snapshots: Folders of snapshots older than the oldest kept one.
        segments: Segments with nothing after the oldest kept snapshot.
    """

    snapshots: tuple[Path, ...]
    segments: tuple[Path, ...]


def plan_collection(
    spans: Sequence[Span],
    snapshots: Sequence[SnapshotSet],
    segments: Sequence[StoredSegment],
    keep_snapshots: int,
    *,
    folders: Sequence[tuple[int, Path]] = (),
) -> Collection:
    """Decide what may go. Snapshots off the lineage never count as kept.

    Args:
        spans: The run's lineage.
        snapshots: Complete snapshots, any order.
        segments: One rank's segments.
        keep_snapshots: How many of the newest snapshots on the lineage stay, at least 1.
        folders: Step and folder of every snapshot, complete or not: what a crash left half
            written or half removed goes as well.
    """
    owners = {span.incarnation: span for span in spans}
    # A set: a run that is closed and opened again takes its last snapshot twice.
    valid = sorted(
        {
            s.step
            for s in snapshots
            if s.incarnation in owners and owners[s.incarnation].holds(s.step)
        }
    )
    if len(valid) < keep_snapshots:
        return Collection((), ())
    oldest_kept = valid[-keep_snapshots]
    # Ranks take snapshots in step order, so nothing this old is still being written.
    old = tuple(path for step, path in folders if step < oldest_kept)
    spent = []
    ordered = sorted(segments, key=lambda s: (s.incarnation, s.first))
    for segment, after in zip_longest(ordered, ordered[1:]):
        owner = owners.get(segment.incarnation)
        ends = [] if owner is None or owner.last is None else [owner.last]
        if after is not None and after.incarnation == segment.incarnation:
            ends.append(after.first - 1)
        if ends and min(ends) <= oldest_kept:
            spent.append(segment.path)
    return Collection(old, tuple(spent))


def collect(folder: RunFolder, run_id: str, keep_snapshots: int) -> None:
    """Remove what `plan_collection` allows, of every rank; safe to run on several at once.

    A crash in the middle leaves only complete things: a snapshot's manifests go first, and
    without them it no longer exists by the one definition there is.
    """
    spans = lineage(complete_fences(folder, run_id))
    snapshots = complete_snapshots(folder, run_id)
    by_rank: dict[int, list[StoredSegment]] = {}
    for incarnation, rank, first, path in folder.segments():
        by_rank.setdefault(rank, []).append(StoredSegment(incarnation, first, path))
    for segments in by_rank.values():
        for path in plan_collection(spans, snapshots, segments, keep_snapshots).segments:
            path.unlink(missing_ok=True)
    folders = [(step, path) for _, step, path in folder.snapshots()]
    old = plan_collection(spans, snapshots, (), keep_snapshots, folders=folders).snapshots
    for snapshot in old:
        for manifest in sorted(snapshot.glob("rank-*.json")):
            manifest.unlink(missing_ok=True)
        shutil.rmtree(snapshot, ignore_errors=True)
