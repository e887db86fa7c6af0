"""The processes behind one rank's queue of steps: what they report, and how training waits for them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Protocol

import torch

from lowdiff.commit.meter import Counters
from lowdiff.core.events import Code, inform
from lowdiff.errors import StorageError, WriterFailed
from lowdiff.persistence.files.mapped_file import ImageMark
from lowdiff.persistence.files.paths import StagingFolder
from lowdiff.persistence.format.image import ImageTensor, stage_image
from lowdiff.persistence.staging.status import (
    Backoff,
    StatusPage,
    TrainerStatus,
    WriterStatus,
    read_status,
)
from lowdiff.persistence.writer.handle import WriterProcess
from lowdiff.recovery.publish.handle import PublisherProcess
from lowdiff.recovery.replica.handle import ReplicaProcess
from lowdiff.settings import Settings

#: Between two looks, at first and at most: whoever waits long need not look often.
_WAIT_SECONDS, _LONGEST_WAIT_SECONDS = 0.001, 0.01
_NOTICE_SECONDS = 30.0
#: For what a writer still maps of a log that is gone.
_DRAIN_SECONDS = 10.0


class StorageErrors:
    """Errors of one rank's durable writing, and which of them the user has heard of.

    Args:
        folder: Its staging folder; those of other ranks lie beside it.
        rank: The rank.
        settings: Say what an error is to do.
    """

    def __init__(self, folder: StagingFolder, rank: int, settings: Settings) -> None:
        self._folder = folder
        self._rank = rank
        self._raises = settings.on_error == "raise"
        self._degrades = settings.backpressure == "degrade"
        self._of_disk = self._of_replica = ""
        self._told_of: tuple[int, ...] = ()
        self._lost_step = self._lost_image = -1
        #: Of the store, as its writer reported it last; empty if all is well.
        self.of_store = ""
        #: Why no full snapshot was taken; empty if none is owed for want of memory.
        self.of_snapshot = ""

    @property
    def any(self) -> bool:
        """Whether there is an error that other ranks should hear of."""
        return bool(self._of_disk or (self._raises and (self.of_store or self.of_snapshot)))

    def report_replica(self, error: str, *, asks: bool) -> None:
        """Say once why a replica asks for an image.

        Args:
            error: What its replica reports; empty if all is well.
            asks: Whether it asks.
        """
        if asks and error != self._of_replica:
            Code.REPLICA_ERROR.warn(
                f"the replica begins anew with a full snapshot: {error}",
                rank=self._rank,
                error=error,
            )
        if asks or not error:
            self._of_replica = error if asks else ""

    def report(self, status: WriterStatus, most_at_risk: int) -> None:
        """Say what the writer reports, where that is news.

        Args:
            status: What the writer reports.
            most_at_risk: How many steps may be at risk now.
        """
        rank, error = self._rank, status.error
        if error and error != self._of_disk:
            effect = "training goes on"
            if self._raises:
                effect = "this is an error at the next commit"
            elif not self._degrades:
                effect += f", and waits once {most_at_risk} steps are at risk"
            Code.WRITER_ERROR.warn(
                f"checkpoints are not durable now; {effect}", rank=rank, error=error
            )
        elif self._of_disk and not error:
            inform("checkpoints become durable again", event="writer_recovered", rank=rank)
        self._of_disk = error
        if status.lost_step > self._lost_step:
            self._lost_step = status.lost_step
            if not self._degrades:  # else its trainer dropped it, and has said so
                Code.STEP_LOST.warn(
                    f"step {status.lost_step} was damaged in staging memory and is not durable; a "
                    "full snapshot follows",
                    rank=rank,
                )
        if status.remote_error and status.remote_error != self.of_store:
            Code.STORE_ERROR.warn(
                "nothing reaches the store now; training goes on, and what is durable is uploaded "
                "later",
                rank=rank,
                error=status.remote_error,
            )
        self.of_store = status.remote_error

    def skip_lost(self, step: int) -> None:
        """Say nothing of lost steps up to here: the caller has named them."""
        self._lost_step = max(self._lost_step, step)

    def report_lost_image(self, step: int) -> None:
        """Say once that a snapshot of a step was lost before it was durable."""
        if step > self._lost_image:
            self._lost_image = step
            Code.STEP_LOST.warn(
                f"the full snapshot of step {step} was removed or damaged in staging memory before it was "
                "durable; another one follows",
                rank=self._rank,
            )

    def hear(self, ranks: Sequence[int]) -> None:
        """Say, or raise, that durable writing fails on some ranks; on all ranks at the same commit.

        Args:
            ranks: Those that said so with the news of this step.

        Raises:
            WriterFailed: If ``on_error="raise"`` and there are any.
        """
        if ranks and self._raises:
            failure = self.failure(ranks)
            # Said once: the snapshot is owed, and taken when it can be.
            self.of_snapshot = ""
            raise failure
        others = tuple(rank for rank in ranks if rank != self._rank)
        if others and others != self._told_of:
            Code.OTHER_WRITER_ERROR.warn(self.failure(others), rank=self._rank)
        self._told_of = others

    def failure(self, ranks: Sequence[int]) -> WriterFailed:
        """Return the reports of these ranks as an error."""
        return WriterFailed(
            "; ".join(
                f"rank {rank} reports: {self._of(rank) or 'trouble with storage, see its output'}"
                for rank in ranks
            )
            + "; nothing committed is lost: mend it, and attach goes on from there"
        )

    def _of(self, rank: int) -> str:
        """Return the error of a rank whose page can be seen from here: not that of another node."""
        if rank == self._rank:  # a writer that keeps dying says nothing on its page
            return self.of_snapshot or self._of_disk or self.of_store
        mine = self._folder
        root = mine.root.parent.parent
        page = StagingFolder.of(root, mine.run_id, mine.incarnation, rank).status
        status = read_status(page, WriterStatus)
        return status.error or status.remote_error


class Waiting(Protocol):
    """A queue that waits."""

    @property
    def is_gone(self) -> bool:
        """Whether somebody removed staging, so that nothing comes."""
        ...

    def status(self) -> WriterStatus:
        """Return what the processes behind the queue report now."""
        ...


class Storage:
    """The processes of one rank: its writer, with LowDiff+ its replica, and perhaps the run's publisher.

    Large because a queue asks here for all that lies behind it.

    Args:
        folder: The rank's staging folder.
        writer: Makes steps or images durable.
        replica: Applies steps to a copy of the state; None where steps are logged.
        settings: Say what an error of storage is to do.
        rank: This rank.
        world_size: Number of ranks.
        publisher: Publishes weights; one rank has it, if any.

    Attributes:
        publisher: See above.
        counters: What training did and waited for.
        errors: What is wrong, and what the user has heard of it.
        page: What this rank tells its processes, and who watches the run.
        batch_size: Differentials per durable write, as the writer was told last.
        last: What a queue heard last of its processes.
        committed_step: The newest step that all ranks have staged; -1 before the first.
        tells_first: Whether an error is raised only once all ranks have heard of it.
    """

    def __init__(
        self,
        folder: StagingFolder,
        writer: WriterProcess,
        replica: ReplicaProcess | None,
        settings: Settings,
        rank: int,
        world_size: int,
        publisher: PublisherProcess | None = None,
    ) -> None:
        self.publisher = publisher
        self.folder = folder
        self.writer = writer
        self.settings = settings
        self.rank = rank
        self.world_size = world_size
        self.counters = Counters()
        self.errors = StorageErrors(folder, rank, settings)
        self.page = StatusPage(folder.trainer_status, TrainerStatus(os.getpid()))
        self.batch_size = settings.batch_size
        self.tells_first = self.raises and world_size > 1
        self.last = WriterStatus()
        self.committed_step = -1
        self._replica = replica

    @property
    def degrades(self) -> bool:
        """Whether training goes on without durable steps where storage is too slow."""
        return self.settings.backpressure == "degrade"

    @property
    def raises(self) -> bool:
        """Whether errors of storage are raised, rather than warned of."""
        return self.settings.on_error == "raise"

    @property
    def _replica_starts(self) -> bool:
        """Whether there is a replica that loads torch, or takes its first image, and has applied no step yet."""
        status = None if self._replica is None else self._replica.read_status()
        return status is not None and status.generation < 0 and not status.forgot

    @property
    def has_lost_image(self) -> bool:
        """Whether a snapshot was removed or damaged in memory before it was durable."""
        return self.writer.read_status().lost_image >= 0

    def set_batch_size(self, batch_size: int) -> None:
        """Have so many differentials, a power of two, go into each durable write from now on."""
        self.batch_size = batch_size
        self.writer.set_batch_size(batch_size)

    def wait_until(
        self, queue: Waiting, condition: Callable[[WriterStatus], bool], what: str
    ) -> None:
        """Wait for a condition on what a queue's processes report.

        Raises:
            StorageError: If staging was removed meanwhile.
            WriterFailed: If ``on_error="raise"`` and the writer reports an error.
        """
        if condition(queue.status()):
            return
        started = noticed = time.perf_counter()
        rest = Backoff(_WAIT_SECONDS, _LONGEST_WAIT_SECONDS)
        while not condition(status := queue.status()):
            if queue.is_gone:
                raise StorageError(
                    f"{self.folder.root} was removed or damaged while training waited for {what}"
                )
            if status.error and self.raises:
                raise self.errors.failure([self.rank])
            time.sleep(rest.next_seconds())
            now = time.perf_counter()
            if now - noticed > _NOTICE_SECONDS:
                noticed = now
                held_up = ": its replica is still starting" if self._replica_starts else ""
                Code.WAITING.warn(
                    f"training has waited {now - started:.0f} s for {what}{held_up}",
                    rank=self.rank,
                    seconds=now - started,
                )
        self.counters.waiting_seconds += time.perf_counter() - started

    def wait_for_step(
        self, queue: Waiting, limit: int, is_reached: Callable[[WriterStatus, int], bool]
    ) -> None:
        """Wait until a step is no longer at risk.

        The last step that may be at risk is kept for telling the other ranks of an error.

        Args:
            queue: Which waits.
            limit: The step.
            is_reached: Whether a step is no longer at risk, as the processes report it.
        """
        if self.tells_first:
            self.wait_until(
                queue,
                lambda status: is_reached(status, limit + 1) or bool(status.error),
                f"step {limit + 1} to be durable",
            )
        self.wait_until(
            queue, lambda status: is_reached(status, limit), f"step {limit} to be durable"
        )

    def wait_for_image(self, queue: Waiting, step: int) -> None:
        """Wait until the snapshot of a step is durable."""
        self.wait_until(
            queue,
            lambda status: status.settled_snapshot >= step,
            f"the snapshot of step {step} to be durable",
        )
        if self.writer.read_status().durable_snapshot < step:
            raise StorageError(
                f"the snapshot of step {step} in {self.folder.root} was removed or damaged before it was durable"
            )

    def wait_for_adoption(self, queue: Waiting) -> None:
        """Wait until the steps that an earlier incarnation had only staged are durable."""
        what = "the steps of the incarnation before to be durable"
        self.wait_until(queue, lambda status: status.adopted, what)

    def wait_for_store(self, queue: Waiting, step: int, snapshot_step: int) -> None:
        """Wait until a step and a snapshot are in the store, or the store reports an error.

        Raises:
            WriterFailed: If ``on_error="raise"`` and the store reports an error.
        """
        self.wait_until(
            queue,
            lambda status: (
                bool(status.remote_error)
                or (status.remote_step >= step and status.remote_snapshot >= snapshot_step)
            ),
            f"step {max(step, snapshot_step)} to be in {self.settings.store}",
        )
        if self.errors.of_store and self.raises:
            raise self.errors.failure([self.rank])

    def show(
        self, step: int, settled_step: int, committed_step: int, *, preempted: bool = False
    ) -> None:
        """Tell the replica, and who watches the run, how far this rank is; look after the publisher.

        Args:
            step: The newest staged step.
            settled_step: See `TrainerStatus`.
            committed_step: See `Storage`.
            preempted: Whether it was told to stop soon.
        """
        self.committed_step = committed_step
        is_new = step > self.page.status.step
        at = time.time() if is_new else self.page.status.committed_at_unix_seconds
        self.page.update(
            step=step,
            settled_step=settled_step,
            committed_at_unix_seconds=at,
            preempted=preempted,
        )
        if self.publisher is not None:
            self.publisher.tend()

    def begin_anew(self, step: int) -> None:
        """Start the processes again, in a folder that was made anew, after ``step``."""
        shown = replace(self.page.status, image=None)
        self.page = StatusPage(self.folder.trainer_status, shown)
        self.writer.begin_anew()
        if self._replica is not None:
            self._replica.begin_anew()
        self.errors.skip_lost(step)
        durable_step = self.writer.read_status().durable_step
        Code.STAGING_REMOVED.warn(
            f"somebody removed or damaged {self.folder.root}, or files in it, while training uses it: "
            f"{_lost(durable_step, step)}; it is made anew, and a full snapshot follows",
            rank=self.rank,
            step=step,
            durable_step=durable_step,
        )

    def end_processes(self) -> None:
        """End what reads a log that is gone; first the writer makes durable what it still maps."""
        if self._replica is None:
            with suppress(WriterFailed):  # its steps are lost with the log, which is said
                self.writer.finish(_DRAIN_SECONDS)
        else:  # without its images a writer has nothing to make durable
            self._replica.stop()
        self.writer.stop()

    def stop(self) -> None:
        """Apply no more steps: only a last snapshot follows, which the writer makes durable."""
        if self._replica is not None:
            self._replica.stop()

    def tend(self) -> None:
        """Start again what died, as every step does; a queue's `status` does so for a writer."""
        if self._replica is not None:
            self._replica.status()
        if self.publisher is not None:
            self.publisher.tend()

    def die(self, *, kills_processes: bool) -> None:
        """Leave the staging memory as it is, and its processes without their trainer.

        Args:
            kills_processes: Whether they are killed as well.
        """
        for process in (self.writer, self._replica, self.publisher):
            if process is not None:
                (process.stop if kills_processes else process.orphan)()


