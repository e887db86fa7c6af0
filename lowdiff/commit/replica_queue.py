"""The queue of a replica (LowDiff+): gradients that are applied at once instead of being written."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from lowdiff.commit.storage import Images, Storage
from lowdiff.core.events import Code
from lowdiff.persistence.format.differentials import encode_scalars, sections_of
from lowdiff.persistence.format.framing import RecordKind
from lowdiff.persistence.format.image import ImageTensor
from lowdiff.persistence.staging.log import StagingLog
from lowdiff.persistence.staging.settings import ReplicaSettings
from lowdiff.persistence.staging.status import WriterStatus
from lowdiff.recovery.replay.optimizers import registrations
from lowdiff.recovery.replica.handle import ReplicaProcess
from lowdiff.recovery.state import SCALAR_STATE
from lowdiff.settings import Settings
from lowdiff.types import Differential, OptimizerSpec, Section


class ReplicaImages(Images):
    """Snapshots of the trainer's, from which the replica begins anew, and the writer persists.

    Attributes:
        is_needed: Whether the replica has no use for steps before it has a fresh one.
    """

    def __init__(self, storage: Storage, replica: ReplicaProcess) -> None:
        super().__init__(storage)
        self.is_needed = False
        self._replica = replica
        self._holds_memory = False

    def notice(self) -> bool:
        """Hear whether the replica asks for an image; returns whether it needs one."""
        status = self._replica.status()
        asks = status.asks_for_image(self.step)
        # Where somebody removed staging, the next commit names the cause and cures it.
        if not status.error or self._storage.folder.replica_status.exists():
            self._storage.errors.report_replica(status.error, asks=asks)
        self.is_needed |= asks
        return self.is_needed

    def is_in_use(self, settled_snapshot: int) -> bool:
        """Whether the newest image is still to be read, by the writer or by the replica."""
        if self.step < 0:
            return False  # there is none, and a replica that nobody needs yet is not started
        is_taken = self._replica.status().image_step >= self.step or self._replica.is_stopped
        return not is_taken or settled_snapshot < self.step

    def stage(
        self, step: int, tensors: Callable[[], Sequence[ImageTensor]], *, required: bool
    ) -> bool:
        """See `Images`."""
        self._holds_memory = False  # the new one takes its place
        is_staged = super().stage(step, tensors, required=required)
        if is_staged:
            self._holds_memory = True
            self.is_needed = False
        return is_staged

    def free(self, settled_snapshot: int) -> None:
        """Give an image's memory back once the replica has its own copy and the disk has it."""
        if self._holds_memory and not self.is_in_use(settled_snapshot):
            self._storage.folder.snapshot.unlink(missing_ok=True)
            self._holds_memory = False

    def begin_anew(self) -> None:
        """Forget every image: staging was removed."""
        self.step = -1
        self._holds_memory = False
        self.is_needed = self.is_owed = True


