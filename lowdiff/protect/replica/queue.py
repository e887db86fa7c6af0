"""The queue of a replica (LowDiff+): gradients that are applied at once instead of being written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from lowdiff.commit.images import Images
from lowdiff.commit.queue import Queue, base_record
from lowdiff.commit.sinks import Ahead, Handed, Snapshot
from lowdiff.commit.storage import Look, Storage, Trainer
from lowdiff.core.events import Code
from lowdiff.persistence.files.mapped_file import ImageMark
from lowdiff.persistence.format.differentials import encode_scalars, sections_of
from lowdiff.persistence.format.framing import RecordKind
from lowdiff.persistence.staging.log import StagingLog
from lowdiff.recovery.replica.handle import ReplicaProcess
from lowdiff.types import Differential, Section

_ROOM = "the replica to make room"


class ReplicaImages(Images):
    """Snapshots of the trainer's, from which the replica begins anew, and the writer persists.

    Attributes:
        is_needed: Whether the replica has no use for steps before it has a fresh one.
    """

    def __init__(self, trainer: Trainer, replica: ReplicaProcess) -> None:
        super().__init__(trainer)
        self.is_needed = False
        self._replica = replica
        self._holds_memory = False

    def is_in_use(self, look: Look) -> bool:
        """Whether the newest image is still to be read, by the writer or by the replica."""
        if self.step < 0:
            return False
        is_taken = look.replica.image_step >= self.step or self._replica.is_stopped
        return not is_taken or look.writer.settled_snapshot < self.step

    def begin(self, step: int, *, is_due: bool) -> None:
        """See `Images`."""
        self._holds_memory = False  # the new one takes its place
        super().begin(step, is_due=is_due)

    def show(self, size: int, checksum: int) -> ImageMark:
        """See `Images`."""
        self._holds_memory = True
        self.is_needed = False
        return super().show(size, checksum)

    def free(self, look: Look) -> None:
        """Give an image's memory back once the replica has its own copy and the disk has it."""
        if self._holds_memory and not self.is_in_use(look):
            self.release()
            self._trainer.folder.snapshot.unlink(missing_ok=True)
            self._holds_memory = False

    def begin_anew(self, durable_snapshot: int) -> None:
        """Forget every image: staging was removed."""
        self.step = self.staged_step = -1
        self._holds_memory = False
        self.is_needed = self.is_owed = True


