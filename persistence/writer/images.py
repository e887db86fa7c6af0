"""Make a staged snapshot durable: first the image under its final name, then the manifest."""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass
from pathlib import Path

import aiofiles
from crc32c import crc32c

from lowdiff.errors import StorageError
from lowdiff.persistence.files.durable import fsync_directory, make_directory
from lowdiff.persistence.files.locks import FileLock
from lowdiff.persistence.files.mapped_file import ImageMark, read_view
from lowdiff.persistence.files.paths import RunFolder, StagingFolder
from lowdiff.persistence.format.document import write_json
from lowdiff.persistence.format.image import (
    Manifest,
    PartSums,
    header_of,
    manifest_file,
    shard_file,
)
from lowdiff.persistence.run.catalog import complete_snapshots
from lowdiff.persistence.run.fences import require_run
from lowdiff.persistence.staging.settings import WriterSettings
from lowdiff.persistence.staging.status import (
    ReplicaStatus,
    SavedStatus,
    TrainerStatus,
    read_status,
)


class DamagedImage(StorageError):
    """A staged image is not what its mark says: removed, damaged, or just being overwritten.

    Attributes:
        checksum: Of the bytes that are there; None where no image is.
    """

    def __init__(self, image: StagedImage, checksum: int | None) -> None:
        self.checksum = checksum
        super().__init__(f"the staged snapshot of step {image.step} changed before it was durable")


@dataclass(frozen=True, slots=True)
class StagedImage:
    """A staged image that waits to be persisted."""

    step: int
    bytes: int
    checksum: int
    image: Path

    def is_withdrawn(self, staging: StagingFolder) -> bool:
        """Return whether its mark is gone, or is that of a later image in the same file."""
        return not any(
            mark is not None and (mark.step, image) == (self.step, self.image)
            for mark, image in _marks(staging)
        )


def newer_images(staging: StagingFolder, step: int) -> list[StagedImage]:
    """Return whole images of later steps, oldest first, one per step.

    Of two images of one step, the trainer's is returned, because the replica's image may be gone
    once the trainer's is durable.
    """
    new: dict[int, StagedImage] = {}
    for mark, image in _marks(staging):
        if mark is not None and mark.step > step:
            new[mark.step] = StagedImage(mark.step, mark.bytes, mark.checksum, image)
    return [new[step] for step in sorted(new)]


def _marks(staging: StagingFolder) -> tuple[tuple[ImageMark | None, Path], ...]:
    """Return the mark of each image and its file, the trainer's last."""
    trainers = read_status(staging.trainer_status, TrainerStatus).image
    return (
        (read_status(staging.survivor_saved, SavedStatus).image, staging.survivor_image),
        (read_status(staging.replica_status, ReplicaStatus).image, staging.replica_image),
        (trainers, staging.snapshot if trainers is None else staging.image(trainers.slot)),
    )


def durable_image(settings: WriterSettings) -> int:
    """Return the newest step before this incarnation that is durable as a whole, or 0."""
    found = complete_snapshots(settings.folder, settings.run_id)
    return max((s.step for s in found if s.step <= settings.base_step), default=0)


def is_free(path: Path) -> bool:
    """Return whether no process holds a lock."""
    lock = FileLock(path)
    free = lock.acquire(f"writer {os.getpid()}")
    lock.release()
    return free


_COPY_BYTES = 4 << 20


def durable_snapshot(folder: RunFolder, incarnation: int, rank: int) -> int:
    """Return the step of one rank's newest durable image of an incarnation, or -1."""
    newest = -1
    for number, step, path in folder.snapshots():
        if number == incarnation and manifest_file(path, rank).is_file():
            fsync_directory(path)  # its writer may have been killed before its own fsync
            newest = max(newest, step)
    return newest


async def persist_image(settings: WriterSettings, image: StagedImage) -> None:
    """Make one rank's image durable; after a failure, the same image can be passed again.

    Raises:
        DamagedImage: If the staged image is gone, or changed before or while it was copied.
        StorageError: If the run is gone.
        RunMismatch: If another run is in this run's place.
    """
    folder = settings.folder.snapshot(settings.incarnation, image.step)
    await asyncio.to_thread(require_run, settings.folder, settings.run_id)
    await asyncio.to_thread(make_directory, folder)
    target = shard_file(folder, settings.rank)
    partial = target.with_name(target.name + ".partial")
    try:
        parts = await _copy_image(image, partial)
    except (OSError, DamagedImage):
        partial.unlink(missing_ok=True)  # leaves the rest of the disk to differentials
        raise
    manifest = Manifest(
        run_id=settings.run_id,
        incarnation=settings.incarnation,
        step=image.step,
        rank=settings.rank,
        world_size=settings.world_size,
        bytes=image.bytes,
        checksum=image.checksum,
        parts=tuple(parts),
    )
    # Check again, because the copy of a large image takes long.
    await asyncio.to_thread(require_run, settings.folder, settings.run_id)
    partial.replace(target)
    await asyncio.to_thread(fsync_directory, folder)
    # A failed attempt may have written this manifest with the same content.
    await asyncio.to_thread(write_json, manifest_file(folder, settings.rank), manifest.document())


async def _copy_image(mark: StagedImage, partial: Path) -> list[int]:
    """Copy a staged image; the checksums of its parts."""
    try:
        source = read_view(mark.image)[: mark.bytes]
        header = header_of(source)
    except (FileNotFoundError, ValueError, LookupError, TypeError) as error:
        raise DamagedImage(mark, None) from error
    checksum, sums = 0, PartSums(header.bytes, header.entries)
    async with aiofiles.open(partial, "wb") as file:
        for start in range(0, mark.bytes, _COPY_BYTES):
            piece = source[start : start + _COPY_BYTES]
            checksum = crc32c(piece, checksum)
            sums.add(piece)
            await file.write(piece)
        await file.flush()
        await asyncio.to_thread(os.fsync, file.fileno())
    if checksum != mark.checksum:
        raise DamagedImage(mark, checksum)
    return sums.found
