"""What copies on other nodes hold of a rank, beside what its own folder holds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress

from lowdiff.errors import DamagedFile
from lowdiff.persistence.files.paths import RunFolder, StagingFolder
from lowdiff.persistence.format.image import Manifest, check_shard, manifest_file
from lowdiff.persistence.run.catalog import Catalog
from lowdiff.persistence.run.records import RankRecords
from lowdiff.persistence.staging.status import (
    ReplicaStatus,
    TrainerStatus,
    read_status,
)
from lowdiff.recovery.sources.folders import (
    InFolder,
    in_own_folder,
    is_at_rest,
    kept_images,
    kept_marks,
)
from lowdiff.recovery.sources.source import Held, Source
from lowdiff.types import Fence


def nothing_else(stage: StagingFolder, records: RankRecords) -> list[Source]:
    """Return nothing: images that stay in a folder are all that is there beside records."""
    return []


def with_copies(in_folder: InFolder, *, replays_shares: bool) -> Held:
    """Add to what a strategy holds of a rank what copies hold, and the rank's shares on disk at their steps.

    Args:
        in_folder: Returns what the strategy holds in a folder, the rank's own or a copy, beside images that stay there.
        replays_shares: Whether a share is replayed by its rank's own records, which have whole gradients.
    """

    def in_any(stage: StagingFolder, records: RankRecords) -> list[Source]:
        return [*kept_images(stage, records), *in_folder(stage, records)]

    def held(catalog: Catalog, fence: Fence, rank: int, _: dict[int, str]) -> list[Source]:
        records = catalog.of(fence.incarnation, rank) if replays_shares else RankRecords()
        copies = [copy for copy in catalog.copies if copy.incarnation == fence.incarnation]
        sources = in_own_folder(catalog, fence, rank, records, in_any)
        for copy in copies:
            if copy.rank == rank and is_at_rest(copy):
                sources += in_any(copy, records)
        steps = {mark.step for copy in copies for _, mark in kept_marks(copy)}
        if not sources:  # as after a clean end; copies of replicas are of that step, or almost
            steps |= _disk_steps(catalog, fence, copies)
        steps -= {source.step for source in sources}
        return [*sources, *_on_disk(catalog, fence, rank, steps, records)]

    return held


def _disk_steps(catalog: Catalog, fence: Fence, copies: Sequence[StagingFolder]) -> set[int]:
    """Return the steps of an incarnation's snapshots, complete or not, from the newest state of a replica's copy on."""
    newest = [_newest_step(copy) for copy in copies if copy.replica_status.exists()]
    return {
        step
        for incarnation, step, _ in RunFolder(catalog.root).snapshots()
        if incarnation == fence.incarnation and newest and step >= min(newest)
    }


def _newest_step(copy: StagingFolder) -> int:
    """Return the step of the state or the image that a replica's copy has."""
    image = read_status(copy.trainer_status, TrainerStatus).image
    replica = read_status(copy.replica_status, ReplicaStatus)
    return max(replica.step, -1 if image is None else image.step)


def _on_disk(
    catalog: Catalog, fence: Fence, rank: int, steps: set[int], records: RankRecords
) -> Iterator[Source]:
    """Yield a rank's share of snapshots at some steps, whether or not the shares of all ranks are there."""
    for step in steps:
        snapshot = RunFolder(catalog.root).snapshot(fence.incarnation, step)
        if manifest_file(snapshot, rank).is_file():
            with suppress(DamagedFile, FileNotFoundError):  # said where the snapshot is listed
                path = check_shard(snapshot, Manifest.read(manifest_file(snapshot, rank)))
                yield Source(path, step, step, records)