class ReplicaQueue(Queue):
    """Gradients that a replica applies, and the images that the writer makes durable.

    With ``backpressure="block"`` training waits for room, and where the newest durable image is two
    snapshot intervals old. With ``"degrade"`` a step that finds no room is given up, with all that
    follow, until a fresh snapshot of the trainer's takes their place. So are steps after one that the
    replica cannot apply. Large because it is all of `Queue`, and the replica's pace.

    Args:
        log: What the replica reads.
        trainer: See `Queue`.
        storage: Has the replica, and the writer.
        replica: The same process.
        makes_images: Whether the replica takes the regular snapshots. On an accelerator the trainer
            does: the replica's arithmetic may differ there in the last place.
    """

    images: ReplicaImages
    takes_images_at_once = True

    def __init__(
        self,
        log: StagingLog,
        trainer: Trainer,
        storage: Storage,
        replica: ReplicaProcess,
        *,
        makes_images: bool,
    ) -> None:
        super().__init__(trainer, storage)
        self.images = ReplicaImages(trainer, replica)
        self.makes_images = makes_images
        self._log = log
        self._replica = replica
        #: Newest step that was staged, and the one that found no room.
        self._step = self._given_up = -1
        #: The newest step that all ranks have staged.
        self._committed_step = -1
        self._is_dropping = False
        #: The step of which the record's own sections are pending, or were put.
        self._joined_step = -1
        #: Gradients of the step under way that found no room yet.
        self._pending: Sequence[Section] = ()

    def look(self) -> Look:
        """See `Queue`: without the replica's images nothing becomes durable, either."""
        replica = self._replica.read_status()
        # Not what ends with the trainer's next snapshot.
        is_asking = replica.forgot or replica.asks_for_image(self.images.step)
        trouble = "" if is_asking else replica.error
        writer = self._storage.writer.read_status().with_errors(trouble, self._replica.error)
        return Look(writer, replica, is_gone=self._lacks_files())

    def owes_snapshot(self, look: Look) -> bool:
        """See `Queue`: also where the replica asks for an image, or one was lost before it was durable."""
        images, writer = self.images, look.writer
        asks = look.replica.asks_for_image(images.step)
        is_lost = writer.lost_image > writer.durable_snapshot and writer.lost_image >= images.step
        return images.is_owed or images.is_needed or asks or is_lost

    def stage_base(self, base: Handed) -> Handed:
        """See `Sink`; no replica is started for it yet."""
        record = base_record(base)
        self._step = record.step
        return self._append(RecordKind.BASE, record, base)

    def stage_ahead(self, ahead: Ahead) -> None:
        """See `Sink`: straight from where the optimizer has them."""
        self._replica.begin()
        self._pending = [*self._pending, *ahead.sections]
        look = self.attend()
        if self.images.is_needed or self._given_up == ahead.step:
            self._pending = ()
        elif self._trainer.degrades:
            if not self._has_put(look):
                self._given_up = ahead.step
            self._pending = ()
        else:
            try:
                # What is wrong is raised by the commit, not in the middle of the step.
                raises = self._trainer.raises
                self._wait_for_room(
                    lambda look: self._has_put(look) or (raises and look.writer.error != ""), look
                )
            finally:
                self._pending = [replace(s, data=s.data.copy()) for s in self._pending]

    def stage(self, handed: Handed) -> Handed:
        """See `Sink`."""
        self._replica.begin()
        sealed, images = handed.sealed, self.images
        record, rebases = sealed.differential, sealed.rebases
        images.free(handed.look)
        look = self._bound_risk(record.step - self._most_at_risk, handed.look)
        handed = replace(handed, look=look)
        if (images.is_needed or self._given_up == record.step) and not rebases:
            self._drop(record.step)
            return handed
        if self._joined_step != record.step:  # else a commit that was refused is repeated
            # Behind what was staged ahead of the record.
            self._pending = [*self._pending, *sections_of(record)]
            self._joined_step = record.step
        staged = self._append(RecordKind.DIFFERENTIAL, record, handed)
        if staged.checksum is None:
            self._drop(record.step)
            return staged
        self._step = record.step
        images.is_needed |= rebases
        if self._trainer.tells_first and not self._trainer.degrades:
            return replace(staged, look=self._keep_room(staged.look))
        return staged

    def _append(self, kind: RecordKind, record: Differential, handed: Handed) -> Handed:
        """Stage a record behind what is staged ahead of it; without a checksum if there is no room."""
        log, is_step = self._log, kind is RecordKind.DIFFERENTIAL
        rebases = is_step and handed.sealed.rebases
        scalars, sections = encode_scalars(record), () if is_step else sections_of(record)
        sizes: list[int] = []

        def fits(look: Look) -> bool:
            if not self._has_put(look):
                return False
            consumed = look.replica.consumed_step
            size = log.append(
                kind, record.step, scalars, sections, durable_step=consumed, rebases=rebases
            )
            if size is None:
                self._let_replica_on(look)
                return False
            sizes.append(size)
            return True

        look = handed.look
        if self._trainer.degrades and is_step:
            if not fits(look):
                fits(look := self.attend())
        elif is_step and not rebases:
            look = self._wait_for_room(fits, look)
        else:
            look = self.wait_until(fits, _ROOM, look)
        return replace(
            handed,
            look=look,
            checksum=log.checksum if sizes else None,
            staged_bytes=handed.staged_bytes + sum(sizes),
        )

    def clear_for_snapshot(self, look: Look, *, required: bool, is_due: bool) -> Look | None:
        """See `Queue`: the replica begins anew with it, the writer persists it."""
        trainer, images = self._trainer, self.images
        if images.step >= 0:
            self._replica.begin()  # it has to take the one before
        # The replica takes what is committed, and only this thread can tell it what is.
        is_untold = trainer.world_size > 1 and images.step > self._told_step
        if required or not (trainer.degrades or is_untold):
            look = self.wait_until(
                lambda look: (
                    not images.is_in_use(look)
                    or (trainer.tells_first and not required and bool(look.writer.error))
                ),
                "the last full snapshot",
                look,
            )
        if images.is_in_use(look) and images.is_in_use(look := self.attend()):
            images.is_owed = True
            return None
        return look

    def snapshot(self, snapshot: Snapshot) -> None:
        """See `Sink`: from here on the replica can go on again."""
        self._is_dropping = False

    def is_ready_for_snapshot(self, step: int, look: Look) -> bool:
        """See `Queue`: whether the replica keeps up with training, and can take an image."""
        # A step's time for a step: the newest has only just been staged, and with several ranks it is
        # committed, and may be applied, only with the next one. What a replica that keeps up is behind
        # would otherwise keep the ranks from ever being ready together.
        in_time = self._step - 1 - (self._trainer.world_size > 1)
        if not self.images.may_retry(step):
            return False
        # Where training waits for storage, it waits here as well.
        return not self._trainer.degrades or (
            not self.images.is_in_use(look) and look.replica.consumed_step >= in_time
        )

    def show(self, step: int, committed_step: int, told_step: int) -> int:
        """See `Sink`."""
        self._committed_step = committed_step
        return committed_step

    def secure(self, step: int) -> int:
        """See `Queue`: the replica makes an image, of no step that a copy on another node lacks."""
        if self._trainer.world_size > 1:
            step = min(step, self._told_step)
        if self.makes_images:
            self._trainer.page.update(end_step=step)
        return step

    def begin_anew(self, step: int) -> None:
        """See `Queue`: the replica waits for the snapshot that is owed."""
        self._log = self._log.anew()
        self._step = self._given_up = self._joined_step = -1
        self._is_dropping = True
        self._pending = ()
        super().begin_anew(step)

    def figures(self) -> dict[str, Any]:
        """See `Sink`."""
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
        return self._trainer.page.status.settled_step

    def _lacks_files(self) -> bool:
        """Whether files of the queue went, the replica's page, or the file that holds its state."""
        folder, replica = self._trainer.folder, self._replica
        if self._log.is_gone or not folder.replica_status.exists():
            return True
        generation = replica.read_status().generation
        if generation < 0 or folder.replica_state(generation).exists():
            return False
        # The replica removes a file once another one has taken its place.
        return replica.read_status().generation == generation

    def _say(self, look: Look) -> None:
        """See `Queue`; note whether the replica asks for an image."""
        errors, asks = self._trainer.errors, look.replica.asks_for_image(self.images.step)
        errors.report_lost_image(look.writer.lost_image)
        # Where somebody removed staging, the next commit names the cause and cures it.
        if not look.replica.error or self._trainer.folder.replica_status.exists():
            errors.report_replica(look.replica.error, asks=asks)
        self.images.is_needed |= asks
        super()._say(look)

    def _held_up_by(self, look: Look) -> str:
        """See `Queue`: a replica loads torch, or takes its first image, and has applied no step yet."""
        is_starting = look.replica.generation < 0 and not look.replica.forgot
        return ": its replica is still starting" if is_starting else ""

    def _wait_for_room(self, fits: Callable[[Look], bool], look: Look) -> Look:
        """Wait until something fits, or the replica needs an image and has no use for it."""
        return self.wait_until(lambda look: fits(look) or self.images.is_needed, _ROOM, look)

    def _bound_risk(self, limit: int, look: Look) -> Look:
        """Wait until ``limit`` is durable, or count a step that goes on without.

        An image that comes only once training goes on is not waited for.
        """
        if self._trainer.degrades:
            return self._count_unprotected(limit, look)

        def is_reached(look: Look, step: int) -> bool:
            is_durable = look.writer.durable_step >= step
            return is_durable or self.images.is_needed or self._newest_image(look) < step

        return self._wait_for_step(limit, is_reached, look)

    def _newest_image(self, look: Look) -> int:
        """Step of the newest image that there is, or will be before training goes on."""
        if not self.makes_images:
            return self.images.step
        known = self._told_step if self._trainer.world_size > 1 else self._step
        newest = known - known % self._trainer.settings.snapshot_every
        replica = look.replica
        if replica.consumed_step > newest:  # made by now, or left out for want of memory
            newest = -1 if replica.image is None else replica.image.step
        return max(self.images.step, newest)

    def _has_put(self, look: Look) -> bool:
        """Put what is pending into the queue, if there is room."""
        if self._pending:
            consumed = look.replica.consumed_step
            if not self._log.append_ahead(self._pending, durable_step=consumed):
                self._let_replica_on(look)
                return False
            self._pending = ()
        return True

    def _let_replica_on(self, look: Look) -> None:
        """Let a replica that has taken all that it may go on, where the queue has no room.

        It is held back for copies that are late (`Copies.show`), and how far they are is heard only once training
        goes on: with large steps, of which the queue holds few, neither would.
        """
        told = self._told_step
        if told < self._committed_step and look.replica.consumed_step >= told:
            self._trainer.page.update(settled_step=self._committed_step)

    def _keep_room(self, look: Look) -> Look:
        """Wait for room for the next step while there is another in which to tell of trouble.

        Not for what the replica takes only once the next step has told it what is committed.
        """

        def has_room(look: Look) -> bool:
            """Whether a step as large as the last one would fit."""
            consumed = look.replica.consumed_step
            if look.writer.error or self.images.is_needed or consumed >= self._told_step:
                return True
            fits = self._log.append_ahead((), durable_step=consumed)
            self._log.drop_ahead()
            return fits

        return self.wait_until(has_room, _ROOM, look)

    def _drop(self, step: int) -> None:
        self._log.drop_ahead()
        self._pending = ()
        if not self._is_dropping:
            Code.STEPS_DROPPED.warn(
                f"the replica does not keep up, so steps from {step} on are given up; a full "
                "snapshot follows when it has caught up",
                rank=self._trainer.rank,
                step=step,
            )
        self._is_dropping = self.images.is_owed = self.images.is_needed = True
        self._trainer.counters.dropped_steps += 1
