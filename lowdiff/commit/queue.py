"""The queue of steps that training fills: what every strategy offers, and the one of logged steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Protocol

from lowdiff.commit.storage import Images, Storage
from lowdiff.core.events import Code
from lowdiff.persistence.format.differentials import encode_scalars, sections_of
from lowdiff.persistence.format.framing import RecordKind
from lowdiff.persistence.format.image import ImageTensor
from lowdiff.persistence.staging.log import StagingLog
from lowdiff.persistence.staging.status import WriterStatus
from lowdiff.types import Differential, Section


class StepQueue(Protocol):
    """One rank's queue of steps: staged by training, emptied by other processes.

    Large because it is all that strategies do differently while a training runs.

    Attributes:
        storage: The processes that empty it.
        logs_steps: Whether every step becomes durable by itself, without a snapshot after it.
        makes_images: Whether another process takes the regular snapshots.
    """

    logs_steps: ClassVar[bool]
    makes_images: bool
    storage: Storage

    @property
    def staged_checksum(self) -> int:
        """CRC-32C of the body of the record that was staged last; 0 where none was."""
        ...

    @property
    def images(self) -> Images:
        """Full snapshots on their way to the processes."""
        ...

    @property
    def is_gone(self) -> bool:
        """Whether somebody removed or damaged the staging folder, or files of it."""
        ...

    @property
    def durable_step(self) -> int:
        """The newest step of this rank's that needs no memory to be recovered; for any thread."""
        ...

    @property
    def owes_snapshot(self) -> bool:
        """Whether a snapshot could not be taken and should be, or a step is lost and needs one."""
        ...

    def status(self) -> WriterStatus:
        """Return the report of the processes; they are started again where they died."""
        ...

    def stage(
        self,
        kind: RecordKind,
        record: Differential,
        *,
        rebases: bool,
    ) -> None:
        """Stage a record, as soon as there is room and little enough is at risk.

        Raises:
            WriterFailed: If ``on_error="raise"`` and the writer reports trouble.
            StorageError: If there is no memory, or staging was removed.
        """
        ...

    def stage_ahead(self, step: int, sections: Sequence[Section]) -> None:
        """Stage what an optimizer is about to use before its step ends, where that saves a copy.

        Args:
            step: The step under way.
            sections: The gradients of one optimizer step, where they lie now.
        """
        ...

    def stage_snapshot(
        self, step: int, tensors: Callable[[], Sequence[ImageTensor]], *, required: bool
    ) -> None:
        """Stage a full snapshot; waits for the one before it, whose memory it takes.

        Unless it is required, it is owed where it would stop training: with
        ``backpressure="degrade"`` instead of waiting, and when there is no memory for it.

        Raises:
            StorageError: If there is no memory for a required one.
        """
        ...

    def is_ready_for_snapshot(self, step: int) -> bool:
        """Whether one after ``step`` would not stop training, as far as this rank knows.

        Asks for the `status`, so that errors of storage are known afterwards.
        """
        ...

    def wait_for_snapshot(self) -> None:
        """Wait until the last staged snapshot is durable."""
        ...

    def secure(self, step: int) -> int:
        """Have a committed step become durable, as training ends; returns the newest that can.

        Args:
            step: The newest committed step.
        """
        ...

    def begin_anew(self, step: int) -> None:
        """Go on after ``step`` in a folder that was made anew; a full snapshot is owed.

        Raises:
            StorageError: If there is no memory for it.
        """
        ...

    def figures(self) -> dict[str, Any]:
        """Further parts of ``stats()``; for any thread."""
        ...


