"""Adopt staging folders that the writers of dead trainers left."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from dataclasses import replace
from pathlib import Path

from lowdiff.core.events import Code, inform
from lowdiff.errors import RunMismatch, StorageError
from lowdiff.persistence.files.locks import FileLock
from lowdiff.persistence.files.paths import StagingFolder
from lowdiff.persistence.format.codec import Codec
from lowdiff.persistence.format.framing import FileHeader, FileKind, RecordKind, RecordRef
from lowdiff.persistence.format.segment_file import seal_left
from lowdiff.persistence.retention.staging import only_staged
from lowdiff.persistence.run.catalog import complete_snapshots
from lowdiff.persistence.run.fences import require_run
from lowdiff.persistence.staging.log import staged_records
from lowdiff.persistence.staging.settings import WriterSettings
from lowdiff.persistence.staging.status import (
    StatusPage,
    TrainerStatus,
    WriterStatus,
    is_log,
    read_status,
)
from lowdiff.persistence.writer.segments import SegmentWriter, batches_of

_POLL_SECONDS = 0.1


def adopt_predecessors(settings: WriterSettings, trainer_gone: threading.Event) -> str:
    """Make durable, then remove, the staging of earlier incarnations on this machine.

    If a folder's own writer still works, this waits for that writer. Attach decided which folders
    this writer adopts.

    Returns:
        Reasons why some folders were not adopted, to be tried again; empty if all were.
    """
    errors = []
    there = StagingFolder.with_copies_of_run(Path(settings.staging_root), settings.run_id)
    for stage in [stage for stage in there if stage.root.name in settings.adopts]:
        lock = FileLock(stage.writer_lock)
        try:
            while not lock.acquire(f"adopting writer {os.getpid()}", timeout_seconds=1.0):
                if trainer_gone.is_set():
                    break  # the next incarnation's writer will adopt it
            else:
                # What another rank made is its own to make durable.
                is_logged = is_log(stage) and stage.keeper is None
                if is_logged:
                    asyncio.run(_adopt(settings, stage))
                # The residual of a log's last step, and all of a state, are nowhere else.
                is_base = is_logged and settings.continues
                if not is_base and not _is_replaced(settings, stage, trainer_gone):
                    inform(f"{stage.root} stays until a later incarnation's snapshot is seen")
                elif is_logged or FileLock(stage.replica_lock).acquire(
                    "adopting writer", timeout_seconds=1.0
                ):
                    stage.remove()
                else:
                    errors.append(f"{FileLock(stage.replica_lock).holder()} holds {stage.root}")
        except (OSError, StorageError, RunMismatch) as error:
            if stage.root.exists():  # else another incarnation's writer was faster
                Code.ADOPTION_FAILED.warn(
                    f"cannot adopt {stage.root}: {error}; it stays in staging"
                )
                errors.append(f"{type(error).__name__}: {error}")
        finally:
            lock.release()
            stage.sweep()  # an open lock file may have kept the folder
    return "; ".join(errors)


def _is_replaced(
    settings: WriterSettings, stage: StagingFolder, trainer_gone: threading.Event
) -> bool:
    """Wait until a later incarnation makes the state in memory unnecessary.

    Until every rank of the later incarnation has begun, the state in memory is the run's newest.
    All ranks have begun once this rank has trained, or once the later incarnation has a snapshot of
    all its ranks. If the run folder is not shared, such a snapshot is only seen at the next attach.

    Returns:
        Whether the state is unnecessary; False if the trainer ended before.
    """
    while not _has_trained(settings) and not any(
        snapshot.incarnation > stage.incarnation
        for snapshot in complete_snapshots(settings.folder, settings.run_id)
    ):
        if trainer_gone.is_set():
            return False
        time.sleep(_POLL_SECONDS)
    return True


def _has_trained(settings: WriterSettings) -> bool:
    """Return whether this rank's trainer has committed a step, which all ranks take part in."""
    return read_status(settings.staging.trainer_status, TrainerStatus).step > settings.base_step


async def _adopt(settings: WriterSettings, stage: StagingFolder) -> None:
    """Make every needed step of a log durable that no segment has, and seal the segments."""
    require_run(settings.folder, settings.run_id)
    codec = Codec()
    segments: SegmentWriter | None = None
    staged: dict[int, RecordRef] = {}
    for _, record in staged_records(stage, must_read=True):
        if record.header.kind is RecordKind.DIFFERENTIAL:
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
        if number == stage.incarnation:  # its writer is dead, because this process holds its lock
            seal_left(path, (settings.run_id, number, stage.rank))


def _doubt(stage: StagingFolder, first: int) -> None:
    """Withdraw the status of a log's writer from step ``first`` on, because some steps are gone.

    These steps are about to be written again, which may fail. Later readers must then not rely on
    claims about the earlier records.
    """
    said = read_status(stage.status, WriterStatus)
    if said.durable_step >= first:
        StatusPage(stage.status, replace(said, durable_step=first - 1))
