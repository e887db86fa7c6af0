"""The processes of one rank: what they report, what the user hears of it, and what they are told."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from lowdiff.commit.meter import Counters, Meter
from lowdiff.core.events import Code, inform
from lowdiff.errors import WriterFailed
from lowdiff.persistence.files.paths import StagingFolder
from lowdiff.persistence.staging.status import (
    ReplicaStatus,
    StatusPage,
    TrainerStatus,
    WriterStatus,
    read_status,
)
from lowdiff.persistence.writer.handle import WriterProcess
from lowdiff.recovery.publish.handle import PublisherProcess
from lowdiff.recovery.replica.handle import ReplicaProcess
from lowdiff.settings import Settings

#: For what a writer still maps of a log that is gone.
_DRAIN_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Look:
    """What is known of one rank's storage at one moment.

    Attributes:
        writer: What its writer reports, with every error that keeps steps from becoming durable.
        replica: What its replica reports; the default where there is none.
        is_gone: Whether somebody removed or damaged files of its queue.
    """

    writer: WriterStatus
    replica: ReplicaStatus = field(default_factory=ReplicaStatus)
    is_gone: bool = False


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


class Trainer:
    """What one rank's training knows of itself, and tells its processes.

    Args:
        folder: The rank's staging folder.
        settings: Of the run.
        rank: This rank.
        world_size: Number of ranks.

    Attributes:
        counters: What it did and waited for.
        meter: Measures it for the tuner.
        errors: What is wrong with storage, and what the user has heard of it.
        page: What its processes, and who watches the run, are told.
        is_over: Whether the training has ended, so that nobody is to wait for storage any more.
        deadline: Of the monotonic clock: nobody waits longer for storage, as once training ends.
        turn: Held by the thread that fills staging or tells of it, and notified when something is staged. Who waits
            meanwhile lets go of it.
    """

    def __init__(
        self, folder: StagingFolder, settings: Settings, rank: int, world_size: int
    ) -> None:
        self.folder = folder
        self.settings = settings
        self.rank = rank
        self.world_size = world_size
        self.counters = Counters()
        self.meter = Meter(folder, self.counters)
        self.errors = StorageErrors(folder, rank, settings)
        self.page = StatusPage(folder.trainer_status, TrainerStatus(os.getpid()))
        self.turn = threading.Condition()
        self.is_over = False
        self.deadline = math.inf

    @property
    def degrades(self) -> bool:
        """Whether training goes on without durable steps where storage is too slow."""
        return self.settings.backpressure == "degrade"

    @property
    def raises(self) -> bool:
        """Whether errors of storage are raised, rather than warned of."""
        return self.settings.on_error == "raise"

    @property
    def tells_first(self) -> bool:
        """Whether an error is raised only once all ranks have heard of it."""
        return self.raises and self.world_size > 1

    def show(self, step: int, settled_step: int, *, preempted: bool) -> None:
        """Tell the replica, and who watches the run, how far this rank is.

        Args:
            step: The newest staged step.
            settled_step: See `TrainerStatus`.
            preempted: Whether it was told to stop soon.
        """
        is_new = step > self.page.status.step
        at = time.time() if is_new else self.page.status.committed_at_unix_seconds
        self.page.update(
            step=step,
            settled_step=settled_step,
            committed_at_unix_seconds=at,
            preempted=preempted,
        )

    def begin_anew(self) -> None:
        """Make the page again, in a folder that was made anew."""
        shown = replace(self.page.status, image=None)
        self.page = StatusPage(self.folder.trainer_status, shown)


class Storage:
    """The processes of one rank.

    Attributes:
        writer: Makes steps or images durable.
        replica: Applies steps to a copy of the state; None where steps are logged.
        publisher: Publishes weights; one rank has it, if any.
    """

    def __init__(
        self,
        writer: WriterProcess,
        replica: ReplicaProcess | None = None,
        publisher: PublisherProcess | None = None,
    ) -> None:
        self.writer = writer
        self.replica = replica
        self.publisher = publisher

    def tend(self) -> None:
        """Start processes that are needed and not there, or no longer. For one thread."""
        self.writer.tend()
        if self.replica is not None:
            self.replica.tend()
        if self.publisher is not None:
            self.publisher.tend()

    def begin_anew(self) -> None:
        """Start them again, in a folder that was made anew."""
        self.writer.begin_anew()
        if self.replica is not None:
            self.replica.begin_anew()

    def end_processes(self) -> None:
        """Stop the processes that read a removed log. The writer first writes out what it still has mapped."""
        if self.replica is None:
            with suppress(WriterFailed):  # its steps are lost with the log, which is said
                self.writer.finish(_DRAIN_SECONDS)
        else:  # without its images a writer has nothing to make durable
            self.replica.stop()
        self.writer.stop()

    def stop(self) -> None:
        """Apply no more steps: only a last snapshot follows, which the writer makes durable."""
        if self.replica is not None:
            self.replica.stop()

    def die(self, *, kills_processes: bool) -> None:
        """Leave the staging memory as it is, and its processes without their trainer.

        Args:
            kills_processes: Whether they are killed as well.
        """
        for process in (self.writer, self.replica, self.publisher):
            if process is not None:
                (process.stop if kills_processes else process.orphan)()