class LogQueue:
    """Differentials that the writer makes durable; see `StepQueue`. Large because it is all of that."""

    logs_steps: ClassVar[bool] = True

    def __init__(self, log: StagingLog, storage: Storage) -> None:
        self.storage = storage
        self.images = Images(storage)
        self.makes_images = False
        self._log = log
        self._first_dropped = -1
        #: Last step before staging was made anew, until the snapshot after it is durable; else -1.
        self._renewed_step = -1

    @property
    def staged_checksum(self) -> int:
        """See `StepQueue`."""
        return self._log.checksum

    @property
    def is_gone(self) -> bool:
        """See `StepQueue`."""
        return self._log.is_gone or self.storage.has_lost_image

    @property
    def durable_step(self) -> int:
        """See `StepQueue`: what follows dropped steps counts once the snapshot behind it is durable."""
        status = self.storage.writer.read_status()
        if 0 < self._first_dropped and status.durable_snapshot < self._log.dropped_step:
            return min(status.unbroken_step, self._first_dropped - 1)
        return status.unbroken_step

    @property
    def owes_snapshot(self) -> bool:
        """See `StepQueue`."""
        return self.images.is_owed or self.storage.last.lost_step > self.images.step

    def status(self) -> WriterStatus:
        """See `StepQueue`; trouble that is news is said."""
        status = self.storage.last = self.storage.writer.status()
        if not (status.error and self.is_gone):  # the next commit names the cause and cures it
            self.storage.errors.report(status, 2 * self.storage.batch_size)
        return status

    def stage(
        self,
        kind: RecordKind,
        record: Differential,
        *,
        rebases: bool,
    ) -> None:
        """See `StepQueue`: at most ``2 * batch_size`` steps are at risk.

        With ``backpressure="degrade"`` at once, whatever that drops.
        """
        storage, log, status = self.storage, self._log, self.status()
        step, scalars, sections = record.step, encode_scalars(record), sections_of(record)
        if kind is RecordKind.DIFFERENTIAL:
            limit = step - 2 * storage.batch_size
            if storage.degrades:
                storage.counters.unprotected_steps += status.durable_step < limit
            elif self._renewed_step >= 0 or status.durable_step <= limit:
                self._wait_for_step(limit)
                status = self.status()

        def fits(status: WriterStatus) -> bool:
            dropped_before = log.dropped_step
            try:
                size = log.append(
                    kind,
                    step,
                    scalars,
                    sections,
                    durable_step=status.durable_step,
                    rebases=rebases,
                    drop=storage.degrades,
                )
            finally:  # even so there may be no memory for this record
                if log.dropped_step > dropped_before:
                    self._note_dropped(dropped_before, status)
            storage.counters.staged_bytes += size or 0
            return size is not None

        if not fits(status):
            storage.wait_until(self, fits, "staging memory")

    def stage_ahead(self, step: int, sections: Sequence[Section]) -> None:
        """See `StepQueue`: compressed gradients are staged with their step."""

    def stage_snapshot(
        self, step: int, tensors: Callable[[], Sequence[ImageTensor]], *, required: bool
    ) -> None:
        """See `StepQueue`."""
        self.images.stage_behind_last(self, step, tensors, required=required)

    def is_ready_for_snapshot(self, step: int) -> bool:
        """See `StepQueue`."""
        status = self.status()
        is_near = status.durable_step >= step - 2 * self.storage.batch_size
        return self.images.is_ready(step, status) and is_near

    def secure(self, step: int) -> int:
        """See `StepQueue`."""
        self.storage.writer.write_through()
        return step

    def wait_for_snapshot(self) -> None:
        """See `StepQueue`."""
        self.storage.wait_for_image(self, self.images.step)

    def begin_anew(self, step: int) -> None:
        """See `StepQueue`: the snapshot takes the place of the steps that were lost."""
        self._log = self._log.anew()
        self.storage.begin_anew(step)
        self.images.begin_anew()
        self._renewed_step = step

    def figures(self) -> dict[str, Any]:
        """See `StepQueue`."""
        return {}

    def _wait_for_step(self, limit: int) -> None:
        if self._renewed_step >= 0 and self.images.step > self._renewed_step:
            self.wait_for_snapshot()  # until it is durable no step after the lost ones is of use
            self._renewed_step = -1
        if limit <= self._renewed_step:
            return  # it is durable, or lost
        self.storage.wait_for_step(self, limit, lambda status, step: status.durable_step >= step)

    def _note_dropped(self, dropped_before: int, status: WriterStatus) -> None:
        """Steps that were not durable are gone; what follows needs a snapshot to be of use."""
        durable_step = max(dropped_before, status.durable_step)
        if status.durable_snapshot >= dropped_before:  # else the gap before is still open
            self._first_dropped = durable_step + 1
        if not self.images.is_owed:
            Code.STEPS_DROPPED.warn(
                "storage is too slow and staging memory is full, so steps from "
                f"{durable_step + 1} on are given up; a full snapshot follows when storage is back",
                rank=self.storage.rank,
                step=durable_step + 1,
            )
        self.images.is_owed = True
        self.storage.counters.dropped_steps += self._log.dropped_step - durable_step
