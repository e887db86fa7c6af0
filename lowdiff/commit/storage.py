"""The processes behind one rank's queue of steps: what they report, and how training waits for them."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Protocol

import torch

from lowdiff.commit.health import StorageErrors, say
from lowdiff.commit.meter import Counters
from lowdiff.core.events import Code, warn
from lowdiff.errors import StorageError, WriterFailed
from lowdiff.persistence.files.paths import StagingFolder
from lowdiff.persistence.files.shared_page import ImageMark
from lowdiff.persistence.format.image import ImageTensor, stage_image
from lowdiff.persistence.staging.status import StatusPage, TrainerStatus, WriterStatus
from lowdiff.persistence.writer.handle import WriterProcess
from lowdiff.recovery.replica.handle import ReplicaProcess
from lowdiff.settings import Settings

_logger = logging.getLogger(__name__)

#: Between two looks, at first and at most: whoever waits long need not look often.
_WAIT_SECONDS, _LONGEST_WAIT_SECONDS = 0.001, 0.01
_NOTICE_SECONDS = 30.0
#: For what a writer still maps of a log that is gone.
_DRAIN_SECONDS = 10.0


class Waiting(Protocol):
    """Who waits: a queue."""

    @property
    def is_gone(self) -> bool:
        """Whether somebody removed staging, so that nothing comes."""
        ...

    def status(self) -> WriterStatus:
        """What the processes behind the queue report now."""
        ...


class Storage:
    """The writer of one rank and, with LowDiff+, its replica.

    Args:
        folder: The rank's staging folder.
        writer: Makes steps or images durable.
        replica: Applies steps to a copy of the state; None where steps are logged.
        settings: Say what an error of storage is to do.
        rank: This rank.
        world_size: Number of ranks.

    Attributes:
        counters: What training did and waited for.
        errors: What is wrong, and what the user has heard of it.
        page: What this rank tells its processes, and who watches the run.
        batch_size: Differentials per durable write, as the writer was told last.
        last: What a queue heard last of its processes.
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
    ) -> None:
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
        self._replica = replica

    @property
    def degrades(self) -> bool:
        """Whether training goes on without durable steps where storage is too slow."""
        return self.settings.backpressure == "degrade"

    @property
    def raises(self) -> bool:
        """Whether errors of storage are raised, rather than warned of."""
        return self.settings.on_error == "raise"

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
            WriterFailed: If ``on_error="raise"`` and the writer reports errors.
        """
        if condition(queue.status()):
            return
        started = noticed = time.perf_counter()
        pause = _WAIT_SECONDS
        while not condition(status := queue.status()):
            if queue.is_gone:
                raise StorageError(
                    f"{self.folder.root} was removed while training waited for {what}"
                )
            if status.error and self.raises:
                raise self.errors.failure([self.rank])
            time.sleep(pause)
            pause = min(1.5 * pause, _LONGEST_WAIT_SECONDS)
            now = time.perf_counter()
            if now - noticed > _NOTICE_SECONDS:
                noticed = now
                text = f"training has waited {now - started:.0f} s for {what}"
                say(self.rank, Code.WAITING, text, seconds=now - started)
        self.counters.waiting_seconds += time.perf_counter() - started

    def wait_for_adoption(self, queue: Waiting) -> None:
        """Wait until the steps that an earlier incarnation had only staged are durable."""
        what = "the steps of the incarnation before to be durable"
        self.wait_until(queue, lambda status: status.adopted, what)

    def wait_for_store(self, queue: Waiting, step: int, snapshot_step: int) -> None:
        """Wait until a step and a snapshot are in the store, or the store is in errors.

        Raises:
            WriterFailed: If ``on_error="raise"`` and the store is in errors.
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

    def show(self, step: int, committed_step: int, *, preempted: bool = False) -> None:
        """Tell the replica, and who watches the run, how far this rank is."""
        is_new = step > self.page.status.step
        at = time.time() if is_new else self.page.status.committed_at_unix_seconds
        self.page.update(
            step=step,
            committed_step=committed_step,
            committed_at_unix_seconds=at,
            preempted=preempted,
        )

    def begin_anew(self, step: int) -> None:
        """Start the processes again, in a folder that was made anew, after ``step``."""
        shown = replace(self.page.status, image=None)
        self.page = StatusPage(self.folder.trainer_status, shown)
        self.writer.begin_anew()
        if self._replica is not None:
            self._replica.begin_anew()
        self.errors.skip_lost(step)
        durable_step = self.writer.read_status().durable_step
        text = (
            f"somebody removed {self.folder.root}, or files in it, while training uses it: "
            f"{_lost(durable_step, step)}; it is made anew, and a full snapshot follows"
        )
        say(self.rank, Code.STAGING_REMOVED, text, step=step, durable_step=durable_step)

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
        """Start the processes again if they died, as every step does."""
        self.writer.status()
        if self._replica is not None:
            self._replica.status()

    def die(self, *, kills_processes: bool) -> None:
        """Leave the staging memory as it is, and its processes without their trainer.

        Args:
            kills_processes: Whether they are killed as well.
        """
        for process in (self.writer, self._replica):
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
        with storage.counters.timed("snapshot_seconds"):
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

    def may_retry(self, step: int) -> bool:
        """Whether one that found no memory may be tried again after ``step``."""
        return step >= self._retry_step

    def _owe_for(self, error: StorageError, step: int) -> None:
        # Each try costs the ranks that have the memory a snapshot.
        self._retry_step = step + self._retry_after
        self._retry_after = min(2 * self._retry_after, self._storage.settings.snapshot_every)
        if not self.is_owed:
            warn(
                _logger,
                Code.SNAPSHOT_PUT_OFF,
                "rank %d: no full snapshot now: %s",
                self._storage.rank,
                error,
            )
        self.is_owed = True
        self._storage.errors.of_snapshot = str(error)


def _lost(durable_step: int, step: int) -> str:
    if durable_step >= step:
        return f"every step up to {step} is durable"
    steps = f"step {step}" if durable_step + 1 == step else f"steps {durable_step + 1} to {step}"
    return f"{steps} cannot be recovered"
