"""The queue of strategy survivors: no step is kept, only full snapshots are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from lowdiff.commit.storage import Images, Storage
from lowdiff.persistence.format.framing import RecordKind
from lowdiff.persistence.format.image import ImageTensor
from lowdiff.persistence.staging.status import WriterStatus
from lowdiff.types import Differential, Section


class SnapshotQueue:
    """Full snapshots alone; see `StepQueue`. What survivors save is not in it: see `Standby`.

    Args:
        storage: The writer.
    """

    logs_steps: ClassVar[bool] = False

    def __init__(self, storage: Storage) -> None:
        self.storage = storage
        self.images = Images(storage)
        self.makes_images = False

    @property
    def staged_checksum(self) -> int:
        """See `StepQueue`."""
        return 0

    @property
    def is_gone(self) -> bool:
        """See `StepQueue`."""
        storage = self.storage
        return not storage.folder.survivor_status.exists() or storage.has_lost_image

    @property
    def durable_step(self) -> int:
        """See `StepQueue`: a step is durable with the snapshot of it or a later one."""
        return self.storage.writer.read_status().unbroken_step

    @property
    def owes_snapshot(self) -> bool:
        """See `StepQueue`."""
        return self.images.is_owed

    def status(self) -> WriterStatus:
        """See `StepQueue`; an error that is news is said."""
        storage = self.storage
        status = storage.last = storage.writer.status()
        if not (status.error and self.is_gone):  # the next commit names the cause and cures it
            storage.errors.report(status, 2 * storage.settings.snapshot_every)
        return status

    def stage(self, kind: RecordKind, record: Differential, *, rebases: bool) -> None:
        """See `StepQueue`: nothing of a step is kept."""

    def stage_ahead(self, step: int, sections: Sequence[Section]) -> None:
        """See `StepQueue`: nothing of a step is kept."""

    def stage_snapshot(
        self, step: int, tensors: Callable[[], Sequence[ImageTensor]], *, required: bool
    ) -> None:
        """See `StepQueue`."""
        self.images.stage_behind_last(self, step, tensors, required=required)

    def is_ready_for_snapshot(self, step: int) -> bool:
        """See `StepQueue`."""
        return self.images.is_ready(step, self.status())

    def secure(self, step: int) -> int:
        """See `StepQueue`: what survivors save becomes durable by itself."""
        return step

    def wait_for_snapshot(self) -> None:
        """See `StepQueue`."""
        self.storage.wait_for_image(self, self.images.step)

    def begin_anew(self, step: int) -> None:
        """See `StepQueue`."""
        self.storage.begin_anew(step)
        self.images.begin_anew()

    def figures(self) -> dict[str, Any]:
        """See `StepQueue`."""
        return {}
