"""Staging with back-pressure: what the training thread hands to the writer, and waits for."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from lowdiff.errors import WriterFailed
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

        Raises:
            WriterFailed: If ``on_error="raise"`` and the writer reports trouble.
        """
        if kind is RecordKind.DIFFERENTIAL:
            limit = step - 2 * self._settings.batch_size
            self._wait_until(
                lambda status: status.durable_step >= limit, f"step {limit} to be durable"
            )
        written: list[int] = []

        def fits(status: WriterStatus) -> bool:
            size = self._log.append(
                kind,
                step,
                scalars,
                payload.sections,
                durable_step=status.durable_step,
                rebases=rebases,
            )
            if size is not None:
                written.append(size)
            return size is not None

        self._wait_until(fits, "staging memory")
        self.counters.staged_bytes += written[0]

    def stage_snapshot(self, step: int, tensors: Callable[[], Sequence[ImageTensor]]) -> None:
        """Stage a full snapshot; waits for the one before it, whose memory it takes."""
        self.wait_for_snapshot()
        with self.timed("snapshot_seconds"):
            size, checksum = stage_image(self._log.folder.snapshot, tensors())
            self.stage(RecordKind.SNAPSHOT, step, encode_mark(size, checksum), Payload(()))
        self._snapshot_step = step
        self.counters.snapshots += 1

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
                "rank %d: checkpoints are not durable now: %s; training goes on, and waits once "
                "%d steps are at risk",
                self._rank,
                status.error,
                2 * self._settings.batch_size,
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
