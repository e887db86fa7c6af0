"""Staging with back-pressure: what the training thread hands to the writer, and waits for."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from lowdiff.errors import StorageError, WriterFailed
from lowdiff.persistence.framing import RecordKind
from lowdiff.persistence.snapshots import ImageTensor, encode_mark, stage_image
from lowdiff.persistence.staging import StagingLog
from lowdiff.persistence.status import WriterStatus
from lowdiff.persistence.writer_process import WriterProcess
from lowdiff.settings import Settings
from lowdiff.types import Payload

_logger = logging.getLogger(__name__)

_WAIT_SECONDS = 0.001
_NOTICE_SECONDS = 30.0


@dataclass(slots=True)
class Counters:
    """What this rank has done since ``attach``; times are of the training thread."""

    steps: int = 0
    snapshots: int = 0
    staged_bytes: int = 0
    differential_seconds: float = 0.0
    snapshot_seconds: float = 0.0
    waiting_seconds: float = 0.0
    unprotected_steps: int = 0
    dropped_steps: int = 0


class Stager:
    """One rank's staging log and its writer."""

    def __init__(
        self, log: StagingLog, writer: WriterProcess, settings: Settings, rank: int
    ) -> None:
        self.counters = Counters()
        self.writer = writer
        self._log = log
        self._settings = settings
        self._rank = rank
        self._snapshot_step = -1
        self._owes_snapshot = False
        self._warned = self._warned_of_store = ""

    @property
    def snapshot_step(self) -> int:
        """Step of the last staged snapshot, -1 before the first."""
        return self._snapshot_step

    def stage(
        self,
        kind: RecordKind,
        step: int,
        scalars: bytes,
        payload: Payload,
        *,
        rebases: bool = False,
    ) -> None:
        """Stage a record, as soon as at most ``2 b`` steps are at risk and memory is free.

        With ``backpressure="degrade"`` at once, whatever that drops.

        Raises:
            WriterFailed: If ``on_error="raise"`` and the writer reports trouble.
        """
        if kind is RecordKind.DIFFERENTIAL:
            limit = step - 2 * self._settings.batch_size
            if not self._degrades:
                self._wait_until(
                    lambda status: status.durable_step >= limit, f"step {limit} to be durable"
                )
            elif self._status().durable_step < limit:
                self.counters.unprotected_steps += 1
        written: list[int] = []
        dropped_before = self._log.dropped_step

        def fits(status: WriterStatus) -> bool:
            size = self._log.append(
                kind,
                step,
                scalars,
                payload.sections,
                durable_step=status.durable_step,
                rebases=rebases,
                drop=self._degrades,
            )
            if size is not None:
                written.append(size)
            return size is not None

        self._wait_until(fits, "staging memory")
        self.counters.staged_bytes += written[0]
        if self._log.dropped_step > dropped_before:
            self._note_dropped(max(dropped_before, self._status().durable_step))

    def stage_snapshot(
        self, step: int, tensors: Callable[[], Sequence[ImageTensor]], *, required: bool
    ) -> None:
        """Stage a full snapshot; waits for the one before it, whose memory it takes.

        Unless it is required, it is owed where it would stop training: with
        ``backpressure="degrade"`` instead of waiting, and when there is no memory for it.

        Raises:
            StorageError: If there is no memory for a required one.
        """
        is_busy = self._snapshot_step > self._status().durable_snapshot
        if self._degrades and is_busy and not required:
            self._owes_snapshot = True
            return
        self.wait_for_snapshot()
        with self.timed("snapshot_seconds"):
            try:
                size, checksum = stage_image(self._log.folder.snapshot, tensors())
            except StorageError as error:
                if required or self._settings.on_error == "raise":
                    raise
                self._owe_for(error)
                return
            self.stage(RecordKind.SNAPSHOT, step, encode_mark(size, checksum), Payload(()))
        self._snapshot_step = step
        self._owes_snapshot = False
        self.counters.snapshots += 1

    def owes_snapshot(self, step: int) -> bool:
        """Whether a snapshot that could not be taken should be tried now, after ``step``."""
        if not self._owes_snapshot:
            return False
        status = self._status()
        return (
            not status.error
            and status.durable_snapshot >= self._snapshot_step
            and status.durable_step >= step - 2 * self._settings.batch_size
        )

    @property
    def _degrades(self) -> bool:
        return self._settings.backpressure == "degrade"

    def _note_dropped(self, durable_step: int) -> None:
        """Steps after ``durable_step`` are gone; what follows needs a snapshot to be of use."""
        if not self._owes_snapshot:
            _logger.warning(
                "rank %d: storage is too slow and staging memory is full, so steps from %d on are "
                "given up; a full snapshot follows when storage is back",
                self._rank,
                durable_step + 1,
            )
        self._owes_snapshot = True
        self.counters.dropped_steps += self._log.dropped_step - durable_step

    def _owe_for(self, error: StorageError) -> None:
        if not self._owes_snapshot:
            _logger.warning("rank %d: no full snapshot now: %s", self._rank, error)
        self._owes_snapshot = True

    def wait_for_snapshot(self) -> None:
        """Wait until the last staged snapshot is durable."""
        self._wait_until(
            lambda status: status.durable_snapshot >= self._snapshot_step,
            f"the snapshot of step {self._snapshot_step} to be durable",
        )

    def wait_for_store(self, base_step: int) -> None:
        """Wait until all that training starts from is in the store, or the store is in trouble.

        Raises:
            WriterFailed: If ``on_error="raise"`` and it is in trouble.
        """
        self._wait_until(
            lambda status: (
                bool(status.remote_error)
                or (
                    status.remote_step >= base_step
                    and status.remote_snapshot >= self._snapshot_step
                )
            ),
            f"step {base_step} to be in {self._settings.store}",
        )

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
        while not condition(self._status()):
            time.sleep(_WAIT_SECONDS)
            now = time.perf_counter()
            if now - noticed > _NOTICE_SECONDS:
                noticed = now
                _logger.warning(
                    "rank %d: training has waited %.0f s for %s", self._rank, now - started, what
                )
        self.counters.waiting_seconds += time.perf_counter() - started

    def _status(self) -> WriterStatus:
        status = self.writer.status()
        if status.error and status.error != self._warned:
            if self._settings.on_error == "raise":
                raise WriterFailed(f"the writer of rank {self._rank} reports: {status.error}")
            _logger.warning(
                "rank %d: checkpoints are not durable now: %s; training goes on%s",
                self._rank,
                status.error,
                ""
                if self._degrades
                else f", and waits once {2 * self._settings.batch_size} steps are at risk",
            )
        self._warned = status.error
        if status.remote_error and status.remote_error != self._warned_of_store:
            if self._settings.on_error == "raise":
                raise WriterFailed(f"the writer of rank {self._rank}: {status.remote_error}")
            _logger.warning(
                "rank %d: nothing reaches the store now: %s; training goes on, and what is durable "
                "is uploaded later",
                self._rank,
                status.remote_error,
            )
        self._warned_of_store = status.remote_error
        return status
