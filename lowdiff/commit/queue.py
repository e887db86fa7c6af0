"""The queue of steps that training fills and other processes empty; those of strategies log and survivors."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

from lowdiff.commit.images import Images
from lowdiff.commit.sinks import Handed, Sink
from lowdiff.commit.storage import Look, Storage, Trainer
from lowdiff.core.events import Code
from lowdiff.errors import StorageError
from lowdiff.persistence.staging.status import Backoff
from lowdiff.types import Differential

#: Between two looks, at first and at most: whoever waits long need not look often.
_WAIT_SECONDS, _LONGEST_WAIT_SECONDS = 0.001, 0.01
_NOTICE_SECONDS = 30.0


class Queue(Sink, ABC):
    """One rank's queue: staged by training, emptied by its processes.

    Large because it is all that strategies do differently while a training runs.

    Args:
        trainer: This rank's training.
        storage: The processes that empty the queue.

    Attributes:
        logs_steps: Whether every step becomes durable by itself, without a snapshot after it.
        makes_images: Whether another process takes the regular snapshots.
        most_late: How many steps may be on their way from an accelerator while later ones are made.
        images: Full snapshots on their way to the processes.
    """

    logs_steps: ClassVar[bool] = False
    makes_images = False
    most_late = 0

    def __init__(self, trainer: Trainer, storage: Storage) -> None:
        self.images = Images(trainer)
        self._trainer = trainer
        self._storage = storage

    @property
    def _most_at_risk(self) -> int:
        """How many steps may be at risk."""
        return 2 * self._trainer.settings.snapshot_every

    @abstractmethod
    def _lacks_files(self) -> bool:
        """Whether somebody removed files that its processes read."""

    def is_gone(self, look: Look) -> bool:
        """See `Sink`."""
        return look.is_gone

    def look(self) -> Look:
        """Read what the processes report, and see whether files are there; for any thread."""
        writer = self._storage.writer.read_status()
        return Look(writer, is_gone=writer.lost_image >= 0 or self._lacks_files())

    def attend(self) -> Look:
        """Start dead processes anew, look, and say what is wrong where that is news."""
        with self._trainer.turn:
            self._storage.tend()
            look = self.look()
            self._say(look)
            return look

    @property
    def durable_step(self) -> int:
        """The newest step of this rank's that needs no memory to be recovered; for any thread."""
        return self._storage.writer.read_status().unbroken_step

    def owes_snapshot(self, look: Look) -> bool:
        """See `Sink`: whether one could not be taken and should be, or a step is lost and needs one."""
        return self.images.is_owed

    def is_ready_for_snapshot(self, step: int, look: Look) -> bool:
        """Whether one after ``step`` would not stop training, as far as this rank knows."""
        return self.images.is_ready(step, look)

    def news(self, step: int, look: Look) -> dict[str, Any]:
        """See `Sink`."""
        return {"can_snapshot": self.is_ready_for_snapshot(step, look)}

    def needs_image(self, step: int) -> bool:
        """Whether an image is to be taken after ``step`` that stays in memory."""
        return False

    def lacks_room_for(self, step: int) -> bool:
        """Whether a step, or one before it, found no room: training waits, as for room, until a snapshot holds it."""
        return False

    def clear_for_snapshot(self, look: Look, *, required: bool, is_due: bool) -> Look | None:
        """Wait for the snapshot before, whose memory the next one takes.

        Args:
            look: At storage.
            required: Whether to wait though it stops training.
            is_due: Whether the next one is to be durable.

        Returns:
            A newer look; None where the next one would stop training, with ``backpressure="degrade"``, and is owed.
        """
        images = self.images
        if not images.is_free(look, is_due=is_due):
            if not self._trainer.degrades or required:
                return self.wait_for_snapshot(look)
            look = self.attend()
            if not images.is_free(look, is_due=is_due):
                images.is_owed = True
                return None
        return look

    def secure(self, step: int) -> int:
        """Have a committed step become durable, as training ends; returns the newest that can.

        Args:
            step: The newest committed step.
        """
        return step

    def begin_anew(self, step: int) -> None:
        """See `Sink`: a full snapshot is owed."""
        self._trainer.begin_anew()
        self._storage.begin_anew()
        self._trainer.errors.skip_lost(step)
        self.images.begin_anew(self._storage.writer.read_status().durable_snapshot)

    def wait_until(self, condition: Callable[[Look], bool], what: str, look: Look) -> Look:
        """Wait for a condition on what the processes report; returns the look at which it was true.

        Raises:
            StorageError: If staging was removed meanwhile.
            WriterFailed: If ``on_error="raise"`` and the writer reports an error.
        """
        if condition(look):
            return look
        trainer = self._trainer
        started = noticed = time.perf_counter()
        rest = Backoff(_WAIT_SECONDS, _LONGEST_WAIT_SECONDS)
        while not condition(look := self.attend()):
            if look.is_gone:
                raise StorageError(
                    f"{trainer.folder.root} was removed or damaged while training waited for {what}"
                )
            if trainer.is_over:
                raise StorageError(f"the training has ended, which waited for {what}")
            if time.monotonic() > trainer.deadline:
                trouble = f": {look.writer.error}" if look.writer.error else ""
                raise StorageError(f"there was no more time to wait for {what}{trouble}")
            if look.writer.error and trainer.raises:
                raise trainer.errors.failure([trainer.rank])
            with trainer.turn:  # a thread that holds it lets go of it here
                trainer.turn.wait_for(lambda: False, rest.next_seconds())
            now = time.perf_counter()
            if now - noticed > _NOTICE_SECONDS:
                noticed = now
                Code.WAITING.warn(
                    f"training has waited {now - started:.0f} s for {what}{self._held_up_by(look)}",
                    rank=trainer.rank,
                    seconds=now - started,
                )
        trainer.counters.waiting_seconds += time.perf_counter() - started
        return look

    def wait_for_snapshot(self, look: Look) -> Look:
        """Wait until the last staged snapshot is durable."""
        step = self.images.due_step
        what = f"the snapshot of step {step} to be durable"
        look = self.wait_until(lambda look: look.writer.settled_snapshot >= step, what, look)
        if look.writer.durable_snapshot < step:
            raise StorageError(
                f"the snapshot of step {step} in {self._trainer.folder.root} was removed or damaged before it was "
                "durable"
            )
        return look

    def wait_for_adoption(self) -> None:
        """Wait until the steps that an earlier incarnation had only staged are durable."""
        what = "the steps of the incarnation before to be durable"
        self.wait_until(lambda look: look.writer.adopted, what, self.attend())

    def wait_for_store(self, step: int) -> None:
        """Wait until a step and the last snapshot are in the store, or the store reports an error.

        Raises:
            WriterFailed: If ``on_error="raise"`` and the store reports an error.
        """
        trainer, snapshot = self._trainer, self.images.due_step

        def is_there(look: Look) -> bool:
            writer = look.writer
            is_stored = writer.remote_step >= step and writer.remote_snapshot >= snapshot
            return bool(writer.remote_error) or is_stored

        what = f"step {max(step, snapshot)} to be in {trainer.settings.store}"
        self.wait_until(is_there, what, self.attend())
        if trainer.errors.of_store and trainer.raises:
            raise trainer.errors.failure([trainer.rank])

    def _wait_for_step(
        self, limit: int, is_reached: Callable[[Look, int], bool], look: Look
    ) -> Look:
        """Wait until a step is no longer at risk.

        The last step that may be at risk is kept for telling the other ranks of an error.

        Args:
            limit: The step.
            is_reached: Whether a step is no longer at risk, as the processes report it.
            look: The last one.
        """
        if self._trainer.tells_first:
            look = self.wait_until(
                lambda look: is_reached(look, limit + 1) or bool(look.writer.error),
                f"step {limit + 1} to be durable",
                look,
            )
        what = f"step {limit} to be durable"
        return self.wait_until(lambda look: is_reached(look, limit), what, look)

    def _count_unprotected(self, limit: int, look: Look) -> Look:
        """Count a step that goes on although one up to a limit is not durable, as a look that is new says."""
        if look.writer.durable_step < limit:
            look = self.attend()
            self._trainer.counters.unprotected_steps += look.writer.durable_step < limit
        return look

    def _say(self, look: Look) -> None:
        if not (look.writer.error and look.is_gone):  # the next commit names the cause and cures it
            self._trainer.errors.report(look.writer, self._most_at_risk)

    def _held_up_by(self, look: Look) -> str:
        """Say what a wait that is long may be due to."""
        return ""


def base_record(base: Handed) -> Differential:
    """Return the record of what an incarnation starts from, which names its residual."""
    return replace(base.sealed.differential, held=())
