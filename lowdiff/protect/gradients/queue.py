"""The queue of gradients: they stay in memory as long as an image there leads on by them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from lowdiff.commit.agreement import RankNews
from lowdiff.commit.pending import MOST_LATE
from lowdiff.commit.queue import Queue, base_record
from lowdiff.commit.sinks import Ahead, Handed
from lowdiff.commit.storage import Look, Storage, Trainer
from lowdiff.core.events import Code
from lowdiff.persistence.format.differentials import encode_scalars, sections_of
from lowdiff.persistence.format.framing import RecordKind
from lowdiff.persistence.staging.log import StagingLog
from lowdiff.protect.gradients.images import KeptImages
from lowdiff.step.states import Change
from lowdiff.types import Section

#: An image is taken each time so small a part of the log is filled: two parts lie between the older image and
#: the next one, and steps go on while that is written.
_PART = 1 / 3
#: Of gradients that lie on an accelerator once more while they are on their way from it; one step's may.
_LATE_BYTES = 1 << 30


class GradientsQueue(Queue):
    """Gradients since the older of two images, and the images, of which the writer makes some durable.

    Where the log is full, the older image is given up; where that is not enough, the step costs a full snapshot.

    Large because it answers all that a queue is asked.

    Args:
        log: Where they lie; as much of it is reused as lies before the older image.
        num_steps: How many steps it is planned for.
        body_bytes: Bytes of each.
        trainer: See `Queue`.
        storage: Has the writer.
    """

    images: KeptImages

    def __init__(
        self, log: StagingLog, num_steps: int, body_bytes: int, trainer: Trainer, storage: Storage
    ) -> None:
        super().__init__(trainer, storage)
        self.most_late = MOST_LATE if MOST_LATE * body_bytes <= _LATE_BYTES else 1
        self.images = KeptImages(trainer)
        self._log = log
        self._num_steps = num_steps
        self._image_every = max(1, int(num_steps * _PART))
        #: Newest step that was staged; the one that found no room ahead of its record; the newest without room.
        self._step = self._given_up = self._roomless_step = -1
        #: Steps that only an image holds, of which the newest image may be one.
        self._holes: list[int] = []
        #: The newest step to which every rank's newest image leads, as they said.
        self._heard_step = -1
        self._has_given_up = False

    def _lacks_files(self) -> bool:
        return self._log.is_gone or self.images.is_gone

    @property
    def _leads(self) -> int:
        """The newest step to which the newest image leads."""
        staged_step = self.images.staged_step
        return min((hole - 1 for hole in self._holes if hole > staged_step), default=self._step)

    @property
    def _joint_step(self) -> int:
        """The newest step to which every rank's newest image leads, as far as this one knows."""
        return self._leads if self._trainer.world_size == 1 else self._heard_step

    def needs_image(self, step: int) -> bool:
        """See `Queue`."""
        return step - self.images.step >= self._image_every

    def news(self, step: int, look: Look) -> dict[str, Any]:
        """See `Sink`."""
        return {**super().news(step, look), "leads": self._leads}

    def hear(self, heard: Sequence[RankNews]) -> None:
        """See `Sink`."""
        self._heard_step = min(news.leads for news in heard)

    def lacks_room_for(self, step: int) -> bool:
        """See `Queue`."""
        return self._roomless_step > self.images.staged_step and not self._trainer.raises

    def stage_base(self, base: Handed) -> Handed:
        """See `Sink`."""
        record = base_record(base)
        return self._append(RecordKind.BASE, record.step, base)

    def stage_ahead(self, ahead: Ahead) -> None:
        """See `Sink`: straight from where the optimizer has them."""
        if ahead.sections and self._given_up != ahead.step and not self._put(ahead.sections):
            self._given_up = ahead.step

    def stage(self, handed: Handed) -> Handed:
        """See `Sink`: a step that finds no room needs a snapshot."""
        step = handed.sealed.differential.step
        if step <= self._step:  # a commit that was interrupted is made again
            is_roomless = step == self._roomless_step
            return (
                _roomless(handed) if is_roomless else replace(handed, checksum=self._log.checksum)
            )
        staged = handed
        if self._given_up != step:
            staged = self._append(RecordKind.DIFFERENTIAL, step, handed)
        self._step = step
        if handed.sealed.rebases or staged.checksum is None:
            self._holes = [hole for hole in self._holes if hole > self.images.staged_step]
            self._holes.append(step)
        if staged.checksum is not None:
            return staged
        self._log.drop_ahead()
        self._roomless_step = step
        return _roomless(handed)

    def _append(self, kind: RecordKind, step: int, handed: Handed) -> Handed:
        """Stage a record behind what is staged ahead of it; without a checksum if there is no room."""
        log, sealed = self._log, handed.sealed
        is_step = kind is RecordKind.DIFFERENTIAL
        record = sealed.differential if is_step else base_record(handed)
        scalars, sections = encode_scalars(record), sections_of(record)
        if is_step and not self._put(sections):
            return handed
        size = self._with_room(
            lambda free_step: (
                log.append(
                    kind,
                    step,
                    scalars,
                    () if is_step else sections,
                    durable_step=free_step,
                    rebases=is_step and sealed.rebases,
                )
                or 0
            )
        )
        if not size:
            return handed
        return replace(handed, checksum=log.checksum, staged_bytes=handed.staged_bytes + size)

    def _put(self, sections: Sequence[Section]) -> bool:
        """Stage sections of the next record ahead of the rest of it; returns whether there was room."""
        log = self._log
        return bool(
            self._with_room(
                lambda free_step: int(log.append_ahead(sections, durable_step=free_step))
            )
        )

    def _with_room(self, append: Callable[[int], int]) -> int:
        """Append where the older image's gradients end, or else in place of those; returns the bytes, 0 for no room.

        Args:
            append: Does it; is given the step up to which records may be written over.
        """
        images = self.images
        size = append(images.oldest_step)
        if size or not images.oldest_step < images.staged_step <= self._joint_step:
            return size
        # The newer image alone leads on, and all ranks have come so far.
        if not self._has_given_up:
            self._has_given_up = True
            Code.KEPT_STEPS_GIVEN_UP.warn(
                f"staging memory is full, or steps are larger than was planned, so steps from {images.oldest_step} to {images.staged_step - 1} are given up before "
                "the next image takes their place; no step after them is lost. Let it hold more (docker: --shm-size), "
                "or let steps be smaller. This is said once",
                rank=self._trainer.rank,
                step=images.oldest_step,
            )
        return append(images.staged_step)

    def clear_for_snapshot(self, look: Look, *, required: bool, is_due: bool) -> Look | None:
        """See `Queue`: the newer image has to lead on alone, for which all ranks have to have come so far."""
        images = self.images
        is_apart = images.staged_step > max(self._joint_step, images.oldest_step)
        if is_apart and not required:
            images.is_owed |= is_due
            return None  # the next step asks again
        if not (is_due or images.is_free(look, is_due=False)):
            # The disk is slow: it has the time until the log is full.
            if self._step - images.oldest_step < self._num_steps:
                return None
            if self._trainer.degrades:
                images.give_up_due(look.writer.durable_snapshot)
        return super().clear_for_snapshot(look, required=required, is_due=is_due)

    def secure(self, step: int) -> int:
        """See `Queue`: without the live state no other snapshot can be made."""
        return self.images.due_step

    def begin_anew(self, step: int) -> None:
        """See `Queue`: memory leads nowhere before the snapshot that is owed."""
        self._log = self._log.anew()
        self._step = self._given_up = self._roomless_step = self._heard_step = -1
        self._holes.clear()
        super().begin_anew(step)

    def figures(self) -> dict[str, Any]:
        """See `Sink`."""
        oldest = self.images.oldest_step
        kept = 0 if oldest < 0 else max(0, self._joint_step - oldest)
        return {
            "kept_steps": kept,
            "kept_bytes": self._log.bytes_held + self.images.bytes_held,
            "ring_fill": kept / self._num_steps,
        }


def _roomless(handed: Handed) -> Handed:
    """Return a step that found no room: only a snapshot holds it."""
    sealed = handed.sealed
    return replace(handed, sealed=replace(sealed, changes=sealed.changes | {Change.NO_ROOM}))
