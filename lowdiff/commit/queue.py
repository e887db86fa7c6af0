"""Staging with back-pressure: what the training thread hands to the writer, and waits for."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from lowdiff.commit.health import Trouble, say
from lowdiff.commit.meter import Counters, Meter
from lowdiff.commit.schedule import Cadence
from lowdiff.errors import StorageError, WriterFailed
from lowdiff.persistence.files.shared_page import ImageMark
from lowdiff.persistence.format.framing import RecordKind
from lowdiff.persistence.format.image import ImageTensor, stage_image
from lowdiff.persistence.staging.log import StagingLog
from lowdiff.persistence.staging.status import StatusPage, TrainerStatus, WriterStatus
from lowdiff.persistence.writer.handle import WriterProcess
from lowdiff.protocols import Reducer
from lowdiff.settings import Settings
from lowdiff.tuner.measured import Past
from lowdiff.types import Layout, Section

_logger = logging.getLogger(__name__)

_WAIT_SECONDS = 0.001
_NOTICE_SECONDS = 30.0
#: For what a writer still maps of a log that is gone.
_DRAIN_SECONDS = 10.0


class Stager:
    """One rank's staging log and its writer."""

    def __init__(
        self,
        log: StagingLog,
        writer: WriterProcess,
        settings: Settings,
        rank: int,
        world_size: int,
    ) -> None:
        self.counters = Counters()
        self.writer = writer
        self.meter = Meter(log.folder, self.counters)
        self.cadence = Cadence(
            settings, log.folder, writer, self.meter.recorder, (rank, world_size)
        )
        self._log = log
        self._settings = settings
        self._rank, self._world_size = rank, world_size
        self._page = StatusPage(log.folder.trainer_status, TrainerStatus(os.getpid()))
        self._raises = settings.on_error == "raise"
        self._degrades = settings.backpressure == "degrade"
        #: Step of the last staged snapshot, -1 before the first.
        self.snapshot_step = -1
        self._owes_snapshot = False
        self._retry_step, self._retry_after = -1, 1
        self._first_dropped = -1
        #: Last step before staging was made anew, until the snapshot after it is durable; else -1.
        self._renewed_step = -1
        self.trouble = Trouble(log.folder, rank, settings)

    def begin(self, step: int, past: Past, layout: Layout) -> None:
        """Start at a step, knowing the lives before this one."""
        elements = sum(spec.numel for spec in layout.parameters)
        self.cadence.begin(step, past)
        self.meter.note({**past.facts, "elements": float(elements)})

    @property
    def is_gone(self) -> bool:
        """Whether somebody removed the staging folder, or files of it."""
        return self._log.is_gone or not self._log.folder.trainer_status.exists()

    def end_processes(self) -> None:
        """End what reads a log that is gone; first the writer makes durable what it still maps."""
        try:
            self.writer.finish(_DRAIN_SECONDS)
        except WriterFailed as error:
            _logger.debug("steps of a log that is gone are lost: %s", error)
        self.writer.stop()

    def begin_anew(self, step: int) -> None:
        """Go on after ``step`` in a folder that was made anew; its processes were ended.

        A full snapshot is owed: it takes the place of the steps that were lost.

        Raises:
            StorageError: If there is no memory for it.
        """
        log = self._log = self._log.anew()
        shown = replace(self._page.status, image=None)
        self._page = StatusPage(log.folder.trainer_status, shown)
        self.meter.recorder.reopen()
        self.writer.begin_anew()
        status = self.writer.read_status()
        self.snapshot_step = min(self.snapshot_step, status.durable_snapshot)
        self._renewed_step = step
        self._owes_snapshot = True
        self.trouble.note_lost(step)
        durable_step = status.durable_step
        text = (
            f"somebody removed {log.folder.root}, or files in it, while training uses it: "
            f"{_lost(durable_step, step)}; it is made anew, and a full snapshot follows"
        )
        say(self._rank, "staging_removed", text, step=step, durable_step=durable_step)

    def stage(
        self,
        kind: RecordKind,
        step: int,
        scalars: bytes,
        sections: Sequence[Section],
        *,
        rebases: bool = False,
    ) -> None:
        """Stage a record, as soon as at most ``2 b`` steps are at risk and memory is free.

        With ``backpressure="degrade"`` at once, whatever that drops.

        Raises:
            WriterFailed: If ``on_error="raise"`` and the writer reports trouble.
        """
        if kind is RecordKind.DIFFERENTIAL:
            self._bound_risk(step - self._most_at_risk)
        written: list[int] = []

        def fits(status: WriterStatus) -> bool:
            dropped_before = self._log.dropped_step
            try:
                size = self._log.append(
                    kind,
                    step,
                    scalars,
                    sections,
                    durable_step=status.durable_step,
                    rebases=rebases,
                    drop=self._degrades,
                )
            finally:  # even so there may be no memory for this record
                if self._log.dropped_step > dropped_before:
                    self._note_dropped(dropped_before, status)
            if size is not None:
                written.append(size)
            return size is not None

        self._wait_until(fits, "staging memory")
        self.counters.staged_bytes += written[0]

    def stage_ahead(self, step: int, reducer: Reducer, number: int) -> None:
        """Stage what an optimizer is about to use before its step ends, where that saves a copy.

        Args:
            step: The step under way.
            reducer: Has the gradients.
            number: Which optimizer step of the loop body it is, from 0.
        """

    def stage_snapshot(
        self, step: int, tensors: Callable[[], Sequence[ImageTensor]], *, required: bool
    ) -> None:
        """Stage a full snapshot; waits for the one before it, whose memory it takes.

        Unless it is required, it is owed where it would stop training: with
        ``backpressure="degrade"`` instead of waiting, and when there is no memory for it.

        Raises:
            StorageError: If there is no memory for a required one.
        """
        is_busy = not self._is_settled(self._status())
        if self._degrades and is_busy and not required:
            self._owes_snapshot = True
            return
        self.wait_for_snapshot()
        self._stage_image(step, tensors, required=required)

    def _stage_image(
        self, step: int, tensors: Callable[[], Sequence[ImageTensor]], *, required: bool
    ) -> bool:
        """Copy the image and tell of it; False, and it is owed, if there is no memory for it."""
        with self.timed("snapshot_seconds"):
            try:
                size, checksum = stage_image(
                    self._log.folder.snapshot, tensors(), torch.get_num_threads()
                )
            except StorageError as error:
                # Ranks that wait for this one must hear of it first: with the next exchange.
                if required or (self._raises and self._world_size == 1):
                    raise
                self._owe_for(error, step)
                return False
            self._page.update(image=ImageMark(step, size, checksum))
        self.snapshot_step = step
        self._owes_snapshot = False
        self._retry_after = 1
        self.trouble.of_snapshot = ""
        self.counters.snapshots += 1
        return True

    @property
    def owes_snapshot(self) -> bool:
        """Whether a snapshot could not be taken and should be, or a step is lost and needs one."""
        return self._owes_snapshot or self.writer.read_status().lost_step > self.snapshot_step

    def _is_settled(self, status: WriterStatus) -> bool:
        """Whether the last staged snapshot is durable; until then no other may take its memory."""
        return status.durable_snapshot >= self.snapshot_step

    def is_ready_for_snapshot(self, step: int) -> bool:
        """Whether one after ``step`` would not stop training, as far as this rank knows."""
        status = self._status()
        return (
            step >= self._retry_step
            and not status.error
            and self._is_settled(status)
            and status.durable_step >= step - 2 * self.cadence.batch_size
        )

    def _bound_risk(self, limit: int) -> None:
        """Wait until ``limit`` is durable, or count a step that goes on without."""
        if self._degrades:
            self.counters.unprotected_steps += self._status().durable_step < limit
        else:
            self._wait_for_step(limit)

    def _wait_for_step(self, limit: int) -> None:
        if self._renewed_step >= 0 and self.snapshot_step > self._renewed_step:
            self.wait_for_snapshot()  # until it is durable no step after the lost ones is of use
            self._renewed_step = -1
        if limit <= self._renewed_step:
            return  # it is durable, or lost
        if self._tells_first:
            # The last step that may be at risk is kept for telling the other ranks of trouble.
            self._wait_until(
                lambda status: self._is_reached(status, limit + 1) or bool(status.error),
                f"step {limit + 1} to be durable",
            )
        self._wait_until(
            lambda status: self._is_reached(status, limit), f"step {limit} to be durable"
        )

    @property
    def _tells_first(self) -> bool:
        """Whether trouble is raised only once all ranks have heard of it."""
        return self._raises and self._world_size > 1

    def _is_reached(self, status: WriterStatus, step: int) -> bool:
        """Whether a step is no longer at risk."""
        return status.durable_step >= step

    def _note_dropped(self, dropped_before: int, status: WriterStatus) -> None:
        """Steps that were not durable are gone; what follows needs a snapshot to be of use."""
        durable_step = max(dropped_before, status.durable_step)
        if status.durable_snapshot >= dropped_before:  # else the gap before is still open
            self._first_dropped = durable_step + 1
        if not self._owes_snapshot:
            text = (
                f"storage is too slow and staging memory is full, so steps from {durable_step + 1} "
                "on are given up; a full snapshot follows when storage is back"
            )
            say(self._rank, "steps_dropped", text, step=durable_step + 1)
        self._owes_snapshot = True
        self.counters.dropped_steps += self._log.dropped_step - durable_step

    @property
    def durable_step(self) -> int:
        """The newest step of this rank's that needs no memory to be recovered; for any thread.

        What follows dropped steps counts once the snapshot behind the gap is durable.
        """
        status = self.writer.read_status()
        if 0 < self._first_dropped and status.durable_snapshot < self._log.dropped_step:
            return min(status.unbroken_step, self._first_dropped - 1)
        return status.unbroken_step

    def stop(self) -> None:
        """Stage nothing more but a last snapshot."""

    def tend(self) -> None:
        """Start the writer again if it died, as every step does."""
        self._status()

    def die(self, *, kills_processes: bool) -> None:
        """Leave the staging memory as it is, and its processes without their trainer.

        Args:
            kills_processes: Whether they are killed as well.
        """
        (self.writer.stop if kills_processes else self.writer.orphan)()

    def figures(self) -> dict[str, Any]:
        """Further parts of ``stats()``; for any thread."""
        return {}

    def _owe_for(self, error: StorageError, step: int) -> None:
        # Each try costs the ranks that have the memory a snapshot.
        self._retry_step = step + self._retry_after
        self._retry_after = min(2 * self._retry_after, self._settings.snapshot_every)
        if not self._owes_snapshot:
            _logger.warning("rank %d: no full snapshot now: %s", self._rank, error)
        self._owes_snapshot = True
        self.trouble.of_snapshot = str(error)

    def wait_for_snapshot(self) -> None:
        """Wait until the last staged snapshot is durable."""
        self._wait_until(
            self._is_settled,
            f"the snapshot of step {self.snapshot_step} to be durable",
        )

    def wait_for_adoption(self) -> None:
        """Wait until the steps that an earlier incarnation had only staged are durable."""
        self._wait_until(
            lambda status: status.adopted, "the steps of the life before to be durable"
        )

    def wait_for_store(self, base_step: int) -> None:
        """Wait until all that training starts from is in the store, or the store is in trouble.

        Of steps before this life's snapshot, up to ``base_step``: -1 where none is needed.

        Raises:
            WriterFailed: If ``on_error="raise"`` and it is in trouble.
        """
        self._wait_until(
            lambda status: (
                bool(status.remote_error)
                or (
                    status.remote_step >= base_step and status.remote_snapshot >= self.snapshot_step
                )
            ),
            f"step {max(base_step, self.snapshot_step)} to be in {self._settings.store}",
        )
        if self.trouble.of_store and self._raises:
            raise self.trouble.failure([self._rank])

    @contextmanager
    def timed(self, counter: str) -> Iterator[None]:
        """Add the time spent, without waiting, to a counter."""
        started = time.perf_counter()
        waited = self.counters.waiting_seconds
        try:
            yield
        finally:
            spent = time.perf_counter() - started - (self.counters.waiting_seconds - waited)
            setattr(self.counters, counter, getattr(self.counters, counter) + spent)

    def _wait_until(self, condition: Callable[[WriterStatus], bool], what: str) -> None:
        if condition(self._status()):
            return
        started = noticed = time.perf_counter()
        while not condition(status := self._status()):
            if self.is_gone:
                raise StorageError(
                    f"{self._log.folder.root} was removed while training waited for {what}"
                )
            if status.error and self._raises:
                raise self.trouble.failure([self._rank])
            time.sleep(_WAIT_SECONDS)
            now = time.perf_counter()
            if now - noticed > _NOTICE_SECONDS:
                noticed = now
                text = f"training has waited {now - started:.0f} s for {what}"
                say(self._rank, "waiting", text, seconds=now - started)
        self.counters.waiting_seconds += time.perf_counter() - started

    @property
    def _most_at_risk(self) -> int:
        """Steps that the loss of the machine's power may cost."""
        return 2 * self.cadence.batch_size

    def heed(self, troubled: Sequence[int]) -> None:
        """Say, or raise, that durable writing is in trouble; on all ranks at the same commit.

        Args:
            troubled: Ranks that said so with the exchanges of this step. A single process
                exchanges nothing and asks its own writer.

        Raises:
            WriterFailed: If ``on_error="raise"`` and a rank is in trouble.
        """
        if self._world_size == 1:
            self._status()
            troubled = [0] if self.trouble.is_there else []
        self.trouble.heed(troubled)

    def step_done(self, step: int, committed_step: int, *, preempted: bool) -> None:
        """Count a commit and show it."""
        self.meter.step_done(max(0, committed_step - self.durable_step))
        self.show(step, committed_step, preempted=preempted)

    def show(self, step: int, committed_step: int, *, preempted: bool = False) -> None:
        """Tell whoever watches the run how far this rank is."""
        is_new = step > self._page.status.step
        at = time.time() if is_new else self._page.status.committed_at_unix_seconds
        self._page.update(
            step=step,
            committed_step=committed_step,
            committed_at_unix_seconds=at,
            preempted=preempted,
        )

    def _reported(self) -> WriterStatus:
        """What the writer says."""
        return self.writer.status()

    def _status(self) -> WriterStatus:
        status = self._reported()
        if not (status.error and self.is_gone):  # the next commit names the cause and cures it
            self.trouble.notice(status, self._most_at_risk)
        return status


def _lost(durable_step: int, step: int) -> str:
    if durable_step >= step:
        return f"every step up to {step} is durable"
    steps = f"step {step}" if durable_step + 1 == step else f"steps {durable_step + 1} to {step}"
    return f"{steps} cannot be recovered"
