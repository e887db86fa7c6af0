"""What retention may remove from an object store, decided as for a run folder."""

from __future__ import annotations

import time
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from lowdiff.persistence.retention.journal import read_pins
from lowdiff.persistence.retention.plan import (
    Inventory,
    StoredSegment,
    StoredSnapshot,
    plan_collection,
)
from lowdiff.persistence.run.catalog import begun_fences
from lowdiff.persistence.run.fences import read_fence
from lowdiff.persistence.run.lineage import lineage
from lowdiff.persistence.store.fetch import Listing
from lowdiff.persistence.writer.settings import WriterSettings
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


def _fences(settings: WriterSettings) -> dict[int, Fence]:
    """Of every incarnation that began."""
    own = read_fence(settings.folder.fence(settings.incarnation, settings.rank))
    # With run folders of their own, ranks do not see each other's newest fences.
    return {own.incarnation: own, **begun_fences(settings.folder, settings.run_id)}


def _written_seconds(snapshot: Path, uploaded: float) -> float:
    """When a snapshot was written: by this rank's node, else when the store got it."""
    with suppress(FileNotFoundError):  # or retention is just removing it
        times = [path.stat().st_mtime for path in snapshot.glob("rank-*.json")]
        return max(times, default=uploaded)
    return uploaded
