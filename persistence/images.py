"""Images of the state that wait in memory to be persisted, by the trainer or by its replica."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from lowdiff.persistence.catalog import complete_snapshots
from lowdiff.persistence.locks import FileLock
from lowdiff.persistence.paths import StagingFolder
from lowdiff.persistence.replica_status import has_replica, read_replica_status
from lowdiff.persistence.status import read_trainer_image
from lowdiff.persistence.writer_settings import WriterSettings


@dataclass(frozen=True, slots=True)
class StagedImage:
    """A staged image waits to be persisted."""

    step: int
    bytes: int
    checksum: int
    image: Path


def newer_images(staging: StagingFolder, step: int) -> list[StagedImage]:
    """Whole images of later steps, oldest first, and one of each step.

    Of two of one step it is the trainer's: the replica's may be gone once the other is durable.
    """
    sources = [(read_trainer_image(staging.trainer_status), staging.snapshot)]
    if has_replica(staging):
        replica = read_replica_status(staging.replica_status)
        sources.insert(0, (replica.image, staging.replica_image))
    new: dict[int, StagedImage] = {}
    for mark, image in sources:
        if mark is not None and mark.step > step:
            new[mark.step] = StagedImage(mark.step, mark.bytes, mark.checksum, image)
    return [new[step] for step in sorted(new)]


def durable_image(settings: WriterSettings) -> int:
    """The newest step before this life that is durable whole, or 0."""
    found = complete_snapshots(settings.folder, settings.run_id)
    return max((s.step for s in found if s.step <= settings.base_step), default=0)


def is_free(path: Path) -> bool:
    """Whether nobody holds a lock."""
    lock = FileLock(path)
    free = lock.acquire(f"writer {os.getpid()}")
    lock.release()
    return free