class Images:
    """The full snapshots of one rank, from its own memory to staging; one at a time lies there.

    Attributes:
        step: Step of the last staged snapshot, -1 before the first.
        is_owed: Whether one could not be taken and should be.
    """

    def __init__(self, storage: Storage) -> None:
        self.step = -1
        self.is_owed = False
        self._storage = storage
        self._retry_step, self._retry_after = -1, 1

    def stage(
        self, step: int, tensors: Callable[[], Sequence[ImageTensor]], *, required: bool
    ) -> bool:
        """Copy a snapshot and tell the processes of it.

        Returns:
            False where there is no memory for it: then it is owed.

        Raises:
            StorageError: If there is no memory for a required one.
        """
        storage = self._storage
        with storage.counters.timed(storage.counters.snapshot_seconds):
            try:
                size, checksum = stage_image(
                    storage.folder.snapshot, tensors(), torch.get_num_threads()
                )
            except StorageError as error:
                # Ranks that wait for this one must hear of it first: with the next exchange.
                if required or (storage.raises and not storage.tells_first):
                    raise
                self._owe_for(error, step)
                return False
            storage.page.update(image=ImageMark(step, size, checksum))
        self.step = step
        self.is_owed = False
        self._retry_after = 1
        storage.errors.of_snapshot = ""
        storage.counters.snapshots += 1
        return True

    def stage_behind_last(
        self,
        queue: Waiting,
        step: int,
        tensors: Callable[[], Sequence[ImageTensor]],
        *,
        required: bool,
    ) -> None:
        """Stage a snapshot once the last one is durable, whose memory it takes; see `StepQueue`.

        Args:
            queue: Which waits.
            step: Step of the snapshot.
            tensors: Reads what is in it.
            required: Whether to wait also with ``backpressure="degrade"``; else it is owed.
        """
        is_busy = queue.status().durable_snapshot < self.step
        if self._storage.degrades and is_busy and not required:
            self.is_owed = True
            return
        self._storage.wait_for_image(queue, self.step)
        self.stage(step, tensors, required=required)

    def begin_anew(self) -> None:
        """Owe a snapshot, because staging was removed, and with it one that is not durable."""
        self.step = min(self.step, self._storage.writer.read_status().durable_snapshot)
        self.is_owed = True

    def is_ready(self, step: int, status: WriterStatus) -> bool:
        """Whether one after ``step`` finds its memory free, and the writer is well."""
        is_free = status.durable_snapshot >= self.step
        return self.may_retry(step) and not status.error and is_free

    def may_retry(self, step: int) -> bool:
        """Whether one that found no memory may be tried again after ``step``."""
        return step >= self._retry_step

    def _owe_for(self, error: StorageError, step: int) -> None:
        # Each try costs the ranks that have the memory a snapshot.
        self._retry_step = step + self._retry_after
        self._retry_after = min(2 * self._retry_after, self._storage.settings.snapshot_every)
        if not self.is_owed:
            Code.SNAPSHOT_PUT_OFF.warn(f"no full snapshot now: {error}", rank=self._storage.rank)
        self.is_owed = True
        self._storage.errors.of_snapshot = str(error)


def _lost(durable_step: int, step: int) -> str:
    if durable_step >= step:
        return f"every step up to {step} is durable"
    steps = f"step {step}" if durable_step + 1 == step else f"steps {durable_step + 1} to {step}"
    return f"{steps} cannot be recovered"
