"""The queue of differentials that the writer makes durable."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import ClassVar

from lowdiff.commit.pending import MOST_LATE
from lowdiff.commit.queue import Queue, base_record
from lowdiff.commit.sinks import Handed
from lowdiff.commit.storage import Look, Storage, Trainer
from lowdiff.core.events import Code
from lowdiff.persistence.format.differentials import encode_scalars, sections_of
from lowdiff.persistence.format.framing import RecordKind
from lowdiff.persistence.staging.log import StagingLog
from lowdiff.persistence.staging.status import WriterStatus
from lowdiff.types import Differential


class LogQueue(Queue):
    """Differentials that the writer makes durable (strategy log)."""

    logs_steps: ClassVar[bool] = True
    most_late = MOST_LATE

    def __init__(self, log: StagingLog, trainer: Trainer, storage: Storage) -> None:
        super().__init__(trainer, storage)
        self._log = log
        self._first_dropped = -1
        #: Last step before staging was made anew, until the snapshot after it is durable; else -1.
        self._renewed_step = -1

    @property
    def _most_at_risk(self) -> int:
        return 2 * self._storage.writer.batch_size

    def _lacks_files(self) -> bool:
        return self._log.is_gone

    @property
    def durable_step(self) -> int:
        """See `Queue`: what follows dropped steps counts once the snapshot behind it is durable."""
        writer = self._storage.writer.read_status()
        if 0 < self._first_dropped and writer.durable_snapshot < self._log.dropped_step:
            return min(writer.unbroken_step, self._first_dropped - 1)
        return writer.unbroken_step

    def owes_snapshot(self, look: Look) -> bool:
        """See `Queue`."""
        return self.images.is_owed or look.writer.lost_step > self.images.step

    def stage_base(self, base: Handed) -> Handed:
        """See `Sink`: names the residual that an incarnation starts from."""
        return self._append(RecordKind.BASE, base_record(base), base, base.look)

    def stage(self, handed: Handed) -> Handed:
        """See `Sink`: at most ``2 * batch_size`` steps are at risk.

        With ``backpressure="degrade"`` at once, whatever that drops.
        """
        trainer, look = self._trainer, handed.look
        record = handed.sealed.differential
        limit = record.step - self._most_at_risk
        if trainer.degrades:
            look = self._count_unprotected(limit, look)
        elif self._renewed_step >= 0 or look.writer.durable_step <= limit:
            look = self._bound_risk(limit, look)
        return self._append(RecordKind.DIFFERENTIAL, record, handed, look)

    def is_ready_for_snapshot(self, step: int, look: Look) -> bool:
        """See `Queue`."""
        is_near = look.writer.durable_step >= step - self._most_at_risk
        return super().is_ready_for_snapshot(step, look) and is_near

    def secure(self, step: int) -> int:
        """See `Queue`."""
        self._storage.writer.write_through()
        return step

    def begin_anew(self, step: int) -> None:
        """See `Queue`: the snapshot takes the place of the steps that were lost."""
        self._log = self._log.anew()
        super().begin_anew(step)
        self._renewed_step = step

    def _append(self, kind: RecordKind, record: Differential, handed: Handed, look: Look) -> Handed:
        log = self._log
        scalars, sections = encode_scalars(record), sections_of(record)
        sizes: list[int] = []

        def fits(look: Look, *, drops: bool = False) -> bool:
            dropped_before = log.dropped_step
            try:
                size = log.append(
                    kind,
                    record.step,
                    scalars,
                    sections,
                    durable_step=look.writer.durable_step,
                    rebases=kind is RecordKind.DIFFERENTIAL and handed.sealed.rebases,
                    drop=drops,
                )
            finally:  # even so there may be no memory for this record
                if log.dropped_step > dropped_before:
                    self._note_dropped(dropped_before, look.writer)
            if size is None:
                return False
            sizes.append(size)
            return True

        if not fits(look):  # by now more may be durable
            may_drop = partial(fits, drops=self._trainer.degrades)
            look = self.wait_until(may_drop, "staging memory", self.attend())
        return replace(
            handed,
            look=look,
            checksum=log.checksum,
            staged_bytes=handed.staged_bytes + sum(sizes),
        )

    def _bound_risk(self, limit: int, look: Look) -> Look:
        if self._renewed_step >= 0 and self.images.staged_step > self._renewed_step:
            # Until it is durable no step after the lost ones is of use.
            look = self.wait_for_snapshot(look)
            self._renewed_step = -1
        if limit <= self._renewed_step:
            return look  # it is durable, or lost

        def is_reached(look: Look, step: int) -> bool:
            return look.writer.durable_step >= step

        return self._wait_for_step(limit, is_reached, look)

    def _note_dropped(self, dropped_before: int, writer: WriterStatus) -> None:
        """Steps that were not durable are gone; what follows needs a snapshot to be of use."""
        durable_step = max(dropped_before, writer.durable_step)
        if writer.durable_snapshot >= dropped_before:  # else the gap before is still open
            self._first_dropped = durable_step + 1
        if not self.images.is_owed:
            Code.STEPS_DROPPED.warn(
                "storage is too slow and staging memory is full, so steps from "
                f"{durable_step + 1} on are given up; a full snapshot follows when storage is back",
                rank=self._trainer.rank,
                step=durable_step + 1,
            )
        self.images.is_owed = True
        self._trainer.counters.dropped_steps += self._log.dropped_step - durable_step
