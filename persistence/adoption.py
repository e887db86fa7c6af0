"""Taking over what the writers of dead trainers left in staging."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from pathlib import Path

from lowdiff.errors import StorageError
from lowdiff.persistence.codec import Codec
from lowdiff.persistence.framing import FileHeader, FileKind, RecordKind
from lowdiff.persistence.locks import FileLock
from lowdiff.persistence.ownership import staging_of_run
from lowdiff.persistence.paths import StagingFolder
from lowdiff.persistence.replica_status import has_replica
from lowdiff.persistence.segments import SegmentWriter, batches_of, durable_step
from lowdiff.persistence.staging import staged_records
from lowdiff.persistence.writer_settings import WriterSettings

_logger = logging.getLogger(__name__)


def adopt_predecessors(settings: WriterSettings, trainer_gone: threading.Event) -> str:
    """Make durable, then remove, what earlier incarnations left in staging for this rank.

    A folder whose own writer still works is waited for. Ranks that no longer exist are shared
    out over those that do.

    Returns:
        What kept it from adopting some of them, to be tried again; empty if nothing did.
    """
    errors = []
    root = Path(settings.staging_root)
    for stage in staging_of_run(root, settings.folder, settings.run_id):
        if stage.incarnation >= settings.incarnation or not settings.serves(stage.rank):
            continue
        lock = FileLock(stage.writer_lock)
        try:
            while not lock.acquire(f"adopting writer {os.getpid()}", timeout_seconds=1.0):
                if trainer_gone.is_set():
                    break  # the next incarnation's writer will adopt it
            else:
                if not has_replica(stage):
                    asyncio.run(_adopt(settings, stage))
                    stage.remove()
                elif FileLock(stage.replica_lock).acquire("adopting writer", timeout_seconds=1.0):
                    stage.remove()  # its state is the base of this life, which is durable by now
                else:
                    errors.append(f"{FileLock(stage.replica_lock).holder()} holds {stage.root}")
        except (OSError, StorageError) as error:
            if stage.root.exists():  # else another incarnation's writer was faster
                _logger.warning("cannot adopt %s: %s; it stays in staging", stage.root, error)
                errors.append(f"{type(error).__name__}: {error}")
        finally:
            lock.release()
    return "; ".join(errors)


def has_replica_before(settings: WriterSettings) -> bool:
    """Whether an earlier incarnation's newest state is in a replica's memory."""
    root = Path(settings.staging_root)
    return any(
        stage.incarnation < settings.incarnation and has_replica(stage)
        for stage in staging_of_run(root, settings.folder, settings.run_id)
    )


async def _adopt(settings: WriterSettings, stage: StagingFolder) -> None:
    codec = Codec()
    segments: SegmentWriter | None = None
    durable = durable_step(settings.folder, stage.incarnation, stage.rank, -1)
    for _, record in staged_records(stage):
        header = record.header
        if header.kind is not RecordKind.DIFFERENTIAL or header.step <= durable:
            continue
        if segments is None:
            file_header = FileHeader(
                FileKind.SEGMENT,
                settings.run_id,
                stage.incarnation,
                stage.rank,
                header.world_size,
                sequence=0,
            )
            segments = SegmentWriter(settings.folder, file_header)
        for batch in batches_of([record], codec):
            await segments.append(batch)
    if segments is not None:
        await segments.seal()
