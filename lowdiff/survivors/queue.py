"""The queue of strategy survivors: no step is kept, only the items as of the last two steps."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter
from typing import Any, ClassVar

import torch

from lowdiff.commit.agreement import RankNews
from lowdiff.commit.storage import Images, Storage
from lowdiff.core.events import Code
from lowdiff.errors import StorageError
from lowdiff.model.items import FrozenSamples
from lowdiff.model.tracked import Live
from lowdiff.persistence.files.mapped_file import MappedFile
from lowdiff.persistence.format.framing import RecordKind
from lowdiff.persistence.format.image import ImageTensor
from lowdiff.persistence.format.values import encode
from lowdiff.persistence.staging.items import StagedItems, read_items
from lowdiff.persistence.staging.status import StatusPage, SurvivorStatus, WriterStatus
from lowdiff.protocols import Reducer
from lowdiff.recovery.replica.inheritance import ItemSums, alike_bits
from lowdiff.types import Differential

#: An item of more bytes that has not changed for some steps is not written again.
_LARGE_BYTES, _SETTLED_STEPS = 1 << 16, 3
_place, _written = torch.Tensor.data_ptr, attrgetter("_version")
#: Parameters of which a few elements are compared.
_NUM_SAMPLED = 16


@dataclass(frozen=True, slots=True)
class Node:
    """The ranks that share this rank's staging root, and all others.

    Attributes:
        first: Lowest rank of the node: what is saved for ranks on other nodes lies in its staging folder.
        others: Ranks on other nodes.
    """

    first: int
    others: tuple[int, ...]


class SurvivorsQueue:
    """Items for whoever saves the state after a failure, and full snapshots; see `StepQueue`.

    Large because it is all of `StepQueue`.

    Args:
        storage: The writer.
        live: The training.
        image_bytes: Memory to set aside for what a survivor saves.
        node: For which ranks on other nodes as well.

    Attributes:
        page: What this rank's survivor tells the others.
        node: As given.
    """

    logs_steps: ClassVar[bool] = False

    page: StatusPage[SurvivorStatus]

    def __init__(self, storage: Storage, live: Live, image_bytes: int, node: Node) -> None:
        self.storage = storage
        self.images = Images(storage)
        self.makes_images = False
        self._live = live
        self._image_bytes = image_bytes
        self.node = node
        self._sums, self._alike = ItemSums(), 0
        self._items: StagedItems | None = None
        #: Items that changed since the incarnation began, as of the last step.
        self._changed: dict[str, bytes] = {}
        self._changed_at: dict[str, int] = {}
        self._ahead_step = self._calls = -1
        self._samples = FrozenSamples()
        parameters = live.attached.parameters
        self._sampled = [p for p in parameters if p.numel()][:: len(parameters) // _NUM_SAMPLED + 1]
        self._telling = threading.Lock()
        self._seen = self._look()
        #: Whether items of the last step found no memory.
        self._is_failing = False
        self._set_aside()

    @property
    def is_gone(self) -> bool:
        """See `StepQueue`."""
        folder = self.storage.folder
        return self._items is not None and not (
            folder.items(0).exists() and folder.survivor_status.exists()
        )

    @property
    def item_sums(self) -> tuple[int, int, int]:
        """See `StepQueue`."""
        return self._sums.by_kind

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
        """See `StepQueue`: stages the items of the record alone, and goes on where they find no memory."""
        self._seen = self._look()
        self._samples.note_all({str(id(parameter)): parameter for parameter in self._sampled})
        if self.page.status.ready_step >= 0:  # a failure that was none
            self.tell(ready_step=-1)
        try:
            self._put(record, is_first=kind is RecordKind.BASE)
        except StorageError as error:
            if kind is RecordKind.BASE or self.is_gone:
                raise
            if not self._is_failing:
                text = f"no state could be saved after a failure now: {error}"
                Code.ITEMS_NOT_STAGED.warn(text, rank=self._live.rank, step=record.step)
            self._is_failing = True

    def _put(self, record: Differential, *, is_first: bool) -> None:
        if is_first or self._items is None or self._is_failing:
            items = self._all_items()
            self._items = StagedItems(self.storage.folder, items)
            self._changed, self._changed_at = {}, {}
            self._sums.update(items)
        self._changed.update(record.items)
        self._changed_at.update(dict.fromkeys(record.items, record.step))
        self._settle(record.step)
        self._sums.update(record.items)
        self.storage.counters.staged_bytes += self._items.put(
            record.step, self._changed, self._alike
        )
        self._is_failing = False

    def _settle(self, step: int) -> None:
        """Write a large item that has not changed for some steps with those of the beginning, and then no more."""
        settled = {
            name: self._changed[name]
            for name, at in self._changed_at.items()
            if at < step - _SETTLED_STEPS and len(self._changed[name]) > _LARGE_BYTES
        }
        if settled and self._items is not None:
            self._items.rebase(settled)
            for name in settled:
                del self._changed[name], self._changed_at[name]

    def hear(self, heard: Sequence[RankNews]) -> None:
        """See `StepQueue`: which kinds of items all ranks have alike."""
        self._alike = alike_bits([(news.generators, news.buffers, news.objects) for news in heard])

    def stage_ahead(self, step: int, reducer: Reducer, number: int) -> None:
        """See `StepQueue`: no gradients, but the items that change, as they are now."""
        if self._items is not None:
            self._calls = self._calls + 1 if step == self._ahead_step else 0
            self._ahead_step = step
            with suppress(StorageError):  # that of the step itself, which follows, is said
                ahead = self._live.tracker.peek(self._changed.keys())
                self._items.put_ahead(step, ahead, self._calls)

    def stage_snapshot(
        self, step: int, tensors: Callable[[], Sequence[ImageTensor]], *, required: bool
    ) -> None:
        """See `StepQueue`."""
        self.images.stage_behind_last(self, step, tensors, required=required)

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
        self.images.begin_anew()
        self._items = None
        self._set_aside()

    def figures(self) -> dict[str, Any]:
        """See `StepQueue`."""
        return {}

    def is_as_committed(self) -> bool:
        """Whether nothing has replaced or written what is saved since the last commit; for any thread.

        Parameters, averages and optimizer state, by their memory and version counters, and some elements of
        some parameters: averaged weights that are put in through ``.data`` are seen, a write to a part is not.
        """
        if self._is_failing or self._look() != self._seen:
            return False
        return not self._samples.have_moved([str(id(parameter)) for parameter in self._sampled])

    def items(self, step: int) -> Mapping[str, bytes] | None:
        """See `StepQueue`."""
        return read_items(self.storage.folder, step)

    def tell(self, **changes: object) -> None:
        """Publish what this rank's survivor knows; for any thread."""
        with self._telling:
            self.page.update(**changes)

    def _set_aside(self) -> None:
        folder = self.storage.folder
        MappedFile(folder.survivor_image, self._image_bytes)
        for rank in self.node.others if self.node.first == self._live.rank else ():
            MappedFile(folder.guest(rank), self._image_bytes)
        self.page = StatusPage(folder.survivor_status, SurvivorStatus(time.time()))

    def _look(self) -> list[object]:
        """Return the place of every tensor that is saved, how often it was written, and all else in optimizers."""
        live = self._live
        values: list[Any] = []
        for optimizer in live.attached.optimizers:
            for entry in list(optimizer.state.values()):
                values += entry.values()
        averages = live.averages.named_tensors().values()
        tensors = [
            *live.attached.parameters,
            *(value for value in values if isinstance(value, torch.Tensor)),
            *chain.from_iterable(own.values() for own in averages),
        ]
        others = (value for value in values if not isinstance(value, torch.Tensor))
        plain = (value if isinstance(value, int | float) else id(value) for value in others)
        return [*map(_place, tensors), *map(_written, tensors), *plain]

    def _all_items(self) -> dict[str, bytes]:
        """Every item as it is now, but frozen parameters that all snapshots share."""
        live, tracker = self._live, self._live.tracker
        tensors = {
            name: encode(tensor.detach().cpu().contiguous(), name=name)
            for name, tensor in tracker.tensors.items()
            if not (live.shares_constants and tracker.is_as_started(name))
        }
        return {**tracker.committed, **tensors}
