"""Taking over what the writers of dead trainers left in staging."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Collection
from pathlib import Path

from lowdiff.errors import StorageError
from lowdiff.persistence.catalog import complete_snapshots
from lowdiff.persistence.codec import Codec
from lowdiff.persistence.framing import FileHeader, FileKind, RecordRef
from lowdiff.persistence.locks import FileLock
from lowdiff.persistence.ownership import is_known, staging_of_run
from lowdiff.persistence.page import Page, PageReader
from lowdiff.persistence.paths import StagingFolder
from lowdiff.persistence.replica_status import has_replica
from lowdiff.persistence.segment_file import seal_left
from lowdiff.persistence.segments import SegmentWriter, batches_of, require_run
from lowdiff.persistence.staging_retention import (
    only_staged,
    said_durable,
    staged_differentials,
)
from lowdiff.persistence.status import read_trainer_status
from lowdiff.persistence.writer_settings import WriterSettings

_logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.1


def adopt_predecessors(settings: WriterSettings, trainer_gone: threading.Event) -> str:
    """Make durable, then remove, what earlier incarnations left in staging on this machine.

    A folder whose own writer still works is waited for. The writers of a machine share out what
    they find there: ranks may have moved to other machines since, or exist no longer.

    Returns:
        What kept it from adopting some of them, to be tried again; empty if nothing did.
    """
    errors = []
    for stage in _predecessors(settings):
        lock = FileLock(stage.writer_lock)
        try:
            while not lock.acquire(f"adopting writer {os.getpid()}", timeout_seconds=1.0):
                if trainer_gone.is_set():
                    break  # the next incarnation's writer will adopt it
            else:
                is_log = not has_replica(stage)
                if is_log:
                    asyncio.run(_adopt(settings, stage))
                # The residual of a log's last step is nowhere else, as is all of a replica's state.
                is_base = is_log and settings.continues
                if not is_base and not _is_replaced(settings, stage, trainer_gone):
                    _logger.info("%s stays until a later life's snapshot is seen", stage.root)
                elif is_log or FileLock(stage.replica_lock).acquire(
                    "adopting writer", timeout_seconds=1.0
                ):
                    stage.remove()
                else:
                    errors.append(f"{FileLock(stage.replica_lock).holder()} holds {stage.root}")
        except (OSError, StorageError) as error:
            if stage.root.exists():  # else another incarnation's writer was faster
                _logger.warning("cannot adopt %s: %s; it stays in staging", stage.root, error)
                errors.append(f"{type(error).__name__}: {error}")
        finally:
            lock.release()
            stage.sweep()  # the lock may have kept it
    return "; ".join(errors)


def has_replica_before(settings: WriterSettings) -> bool:
    """Whether what this writer is to adopt has state that only a replica's memory holds."""
    there = StagingFolder.all_of_run(Path(settings.staging_root), settings.run_id)
    if not any(s.incarnation < settings.incarnation and has_replica(s) for s in there):
        return False  # as nearly always, and without reading a fence
    return any(
        has_replica(stage) and not _is_superseded(settings, stage)
        for stage in _predecessors(settings)
    )


def ranks_to_adopt(settings: WriterSettings) -> frozenset[int]:
    """Whose logs this writer makes durable, beside its own."""
    return frozenset(stage.rank for stage in _predecessors(settings))


def _predecessors(settings: WriterSettings) -> list[StagingFolder]:
    """Folders of earlier incarnations that this writer takes over, oldest first."""
    root = Path(settings.staging_root)
    here = {settings.rank}
    for stage in StagingFolder.all_of_run(root, settings.run_id):
        if stage.incarnation == settings.incarnation:
            here.add(stage.rank)
    return [
        stage
        for stage in staging_of_run(root, settings.folder, settings.run_id)
        if stage.incarnation < settings.incarnation
        and settings.rank == _heir(stage.rank, here, settings.world_size)
        and is_known(stage, settings.folder)
    ]


def _heir(rank: int, here: Collection[int], world_size: int) -> int:
    """Which of the ranks on this machine takes over what ``rank`` left there.

    Itself if it is there; of a rank that no longer exists the one that serves it everywhere else.
    Otherwise the nearest by exclusive or, which shares ranks out evenly. The heir among all is the
    heir among any of them, so nothing is left over while one has yet to make its folder; two who
    both believe that they are find the folder locked, or gone.
    """
    return min(here, key=lambda heir: ((rank - heir) % world_size != 0, rank ^ heir))


def _is_superseded(settings: WriterSettings, stage: StagingFolder) -> bool:
    """Whether a later life has a snapshot of all its ranks, so that memory may go."""
    found = complete_snapshots(settings.folder, settings.run_id)
    return any(snapshot.incarnation > stage.incarnation for snapshot in found)


def _is_replaced(
    settings: WriterSettings, stage: StagingFolder, trainer_gone: threading.Event
) -> bool:
    """Whether the state in memory is no longer needed, because a life that came after it has begun.

    Of a rank that this one serves the base is in its own shard, by now; but other ranks may yet fail to
    begin, and without theirs it is of no use. Once this rank has trained, all have begun. That of
    another, which trains on another machine now, is waited for; where run folders are not shared it
    cannot be seen before the next attach, and the memory stays.
    """
    is_served = settings.serves(stage.rank)
    fences = [number for number, _, _ in settings.folder.fences()]
    is_shared = fences.count(settings.incarnation) == settings.world_size
    while not ((is_served and _has_trained(settings)) or _is_superseded(settings, stage)):
        if trainer_gone.is_set() or not (is_shared or is_served):
            return False
        time.sleep(_POLL_SECONDS)
    return True


def _has_trained(settings: WriterSettings) -> bool:
    """Whether this rank's trainer has committed a step, for which it exchanged with all others."""
    found = read_trainer_status(settings.staging.trainer_status)
    return found is not None and found.step > settings.base_step


async def _adopt(settings: WriterSettings, stage: StagingFolder) -> None:
    """Make every step of a log durable that the run needs, and that no segment has; seal segments."""
    require_run(settings.folder)
    codec = Codec()
    segments: SegmentWriter | None = None
    staged: dict[int, RecordRef] = {}
    for record in staged_differentials(stage):
        staged.setdefault(record.header.step, record)
    missing = only_staged(settings.folder, stage, staged)
    if missing:
        _doubt(stage, missing[0])
    for step in missing:
        record = staged[step]
        if segments is None:
            file_header = FileHeader(
                FileKind.SEGMENT,
                settings.run_id,
                stage.incarnation,
                stage.rank,
                record.header.world_size,
                sequence=0,
            )
            segments = SegmentWriter(settings.folder, file_header, settings.segment_bytes)
        for batch in batches_of([record], codec):
            await segments.append(batch)
    if segments is not None:
        await segments.seal()
    for number, _, _, path in settings.folder.segments(lambda rank: rank == stage.rank):
        if number == stage.incarnation:  # whose writer is dead: its lock is held here
            seal_left(path, (settings.run_id, number, stage.rank))


def _doubt(stage: StagingFolder, first: int) -> None:
    """Take back what a log's writer said of the steps from one on, of which some are gone.

    They are about to be written again, and that may fail: whoever finds them then must not rely on
    what was true of others.
    """
    if said_durable(stage) >= first:
        said = PageReader(stage.status).read()
        Page(stage.status).publish({**said, "durable_step": first - 1})
