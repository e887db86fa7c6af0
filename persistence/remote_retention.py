"""What retention may remove from an object store, decided as for a run folder."""

from __future__ import annotations

import time
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from lowdiff.errors import DamagedFile
from lowdiff.persistence.catalog import begun_fences
from lowdiff.persistence.fences import read_fence
from lowdiff.persistence.fetching import Listing
from lowdiff.persistence.lineage import lineage
from lowdiff.persistence.retention_notes import read_pins
from lowdiff.persistence.retention_plan import (
    Inventory,
    StoredSegment,
    StoredSnapshot,
    plan_collection,
)
from lowdiff.persistence.snapshots import Manifest
from lowdiff.persistence.writer_settings import WriterSettings
from lowdiff.types import Fence


def spent(
    settings: WriterSettings, in_store: Listing, listing: Listing, segments: Collection[str]
) -> frozenset[Path]:
    """Snapshots and segments of a listing that may go, given the snapshots in the store.

    Of the store's own, that is what retention removes; of the run folder's, what is not worth
    uploading any more.

    Args:
        settings: The policy, the run and whose writer this is.
        in_store: What the store holds, at least all manifests, and since when.
        listing: What is asked about.
        segments: Names of the segments in it that are asked about.
    """
    folder = settings.folder
    if settings.retention is None:
        return frozenset()
    fences = _fences(settings)
    complete = set(in_store.snapshots(fences))
    sizes: dict[tuple[int, int], int] = dict.fromkeys(complete, 0)
    for file in listing.files("manifest", "shard"):
        key = file.step, file.incarnation
        sizes[key] = sizes.get(key, 0) + listing.sizes[file.name]
    uploaded: dict[tuple[int, int], float] = {}
    for file in in_store.files("manifest", "shard"):
        key = file.step, file.incarnation
        uploaded[key] = max(uploaded.get(key, 0.0), in_store.written.get(file.name, 0.0))
    inventory = Inventory(
        spans=lineage(fences),
        snapshots=tuple(
            StoredSnapshot(
                number,
                step,
                folder.snapshot(number, step),
                size,
                (step, number) in complete,
                _written_seconds(folder.snapshot(number, step), uploaded.get((step, number), 0.0)),
                _lowest_base(complete, fences[number], step)
                if number in fences
                and _may_be_rolling(settings, in_store, folder.snapshot(number, step))
                else None,
            )
            for (step, number), size in sorted(sizes.items())
        ),
        segments=tuple(
            StoredSegment(
                file.incarnation,
                file.rank,
                file.step,
                folder.root / file.name,
                listing.sizes[file.name],
            )
            for file in listing.files("segment")
            if file.name in segments
        ),
    )
    pins = read_pins(folder, settings.run_id)
    plan = plan_collection(inventory, settings.retention, pins, now_seconds=time.time())
    return frozenset(removal.path for removal in plan.removals)


def may_be_replaced(settings: WriterSettings, in_store: Listing, manifest: Path) -> bool:
    """Whether a store may be without a rolling shard until it has the atomic one that is here.

    Not without its only snapshot, which is as good, with the differentials of its cycle.
    """
    try:
        is_atomic = Manifest.read(manifest).first_base is None
        complete = in_store.snapshots(_fences(settings))
    except DamagedFile:
        return False
    others = [n for step, n in complete if settings.folder.snapshot(n, step) != manifest.parent]
    return is_atomic and bool(others)


def _fences(settings: WriterSettings) -> dict[int, Fence]:
    """Of every incarnation that began."""
    own = read_fence(settings.folder.fence(settings.incarnation, settings.rank))
    # With run folders of their own, ranks do not see each other's newest fences.
    return {own.incarnation: own, **begun_fences(settings.folder, settings.run_id)}


def _may_be_rolling(settings: WriterSettings, in_store: Listing, snapshot: Path) -> bool:
    """Whether the store may have a rolling shard of a snapshot; of other ranks' not all is seen here."""
    if settings.is_rolling:
        return True
    manifests = list(snapshot.glob("rank-*.json"))
    try:
        found = [Manifest.read(path).first_base for path in manifests]
        here = {settings.folder.name(path): path.stat().st_size for path in manifests}
    except (FileNotFoundError, DamagedFile):
        return True
    # An atomic one may have taken a rolling one's place here, and be shorter: it has no base.
    is_older = any(in_store.sizes.get(name, size) != size for name, size in here.items())
    # None is here where this node came later than the snapshot.
    return not found or is_older or any(base is not None for base in found)


def _lowest_base(complete: Collection[tuple[int, int]], fence: Fence, step: int) -> int:
    """A step that no block of a snapshot can be older than, from the names of snapshots alone.

    A cycle lies in one incarnation, and every snapshot that the incarnation takes begins another.
    """
    before = (s for s, owner in complete if owner == fence.incarnation and s < step)
    return max(before, default=fence.base_step)


def _written_seconds(snapshot: Path, uploaded: float) -> float:
    """When a snapshot was written: by this rank's node, else when the store got it."""
    with suppress(FileNotFoundError):  # or retention is just removing it
        times = [path.stat().st_mtime for path in snapshot.glob("rank-*.json")]
        return max(times, default=uploaded)
    return uploaded
