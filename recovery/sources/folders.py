"""Staging folders as sources: whether somebody writes them, and which images in them are whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from crc32c import crc32c

from lowdiff.errors import RunInUse
from lowdiff.persistence.files.locks import FileLock
from lowdiff.persistence.files.mapped_file import ImageMark, read_view
from lowdiff.persistence.files.paths import StagingFolder
from lowdiff.persistence.run.catalog import Catalog
from lowdiff.persistence.run.records import RankRecords
from lowdiff.persistence.staging.items import read_items_at
from lowdiff.persistence.staging.status import SavedStatus, TrainerStatus, read_status
from lowdiff.recovery.replica.file import PASSING
from lowdiff.recovery.sources.source import Source
from lowdiff.types import Fence

#: Time enough for whoever has just taken a lock to say who it is.
_GLANCE_SECONDS = 0.05
#: How long a replica may take for its last step, and others for a look at the memory.
_PATIENCE_SECONDS = 30.0

#: Returns the sources in one folder, for a rank with these records.
InFolder = Callable[[StagingFolder, RankRecords], list[Source]]


def in_own_folder(
    catalog: Catalog, fence: Fence, rank: int, records: RankRecords, in_folder: InFolder
) -> list[Source]:
    """Return the sources in the folder that a rank made itself, if the folder is here and at rest."""
    sources: list[Source] = []
    for stage in catalog.staging:
        if (stage.incarnation, stage.rank) == (fence.incarnation, rank) and is_at_rest(stage):
            with suppress(FileNotFoundError):  # a trainer attached just now, and clears the folder
                sources += in_folder(stage, records)
    return sources


def trainer_image(stage: StagingFolder, records: RankRecords, *, after: int = -1) -> list[Source]:
    """Return the trainer's image if it is whole, and of a later step than ``after``."""
    mark = read_status(stage.trainer_status, TrainerStatus).image
    if mark is None or mark.step <= after or not is_whole(stage.snapshot, mark):
        return []
    return [Source(stage.snapshot, mark.step, mark.step, records)]


def kept_images(stage: StagingFolder, records: RankRecords) -> Iterator[Source]:
    """Yield the images that stay in a folder; those of a copy have the rank's items beside them."""
    for slot, mark in kept_marks(stage):
        items = None
        if stage.keeper is not None:
            items = read_items_at(stage.kept_items(slot), mark.step)
        if (stage.keeper is None or items is not None) and is_whole(stage.kept(slot), mark):
            yield Source(stage.kept(slot), mark.step, mark.step, records, items)


def kept_marks(stage: StagingFolder) -> list[tuple[int, ImageMark]]:
    """Return slot and mark of each image that stays in a folder."""
    marks = [(slot, read_status(page, SavedStatus).image) for slot, page in stage.kept_pages()]
    return [(slot, mark) for slot, mark in marks if mark is not None]


def is_whole(path: Path, mark: ImageMark) -> bool:
    """Return whether an image is what its mark says."""
    if not path.exists():
        return False
    image = read_view(path)
    return len(image) == mark.bytes and crc32c(image) == mark.checksum


def is_at_rest(stage: StagingFolder) -> bool:
    """Return whether neither its trainer nor whoever writes a state into it lives.

    What only looks at the memory, or ends with its trainer, is waited for: to go back to the disk
    because of it would lose the steps that are here.

    Raises:
        RunInUse: If somebody keeps it.
    """
    try:
        trainer, *others = map(FileLock, (stage.trainer_lock, *stage.state_locks))
        is_free = _is_free(trainer, _GLANCE_SECONDS)
        if not is_free and not trainer.has_guest():
            return False
        for lock in (trainer, *others):
            if not _is_free(lock, _PATIENCE_SECONDS):
                raise RunInUse(stage.root, lock.holder(), _PATIENCE_SECONDS)
    except OSError as error:
        if error.errno in PASSING:
            raise
        return False  # somebody else's memory, or it is being removed
    return True


def _is_free(lock: FileLock, timeout_seconds: float) -> bool:
    is_free = lock.acquire("a look at its replica", shared=True, timeout_seconds=timeout_seconds)
    lock.release()
    return is_free
