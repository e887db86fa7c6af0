"""Decide what retention may remove from an object store, with the same plan as for a run folder."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path

from lowdiff.persistence.retention.plan import (
    Inventory,
    StoredSegment,
    StoredSnapshot,
    plan_collection,
)
from lowdiff.persistence.run.catalog import begun_fences
from lowdiff.persistence.run.fences import lineage, read_fence
from lowdiff.persistence.run.journal import read_pins
from lowdiff.persistence.staging.settings import WriterSettings
from lowdiff.persistence.store.fetch import Listing
from lowdiff.types import Fence


def spent(settings: WriterSettings, in_store: Listing, here: Listing) -> frozenset[Path]:
    """Return the snapshots and segments that the run's policy does not keep in the store.

    Of these, files in the store can be removed, and files in the run folder only are not worth an
    upload. Completeness and age of a snapshot are those in the store.

    Args:
        settings: Policy, run and rank of the writer.
        in_store: Listing of the store, at least all snapshots, with their times.
        here: Listing of the run folder.

    Raises:
        DamagedFile: If a fence or a pin is damaged, so that it is unknown which files must stay.
    """
    folder = settings.folder
    if settings.retention is None:
        return frozenset()
    fences = _fences(settings)
    complete = set(in_store.snapshots(fences))
    both = Listing({**here.sizes, **in_store.sizes})
    sizes: Counter[tuple[int, int]] = Counter()
    written: dict[tuple[int, int], float] = {}
    for file in both.files("manifest", "image"):
        key = file.step, file.incarnation
        sizes[key] += both.sizes[file.name]
        written[key] = max(written.get(key, 0.0), in_store.written.get(file.name, 0.0))
    inventory = Inventory(
        spans=lineage(fences),
        snapshots=tuple(
            StoredSnapshot(
                number,
                step,
                folder.snapshot(number, step),
                size,
                (step, number) in complete,
                written[step, number],
            )
            for (step, number), size in sorted(sizes.items())
        ),
        segments=tuple(
            StoredSegment(
                file.incarnation,
                file.rank,
                file.step,
                folder.root / file.name,
                both.sizes[file.name],
            )
            for file in both.files("segment")
        ),
    )
    pins = read_pins(folder, settings.run_id)
    plan = plan_collection(inventory, settings.retention, pins, now_seconds=time.time())
    return frozenset(removal.path for removal in plan.removals)


def _fences(settings: WriterSettings) -> dict[int, Fence]:
    """Return the fence of every incarnation that began."""
    own = read_fence(settings.folder.fence(settings.incarnation, settings.rank))
    # If ranks have run folders of their own, they do not see each other's newest fences.
    return {own.incarnation: own, **begun_fences(settings.folder, settings.run_id)}
