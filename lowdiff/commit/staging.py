"""Staging as the session uses it: made anew where somebody removed it, and filled step by step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial

from lowdiff.commit.queue import StepQueue
from lowdiff.commit.run_lock import StagingArea
from lowdiff.commit.share import share_of
from lowdiff.errors import StorageError
from lowdiff.model.tracked import Live
from lowdiff.persistence.format.framing import RecordKind
from lowdiff.persistence.staging.measurements import Recorder as MeasurementRecorder
from lowdiff.protocols import Reducer
from lowdiff.step.states import Sealed


class Staging:
    """One rank's staging memory: residual, queue and image.

    Whatever finds that somebody removed it goes on: the next commit makes it anew.

    Args:
        area: The folder.
        queue: Takes steps and images.
        live: Its residual lies there.
        measurements: So do its measurements.
    """

    def __init__(
        self,
        area: StagingArea,
        queue: StepQueue,
        live: Live,
        measurements: MeasurementRecorder,
    ) -> None:
        self._area = area
        self._queue = queue
        self._live = live
        self._measurements = measurements

    @property
    def is_gone(self) -> bool:
        """Whether somebody removed the folder, or files of it."""
        return self._queue.is_gone

    def renew(self, step: int) -> None:
        """Make the folder anew, after ``step``; a full snapshot is owed.

        Raises:
            StorageError: If it cannot be made.
        """
        try:
            self._renew(step)
        except (OSError, StorageError):  # whoever removes files may not have finished
            self._renew(step)

    def _renew(self, step: int) -> None:
        self._queue.storage.end_processes()
        self._area.make_anew()
        self._live.residual.move(self._area.folder.residual)
        self._measurements.reopen()
        self._queue.begin_anew(step)

    def stage_base(self, base: Sealed) -> None:
        """Name the residual that an incarnation starts from, should it die in its first step."""
        record = replace(base.differential, held=())
        self._queue.stage(RecordKind.BASE, record, rebases=False)

    def stage_ahead(self, step: int, reducer: Reducer, number: int) -> None:
        """Stage gradients before their optimizer's step ends; see `StepQueue`."""
        with self._unless_gone():
            self._queue.stage_ahead(step, reducer, number)

    def stage(self, sealed: Sealed) -> None:
        """Stage a step's record."""
        record = sealed.differential
        with self._unless_gone():
            self._queue.stage(RecordKind.DIFFERENTIAL, record, rebases=sealed.rebases)

    def snapshot(self, sealed: Sealed, *, required: bool = False, waits: bool = False) -> None:
        """Stage a snapshot of a sealed step, unless that was the last one staged.

        Args:
            sealed: The step; the live state must still be its state.
            required: Whether to wait for memory, and for the snapshot before.
            waits: Whether to wait until it is durable, unless ``backpressure="degrade"``.

        Raises:
            StorageError: If it is required and there is no memory for it.
        """
        step = sealed.differential.step
        with nullcontext() if required else self._unless_gone():
            if self._queue.images.step != step:
                tensors = partial(share_of, self._live, sealed)
                self._queue.stage_snapshot(step, tensors, required=required)
            if waits and not self._queue.storage.degrades:
                self._queue.wait_for_snapshot()

    @contextmanager
    def _unless_gone(self) -> Iterator[None]:
        try:
            yield
        except StorageError:
            if not self._queue.is_gone:
                raise