class ReplicaQueue:
    """Gradients that a replica applies, and the images that the writer makes durable.

    See `StepQueue`. With ``backpressure="block"`` training waits for room, and where the newest durable
    image is two snapshot intervals old. With ``"degrade"`` a step that finds no room is given up, with
    all that follow, until a fresh snapshot of the trainer's takes their place. So are steps after one
    that the replica cannot apply. Large because it is all of `StepQueue`, and the replica's pace.

    Args:
        log: What the replica reads.
        storage: Its process, and the writer.
        replica: The same process.
        makes_images: Whether the replica takes the regular snapshots. On an accelerator the trainer
            does: the replica's arithmetic may differ there in the last place.

    Attributes:
        staged_checksum: See `StepQueue`.
    """

    logs_steps: ClassVar[bool] = False

    def __init__(
        self, log: StagingLog, storage: Storage, replica: ReplicaProcess, *, makes_images: bool
    ) -> None:
        self.storage = storage
        self.images = ReplicaImages(storage, replica)
        self.makes_images = makes_images
        self._log = log
        self._replica = replica
        #: Newest step that was staged, and the one that found no room.
        self._step = self._given_up = -1
        self._is_dropping = False
        self.staged_checksum = 0
        #: Gradients of the step under way that found no room yet.
        self._pending: Sequence[Section] = ()

    @property
    def is_gone(self) -> bool:
        """See `StepQueue`: also where the replica's page went, or the file that holds its state."""
        if self._log.is_gone:
            return True
        if not self._log.folder.replica_status.exists():
            return True
        generation = self._replica.read_status().generation
        if generation < 0 or self._log.folder.replica_state(generation).exists():
            return False
        # The replica removes a file once another one has taken its place.
        return self._replica.read_status().generation == generation

    @property
    def durable_step(self) -> int:
        """See `StepQueue`."""
        return self.storage.writer.read_status().unbroken_step

    @property
    def owes_snapshot(self) -> bool:
        """See `StepQueue`: also where the replica asks for an image, or one was lost before it was durable."""
        images, writer = self.images, self.storage.writer.read_status()
        asks = self._replica.read_status().asks_for_image(images.step)
        is_lost = writer.lost_image > writer.durable_snapshot and writer.lost_image >= images.step
        return images.is_owed or images.is_needed or asks or is_lost

    def status(self) -> WriterStatus:
        """See `StepQueue`: without the replica's images nothing becomes durable, either."""
        storage, replica = self.storage, self._replica.read_status()
        # Not what ends with the trainer's next snapshot.
        is_asking = replica.forgot or replica.asks_for_image(self.images.step)
        trouble = "" if is_asking else replica.error
        status = storage.writer.status().with_errors(trouble, self._replica.error)
        storage.errors.report_lost_image(status.lost_image)
        if not (status.error and self.is_gone):  # the next commit names the cause and cures it
            storage.errors.report(status, 2 * storage.settings.snapshot_every)
        return status

    def stage_ahead(self, step: int, sections: Sequence[Section]) -> None:
        """See `StepQueue`: straight from where the optimizer has them."""
        self._pending = [*self._pending, *sections]
        if self.images.notice() or self._given_up == step:
            self._pending = ()
        elif self.storage.degrades:
            if not self._has_put():
                self._given_up = step
            self._pending = ()
        else:
            try:
                # What is wrong is raised by the commit, not in the middle of the step.
                raises = self.storage.raises
                self._wait_for_room(
                    lambda status: self._has_put() or (raises and status.error != "")
                )
            finally:
                self._pending = [replace(s, data=s.data.copy()) for s in self._pending]

    def stage(
        self,
        kind: RecordKind,
        record: Differential,
        *,
        rebases: bool,
    ) -> None:
        """See `StepQueue`."""
        self.staged_checksum = 0
        step, scalars, sections = record.step, encode_scalars(record), sections_of(record)
        is_step = kind is RecordKind.DIFFERENTIAL
        if is_step:
            self.images.free(self.status().settled_snapshot)
            self._bound_risk(step - 2 * self.storage.settings.snapshot_every)
            if (self.images.notice() or self._given_up == step) and not rebases:
                self._drop(step)
                return
            # Behind what was staged ahead of the record.
            self._pending, sections = [*self._pending, *sections], ()
        size: list[int] = []

        def fits(_: WriterStatus | None = None) -> bool:
            if is_step and not self._has_put():
                return False
            # The record of the base, with which attach ends, starts no replica yet.
            replica = self._replica
            consumed = (replica.status() if is_step else replica.read_status()).consumed_step
            written = self._log.append(
                kind, step, scalars, sections, durable_step=consumed, rebases=rebases
            )
            if written is None:
                self._let_replica_on()
                return False
            size.append(written)
            return True

        if self.storage.degrades and is_step:
            fits()
        elif is_step and not rebases:
            self._wait_for_room(fits)
        else:
            self.storage.wait_until(self, fits, "the replica to make room")
        if not size:
            self._drop(step)
            return
        self._step, self.staged_checksum = step, self._log.checksum
        self.images.is_needed |= rebases
        self.storage.counters.staged_bytes += size[0]
        if is_step and self.storage.tells_first and not self.storage.degrades:
            self._keep_room()

    def stage_snapshot(
        self, step: int, tensors: Callable[[], Sequence[ImageTensor]], *, required: bool
    ) -> None:
        """See `StepQueue`: the replica begins anew with it, the writer persists it."""
        storage, images = self.storage, self.images
        # The replica takes what is committed, and only this thread can tell it what is.
        is_untold = self.storage.world_size > 1 and images.step > self._told_step
        if required or not (storage.degrades or is_untold):
            storage.wait_until(
                self,
                lambda status: (
                    not images.is_in_use(status.settled_snapshot)
                    or (storage.tells_first and not required and bool(status.error))
                ),
                "the last full snapshot",
            )
        if images.is_in_use(self.status().settled_snapshot):
            images.is_owed = True
        elif images.stage(step, tensors, required=required):
            self._is_dropping = False

    def is_ready_for_snapshot(self, step: int) -> bool:
        """See `StepQueue`: whether the replica keeps up with training, and can take an image."""
        # A whole step's time for a step: the newest has only just been staged, and with several
        # ranks it is committed, and may be applied, only with the next one. What a replica that
        # keeps up is behind would otherwise keep the ranks from ever being ready together.
        in_time = self._step - 1 - (self.storage.world_size > 1)
        status = self.status()
        if not self.images.may_retry(step):
            return False
        # Where training waits for storage, it waits here as well.
        return not self.storage.degrades or (
            not self.images.is_in_use(status.settled_snapshot)
            and self._replica.status().consumed_step >= in_time
        )

    def secure(self, step: int) -> int:
        """See `StepQueue`: the replica makes an image, of no step that a copy on another node lacks."""
        if self.storage.world_size > 1:
            step = min(step, self._told_step)
        if self.makes_images:
            self.storage.page.update(end_step=step)
        return step

    def wait_for_snapshot(self) -> None:
        """See `StepQueue`."""
        self.storage.wait_for_image(self, self.images.step)

    def begin_anew(self, step: int) -> None:
        """See `StepQueue`: the replica waits for the snapshot that is owed."""
        self._log = self._log.anew()
        self.images.begin_anew()
        self._step = self._given_up = -1
        self._is_dropping = True
        self._pending = ()
        self.storage.begin_anew(step)

    def figures(self) -> dict[str, Any]:
        """See `StepQueue`."""
        status = self._replica.read_status()
        applied = max(1, status.applied_steps)
        return {
            "replica_pid": self._replica.pid if self._replica.has_begun else None,
            "replica_step": status.step,
            "replica_lag_steps": max(0, self._step - status.consumed_step),
            "replica_seconds_per_step": status.apply_seconds / applied,
            "replica_restarts": self._replica.restarts,
            "replica_error": status.error or self._replica.error,
            "replica_drift": status.drift,
            "queue_bytes": self._log.bytes_held,
        }

    @property
    def _told_step(self) -> int:
        """The newest step that the replica was told to be settled."""
        return self.storage.page.status.settled_step

    def _wait_for_room(self, fits: Callable[[WriterStatus], bool]) -> None:
        """Wait until something fits, or the replica needs an image and has no use for it."""
        self.storage.wait_until(
            self,
            lambda status: fits(status) or self.images.notice(),
            "the replica to make room",
        )

    def _bound_risk(self, limit: int) -> None:
        """Wait until ``limit`` is durable, or count a step that goes on without.

        An image that comes only once training goes on is not waited for.
        """
        storage = self.storage
        if storage.degrades:
            storage.counters.unprotected_steps += self.status().durable_step < limit
            return

        def is_reached(status: WriterStatus, step: int) -> bool:
            return (
                status.durable_step >= step or self.images.notice() or self._newest_image() < step
            )

        storage.wait_for_step(self, limit, is_reached)

    def _newest_image(self) -> int:
        """Step of the newest image that there is, or will be before training goes on."""
        if not self.makes_images:
            return self.images.step
        known = self._told_step if self.storage.world_size > 1 else self._step
        newest = known - known % self.storage.settings.snapshot_every
        status = self._replica.status()
        if status.consumed_step > newest:  # made by now, or left out for want of memory
            newest = -1 if status.image is None else status.image.step
        return max(self.images.step, newest)

    def _has_put(self) -> bool:
        """Put what is pending into the queue, if there is room."""
        if self._pending:
            consumed = self._replica.status().consumed_step
            if not self._log.append_ahead(self._pending, durable_step=consumed):
                self._let_replica_on()
                return False
            self._pending = ()
        return True

    def _let_replica_on(self) -> None:
        """Let a replica that has taken all that it may go on, where the queue has no room.

        It is held back for copies that are late (`Copies.show`), and how far they are is heard only once training
        goes on: with large steps, of which the queue holds few, neither would.
        """
        committed, told = self.storage.committed_step, self._told_step
        if told < committed and self._replica.read_status().consumed_step >= told:
            self.storage.page.update(settled_step=committed)

    def _keep_room(self) -> None:
        """Wait for room for the next step while there is another in which to tell of trouble.

        Not for what the replica takes only once the next step has told it what is committed.
        """

        def has_room(status: WriterStatus) -> bool:
            """Whether a step as large as the last one would fit."""
            consumed = self._replica.status().consumed_step
            if status.error or self.images.notice() or consumed >= self._told_step:
                return True
            fits = self._log.append_ahead((), durable_step=consumed)
            self._log.drop_ahead()
            return fits

        self.storage.wait_until(self, has_room, "the replica to make room")

    def _drop(self, step: int) -> None:
        self._log.drop_ahead()
        self._pending = ()
        if not self._is_dropping:
            Code.STEPS_DROPPED.warn(
                f"the replica does not keep up, so steps from {step} on are given up; a full "
                "snapshot follows when it has caught up",
                rank=self.storage.rank,
                step=step,
            )
        self._is_dropping = self.images.is_owed = self.images.is_needed = True
        self.storage.counters.dropped_steps += 1


def replica_settings(
    settings: Settings,
    log: StagingLog,
    world_size: int,
    *,
    makes_images: bool,
    specs: Sequence[OptimizerSpec],
) -> ReplicaSettings:
    """Settings of a rank's replica, which reads ``log``."""
    kept = (settings.retention and settings.retention.every_steps) or 0
    return ReplicaSettings(
        run=str(settings.run),
        staging_root=str(log.folder.root.parents[1]),
        run_id=log.folder.run_id,
        incarnation=log.folder.incarnation,
        rank=log.folder.rank,
        keeper=log.folder.keeper,
        world_size=world_size,
        trainer_pid=os.getpid(),
        image_every=settings.snapshot_every if makes_images else 0,
        keep_every=kept if makes_images else 0,
        waits=settings.backpressure == "block",
        imports=settings.imports,
        optimizers=tuple(registrations(specs)),
        scalar_state=tuple(sorted(SCALAR_STATE)),
        import_path=tuple(map(os.path.abspath, sys.path)) if settings.imports else (),
    )
