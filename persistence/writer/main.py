"""The writer process: tails one rank's staging log and makes it durable.

The trainer starts this process with ``python -m lowdiff.persistence.writer.main SETTINGS``, in a
session of its own, so that a launcher's kill does not reach it. The process imports neither torch
nor the user's script. When its trainer is gone, it drains the staging log and exits. Where survivors save
(strategy survivors, or several nodes), it first waits for what ranks that live save for its dead trainer. A
later incarnation's writer adopts the staging of a dead writer.

Encoding and writing overlap: one task turns records into encoded batches, another writes them.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TypeVar

from lowdiff.core.events import Code, inform
from lowdiff.errors import DamagedFile, LowDiffError, RunMismatch, StorageError, WriterFailed
from lowdiff.persistence.files.detached_process import told_settings
from lowdiff.persistence.files.locks import FileLock, is_held
from lowdiff.persistence.format.codec import Codec
from lowdiff.persistence.format.framing import RecordRef
from lowdiff.persistence.retention.collect import DISK_FULL, collect
from lowdiff.persistence.run.fences import require_run
from lowdiff.persistence.run.owner import Owner
from lowdiff.persistence.staging.log import LogTail
from lowdiff.persistence.staging.measurements import (
    Histogram,
    Recorder,
    gather_measurements,
    write_measurements,
)
from lowdiff.persistence.staging.residual_slots import checksum_slots
from lowdiff.persistence.staging.settings import WriterSettings
from lowdiff.persistence.staging.status import (
    Backoff,
    Complaints,
    StatusPage,
    WriterStatus,
    read_status,
)
from lowdiff.persistence.store.uploader import Uploader
from lowdiff.persistence.writer.adoption import adopt_predecessors
from lowdiff.persistence.writer.images import (
    DamagedImage,
    StagedImage,
    durable_image,
    durable_snapshot,
    is_free,
    newer_images,
    persist_image,
)
from lowdiff.persistence.writer.orders import Orders
from lowdiff.persistence.writer.segments import (
    Batch,
    SegmentWriter,
    batches_of,
    durable_step,
)

_POLL_SECONDS, _LONGEST_POLL_SECONDS = 0.005, 0.04
_RETRY_SECONDS = 1.0
_MEASUREMENTS_SECONDS = 10.0
_NUM_THREADS = 12
#: How long survivors may take from a rank's death to the end of their save: torchrun gives them 30 s.
_SURVIVORS_SECONDS = 30.0


def _backoff() -> Backoff:
    return Backoff(_POLL_SECONDS, _LONGEST_POLL_SECONDS)


_Work = TypeVar("_Work")


class Writer:
    """Makes the content of one staging folder durable.

    Large because its tasks share one event loop and one status page.
    """

    def __init__(self, settings: WriterSettings) -> None:
        self._settings = settings
        self._tail = LogTail(settings.staging)
        self._codec = Codec()
        self._queue: asyncio.Queue[Batch | StagedImage | None] = asyncio.Queue(maxsize=2)
        # A restarted writer continues after the steps that its predecessor made durable.
        before = read_status(settings.staging.status, WriterStatus)
        known = before.durable_step
        durable = durable_step(
            settings.folder,
            settings.run_id,
            settings.incarnation,
            settings.rank,
            settings.base_step,
            known,
        )
        # A later image may already be in the place of a durable snapshot's image.
        snapshot = durable_snapshot(settings.folder, settings.incarnation, settings.rank)
        self._marked = snapshot
        if not settings.logs_steps:
            durable = max(snapshot, durable_image(settings))
        # Counters continue from the values of a dead writer.
        now = replace(
            before, durable_step=durable, durable_snapshot=snapshot, error="", closed=False
        )
        self._status = StatusPage(settings.staging.status, now)
        self._batch_seconds = Histogram(self._status.status.batch_seconds)
        self._batch_began = 0.0
        self._recorder = Recorder(settings.staging.measured_by_writer)
        self._is_durable = asyncio.Event()
        self._deleted_since: float | None = None
        self._owner = Owner.read(settings.staging)
        self._segments = SegmentWriter(
            settings.folder, settings.segment_header, settings.segment_bytes
        )
        self._uploader = (
            None if settings.store is None else Uploader(settings, self._status, self._recorder)
        )
        self._complaints = Complaints(self._status, "error")
        self._has_begun = False
        self._orders = Orders(settings)

    async def run(self, lock: FileLock) -> None:
        """Work until the trainer is gone and everything staged is durable, and in the store.

        The lock is released once all is durable, so that a next incarnation need not wait for a
        store.
        """
        # Enough threads that neither a store nor an adoption takes the thread of a durable write.
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(_NUM_THREADS))
        uploading = None
        if self._uploader is not None:
            uploading = asyncio.create_task(self._uploader.run())
        measuring = asyncio.create_task(self._keep_measurements())
        await self._make_durable()
        self._is_durable.set()
        await measuring
        await self._write_measurements(ended="died")
        await asyncio.to_thread(checksum_slots, self._settings.staging.residual)
        self._status.update(closed=True)
        lock.release()
        if uploading is not None and self._uploader is not None:
            self._uploader.end()
            await uploading

    async def _make_durable(self) -> None:
        adoption = asyncio.create_task(self._adopt())
        try:
            # An unexpected error ends the process; the trainer notices and starts another.
            source = self._encode() if self._settings.logs_steps else self._follow_images()
            await asyncio.gather(source, self._persist())
        finally:
            self._orders.trainer_gone.set()  # otherwise the process waits for the adopting thread
        await adoption

    async def _adopt(self) -> None:
        """Adopt the staging of dead predecessors, once this log names the residual it starts from."""
        while not self._may_adopt() and not self._orders.trainer_gone.is_set():
            await asyncio.sleep(_POLL_SECONDS)
        while self._may_adopt():
            try:
                error = await asyncio.to_thread(
                    adopt_predecessors, self._settings, self._orders.trainer_gone
                )
            except Exception as failure:  # noqa: BLE001 -- attach waits for it and must hear of it
                Code.ADOPTION_FAILED.warn(
                    "adoption failed", rank=self._settings.rank, level=logging.ERROR, exc_info=True
                )
                error = f"{type(failure).__name__}: {failure}"
            self._complaints.report("adopt", error)
            if not error:
                self._status.update(adopted=True)
                if self._uploader is not None:
                    self._uploader.adopted()
            if not error or self._orders.trainer_gone.is_set():
                return
            await asyncio.sleep(_RETRY_SECONDS)

    async def _keep_measurements(self) -> None:
        """Write measurements from time to time, so that they survive the loss of the machine."""
        while not self._is_durable.is_set():
            try:
                await asyncio.wait_for(self._is_durable.wait(), _MEASUREMENTS_SECONDS)
            except asyncio.TimeoutError:
                await self._write_measurements(ended="")

    async def _write_measurements(self, *, ended: str) -> None:
        settings = self._settings
        self._recorder.set_facts(writer_cpu_seconds=time.process_time())
        self._recorder.publish()
        try:
            require_run(settings.folder, settings.run_id)
            measured = gather_measurements(
                settings.staging, settings.run_id, settings.world_size, ended=ended
            )
            await asyncio.to_thread(write_measurements, settings.folder, measured)
        except (OSError, LowDiffError) as error:
            Code.MEASUREMENTS_INCOMPLETE.warn(
                f"measurements are not kept: {error}", rank=settings.rank
            )

    def _may_adopt(self) -> bool:
        """Return whether staging of earlier incarnations may be removed once it is durable."""
        if self._status.status.durable_snapshot >= self._settings.base_step:
            return True
        # A replica's state is durable only as this incarnation's first snapshot.
        return self._has_begun and self._settings.logs_steps

    async def _follow_images(self) -> None:
        """Persist images of trainer and replica; the replica consumes the differentials."""
        staging, rest = self._settings.staging, _backoff()
        while True:
            # Look at the ranks that live before the images: what they saved is then there.
            gone = self._orders.read() and not self._may_be_saved()
            gone = gone and all(map(is_free, staging.state_locks))
            new = newer_images(staging, self._marked)
            for snapshot in new:
                self._marked = snapshot.step
                await self._queue.put(snapshot)
            if not new:
                if gone:
                    break
                await asyncio.sleep(rest.next_seconds())
            else:
                rest.reset()
        await self._queue.put(None)

    def _may_be_saved(self) -> bool:
        """Return whether ranks that live may yet save the state of this rank, whose trainer died."""
        settings, died_at = self._settings, self._orders.died_at
        if died_at is None or not settings.staging.survivor_status.exists():
            return False
        if time.monotonic() - died_at > _SURVIVORS_SECONDS:
            return False
        others = (replace(settings, rank=rank).staging for rank in range(settings.world_size))
        return any(is_held(o.trainer_lock) for o in others if o.rank != settings.rank)

    async def _encode(self) -> None:
        """Turn records into batches: ``b`` records, or fewer after ``flush_seconds``."""
        pending: list[RecordRef] = []
        oldest, rest = 0.0, _backoff()
        while True:
            gone = self._orders.read()
            record = self._tail.next()
            # Look for images after the record, so that a record never overtakes an earlier image; then for a
            # record that was staged meanwhile, so that an image does not overtake an earlier record.
            images = newer_images(self._settings.staging, self._marked)
            if record is None and images:
                record = self._tail.next()
            self._has_begun |= record is not None
            for image in images:
                if record is None or record.header.step > image.step:
                    self._marked = image.step
                    await self._flush(pending)
                    await self._queue.put(image)
            if record is not None and record.header.step > self._status.status.durable_step:
                oldest = oldest if pending else time.monotonic()
                pending.append(record)
            full = len(pending) >= self._orders.batch_size
            late = bool(pending) and time.monotonic() - oldest > self._settings.flush_seconds
            if full or late or (record is None and (gone or self._orders.write_through)):
                await self._flush(pending)
            if record is None:
                if gone and not self._tail.is_at_damage:
                    break
                await asyncio.sleep(rest.next_seconds())
            else:
                rest.reset()
        await self._queue.put(None)

    async def _flush(self, pending: list[RecordRef]) -> None:
        if pending:
            began = time.monotonic()
            batches = await asyncio.to_thread(batches_of, list(pending), self._codec)
            self._recorder.observe("encode_seconds", (time.monotonic() - began) / len(pending))
            for batch in batches:
                await self._queue.put(batch)
            pending.clear()

    async def _persist(self) -> None:
        """Write batches in order; copy a snapshot at the same time."""
        copying: asyncio.Task[None] | None = None
        while (work := await self._next()) is not None:
            if isinstance(work, StagedImage):
                if copying is not None:
                    await copying
                await self._segments.seal()
                copying = asyncio.create_task(self._snapshot(work))
            else:
                self._batch_began = time.monotonic()
                await self._retrying(self._persist_batch, work)
        if copying is not None:
            await copying
        await self._segments.seal()

    async def _next(self) -> Batch | StagedImage | None:
        """Return the next batch or image; meanwhile, seal a segment once it is old enough."""
        while True:
            age, left = self._segments.age_seconds, None
            if self._uploader is not None and age is not None:
                limit = 0.0 if self._orders.write_through else self._settings.segment_seconds
                left = max(0.0, limit - age)
            try:
                return await asyncio.wait_for(self._queue.get(), left)
            except asyncio.TimeoutError:
                await self._segments.seal()
                if self._uploader is not None:
                    self._uploader.wake(batch=True)

    async def _retrying(self, action: Callable[[_Work], Awaitable[None]], work: _Work) -> None:
        """Report a storage error and retry; the trainer decides how long training waits."""
        while True:
            try:
                await action(work)
            except (OSError, StorageError, RunMismatch) as error:
                self._status.update(retries=self._status.status.retries + 1)
                self._complaints.report(action.__name__, f"{type(error).__name__}: {error}")
                Code.WRITE_FAILED.warn(error, rank=self._settings.rank, task=action.__name__)
                self._give_up_if_deleted(error)
                if isinstance(error, OSError) and error.errno in DISK_FULL:
                    await self._collect()  # retention may have failed when the newest snapshot came
                await asyncio.sleep(_RETRY_SECONDS)
            else:
                self._complaints.report(action.__name__, "")
                return

    def _give_up_if_deleted(self, error: Exception) -> None:
        """Exit instead of waiting for ever, without a trainer, for a run folder that was deleted.

        Exit at once if another run is in the folder's place, or if a next trainer found it
        elsewhere. Staged steps stay in staging: if the run comes back, an attach adopts them.
        """
        is_there = True
        # Read the orders here as well, because the other readers wait while nothing is written.
        if self._orders.read():
            try:
                require_run(self._settings.folder, self._settings.run_id)
            except RunMismatch as mismatch:
                raise WriterFailed(f"{mismatch}; its trainer is gone") from error
            except StorageError as failure:
                # An unresponsive file system has not deleted anything.
                is_there = isinstance(failure, DamagedFile) and failure.is_unreadable
        owner = None if is_there else Owner.read(self._settings.staging)
        if owner is not None and owner != self._owner:
            raise WriterFailed(f"{self._settings.run} was moved to {owner.run}") from error
        if is_there:
            self._deleted_since = None
        elif self._deleted_since is None:
            self._deleted_since = time.monotonic()
        elif time.monotonic() - self._deleted_since > self._settings.folder_timeout_seconds:
            raise WriterFailed(f"{self._settings.run} is gone, and so is its trainer") from error

    async def _persist_batch(self, batch: Batch) -> None:
        written = await self._segments.append(batch)
        status = self._status.status
        seconds = time.monotonic() - self._batch_began
        self._batch_seconds.observe(seconds)
        self._recorder.observe("batch_seconds", seconds)
        self._recorder.observe("batch_bytes", len(batch.data))
        self._recorder.observe("batch_steps", batch.last - batch.first + 1)
        self._recorder.publish()
        self._status.update(
            **status.lost_before(batch.first),
            durable_step=batch.last,
            segment_bytes=status.segment_bytes + written,
            batches=status.batches + 1,
            batch_seconds=self._batch_seconds.value(),
        )
        if self._uploader is not None:
            self._uploader.wake(batch=True)

    async def _snapshot(self, image: StagedImage) -> None:
        await self._retrying(self._persist_snapshot, image)
        await self._collect()

    async def _collect(self) -> None:
        """Remove files that are no longer needed; after a failure, the next snapshot tries again."""
        settings = self._settings
        if settings.retention is not None:
            try:
                await asyncio.to_thread(
                    collect, settings.folder, settings.run_id, settings.retention
                )
            except (OSError, LowDiffError) as error:
                Code.RETENTION_FAILED.warn(f"old files stay: {error}", rank=settings.rank)

    async def _persist_snapshot(self, image: StagedImage) -> None:
        settings = self._settings
        began = time.monotonic()
        doubted: DamagedImage | None = None
        while True:
            try:
                await persist_image(settings, image)
                break
            except DamagedImage as damage:
                if image.is_withdrawn(settings.staging):
                    return  # a survivor saved a later state in its place, or its training went on
                if doubted is not None and doubted.checksum == damage.checksum:
                    Code.WRITE_FAILED.warn(f"{damage}: it is given up", rank=settings.rank)
                    self._status.update(lost_image=image.step)
                    return
                doubted = damage
            await asyncio.sleep(_RETRY_SECONDS)  # a survivor may be saving it now
        self._recorder.observe("snapshot_write_seconds", time.monotonic() - began)
        self._recorder.set_facts(snapshot_bytes=image.bytes)
        self._recorder.publish()
        status = self._status.status
        self._status.update(
            durable_step=status.durable_step
            if settings.logs_steps
            else max(status.durable_step, image.step),
            durable_snapshot=image.step,
            snapshot_bytes=status.snapshot_bytes + image.bytes,
        )
        inform(
            f"the snapshot of step {image.step} is durable",
            event="snapshot_durable",
            rank=settings.rank,
            step=image.step,
            bytes=image.bytes,
        )
        if self._uploader is not None:
            self._uploader.wake(snapshot=True)


def main(arguments: Sequence[str]) -> int:
    """Run the writer process."""
    told = told_settings(arguments)
    if told is None:
        return 0
    settings = WriterSettings.from_json(told)
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.INFO)
    lock = FileLock(settings.staging.writer_lock)
    if not lock.acquire(f"writer {os.getpid()}", timeout_seconds=30.0):
        Code.WRITER_ALREADY_RUNS.warn(f"another writer holds {lock.path}", level=logging.ERROR)
        return 1
    asyncio.run(Writer(settings).run(lock))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
