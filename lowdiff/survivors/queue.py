"""The queue of strategy survivors: no step is kept, only the items as of the last two steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from lowdiff.commit.storage import Images, Storage
from lowdiff.model.tracked import Live
from lowdiff.persistence.files.mapped_file import MappedFile
from lowdiff.persistence.format.framing import RecordKind
from lowdiff.persistence.format.image import ImageTensor
from lowdiff.persistence.format.values import encode
from lowdiff.persistence.staging.items import StagedItems
from lowdiff.persistence.staging.status import StatusPage, SurvivorStatus, WriterStatus
from lowdiff.protocols import Reducer
from lowdiff.types import Differential


class SurvivorsQueue:
    """Items for whoever saves the state after a failure, and full snapshots; see `StepQueue`.

    Large because it is all of `StepQueue`.

    Args:
        storage: The writer.
        live: The training.
        image_bytes: Memory to set aside for what a survivor saves.

    Attributes:
        page: What this rank's survivor tells the others.
    """

    logs_steps: ClassVar[bool] = False

    page: StatusPage[SurvivorStatus]

    def __init__(self, storage: Storage, live: Live, image_bytes: int) -> None:
        self.storage = storage
        self.images = Images(storage)
        self.makes_images = False
        self._live = live
        self._image_bytes = image_bytes
        self._items: StagedItems | None = None
        #: Items that changed since the incarnation began, as of the last step.
        self._changed: dict[str, bytes] = {}
        self._parameters = self._look()
        self._set_aside()

    @property
    def is_gone(self) -> bool:
        """See `StepQueue`."""
        folder = self.storage.folder
        return self._items is not None and not (
            folder.items(0).exists() and folder.survivor_status.exists()
        )

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

    def stage(
        self,
        kind: RecordKind,
        record: Differential,
        *,
        rebases: bool,
    ) -> None:
        """See `StepQueue`: stages the items of the record alone."""
        if kind is RecordKind.BASE or self._items is None:
            self._items = StagedItems(self.storage.folder, self._all_items())
            self._changed = {}
        self._parameters = self._look()
        self._changed.update(record.items)
        self.storage.counters.staged_bytes += self._items.put(record.step, self._changed)

    def stage_ahead(self, step: int, reducer: Reducer, number: int) -> None:
        """See `StepQueue`: no gradients, but the items that change, as they are now."""
        if self._items is not None:
            self._items.put_ahead(step, self._live.tracker.peek(self._changed.keys()))

    def stage_snapshot(
        self, step: int, tensors: Callable[[], Sequence[ImageTensor]], *, required: bool
    ) -> None:
        """See `StepQueue`."""
        is_busy = self.status().durable_snapshot < self.images.step
        if self.storage.degrades and is_busy and not required:
            self.images.is_owed = True
            return
        self.wait_for_snapshot()
        self.images.stage(step, tensors, required=required)

    def is_ready_for_snapshot(self, step: int) -> bool:
        """See `StepQueue`."""
        status = self.status()
        return (
            self.images.may_retry(step)
            and not status.error
            and status.durable_snapshot >= self.images.step
        )

    def wait_for_snapshot(self) -> None:
        """See `StepQueue`."""
        self.storage.wait_for_image(self, self.images.step)

    def begin_anew(self, step: int) -> None:
        """See `StepQueue`: the items of the step that is committed next are all there are."""
        self.storage.begin_anew(step)
        self.images.step = min(self.images.step, self.storage.writer.read_status().durable_snapshot)
        self.images.is_owed = True
        self._items = None
        self._set_aside()

    def figures(self) -> dict[str, Any]:
        """See `StepQueue`."""
        return {}

    def has_same_parameters(self) -> bool:
        """Whether nothing has replaced or written parameters since the last commit; for any thread.

        By their memory and version counters: what is written through ``.data`` in place is not seen.
        """
        return self._look() == self._parameters

    def _set_aside(self) -> None:
        folder = self.storage.folder
        MappedFile(folder.survivor_image, self._image_bytes)
        self.page = StatusPage(folder.survivor_status, SurvivorStatus(time.time()))

    def _look(self) -> list[tuple[int, int]]:
        return [(p.data_ptr(), p._version) for p in self._live.attached.parameters]

    def _all_items(self) -> dict[str, bytes]:
        """Every item as it is now, but frozen parameters that all snapshots share."""
        live, tracker = self._live, self._live.tracker
        tensors = {
            name: encode(tensor.detach().cpu().contiguous(), name=name)
            for name, tensor in tracker.tensors.items()
            if not (live.shares_constants and tracker.is_as_started(name))
        }
        return {**tracker.committed, **tensors}
