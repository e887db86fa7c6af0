"""Things that the ranks that live need after a failure: items as of the last two steps, and a look at the rest.

Parameters and optimizer state are in every rank's own memory. What is staged in each step is only what one
rank alone has (`lowdiff.persistence.staging.items`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from operator import attrgetter
from typing import Any

import torch

from lowdiff.commit.sinks import Ahead, Handed, Sink
from lowdiff.commit.storage import Look
from lowdiff.core import devices
from lowdiff.core.events import Code
from lowdiff.core.placement import Node
from lowdiff.errors import StorageError
from lowdiff.model.item_tensors import FrozenSamples
from lowdiff.model.tracked import Live
from lowdiff.persistence.files.mapped_file import MappedFile
from lowdiff.persistence.files.paths import StagingFolder
from lowdiff.persistence.staging.items import StagedItems, read_items
from lowdiff.persistence.staging.status import StatusPage, SurvivorStatus
from lowdiff.recovery.sources.inheritance import ItemSums

_place, _written = torch.Tensor.data_ptr, attrgetter("_version")
#: Parameters of which a few elements are compared.
_NUM_SAMPLED = 16


class Standby(Sink):
    """One rank's items in staging, for whoever saves its state after a failure.

    Large because what is staged and what is compared with it are one state.

    Args:
        folder: The rank's staging folder.
        live: The training.
        node: For which ranks on other nodes a share may have to be saved here.
        image_bytes: Memory to set aside for each share that is saved.

    Attributes:
        page: What this rank's survivor tells the others.
        node: As given.
    """

    page: StatusPage[SurvivorStatus]

    def __init__(self, folder: StagingFolder, live: Live, node: Node, image_bytes: int) -> None:
        self._folder = folder
        self._live = live
        self.node = node
        self._image_bytes = image_bytes
        self._sums = ItemSums()
        self._items: StagedItems | None = None
        self._ahead_step = self._calls = -1
        self._samples = FrozenSamples()
        parameters = live.attached.parameters.values()
        self._sampled = [p for p in parameters if p.numel()][:: len(parameters) // _NUM_SAMPLED + 1]
        self._telling = threading.Lock()
        self._seen = self._look()
        #: Whether items of the last step found no memory.
        self._is_failing = False
        self._set_aside()

    def is_gone(self, look: Look) -> bool:
        """See `Sink`."""
        folder = self._folder
        return self._items is not None and not (
            folder.items(0).exists() and folder.survivor_status.exists()
        )

    def stage_base(self, base: Handed) -> Handed:
        """See `Sink`: all items as the incarnation begins with them."""
        self._items = None
        self._note_live()
        self._put(base)
        return base

    def stage(self, handed: Handed) -> Handed:
        """See `Sink`: the items of the step; training goes on where they find no memory.

        An accelerator is waited for: the live state must be that of the step as soon as somebody may save it.
        """
        devices.settle(self._live.attached.device)
        self._note_live()
        if self.page.status.ready_step >= 0:  # a failure that was none
            self.tell(ready_step=-1)
        try:
            return self._put(handed)
        except StorageError as error:
            if self.is_gone(handed.look):
                raise
            if not self._is_failing:
                text = f"no state could be saved after a failure now: {error}"
                step = handed.sealed.differential.step
                Code.ITEMS_NOT_STAGED.warn(text, rank=self._live.rank, step=step)
            self._is_failing = True
            return handed

    def stage_ahead(self, ahead: Ahead) -> None:
        """See `Sink`: the items that change, as they are before an optimizer makes the step."""
        if self._items is not None:
            self._calls = self._calls + 1 if ahead.step == self._ahead_step else 0
            self._ahead_step = ahead.step
            with suppress(StorageError):  # that of the step itself, which follows, is said
                changing = self._live.tracker.peek(self._items.changing)
                self._items.put_ahead(ahead.step, changing, self._calls)

    def news(self, step: int, look: Look) -> dict[str, Any]:
        """See `Sink`: checksums of the items as staged last."""
        generators, buffers, objects = self._sums.by_kind
        return {"generators": generators, "buffers": buffers, "objects": objects}

    def items(self, step: int) -> Mapping[str, bytes] | None:
        """See `Sink`: those of the last two steps."""
        return read_items(self._folder, step)

    def is_as_committed(self) -> bool:
        """Whether nothing has replaced or written what is saved since the last commit; for any thread.

        Parameters, averages and optimizer state, by their memory and version counters, and some elements of
        some parameters: averaged weights that are put in through ``.data`` are seen, a write to a part is not.
        """
        if self._is_failing or self._look() != self._seen:
            return False
        return not self._samples.have_moved([str(id(parameter)) for parameter in self._sampled])

    def tell(self, **changes: object) -> None:
        """Publish what this rank's survivor knows; for any thread."""
        with self._telling:
            self.page.update(**changes)

    def begin_anew(self, step: int) -> None:
        """See `Sink`: the items of the next step are all there are."""
        self._items = None
        self._set_aside()

    def _note_live(self) -> None:
        self._seen = self._look()
        self._samples.note_all({str(id(parameter)): parameter for parameter in self._sampled})

    def _put(self, handed: Handed) -> Handed:
        record = handed.sealed.differential
        # First, because staging may fail: other ranks must not take old checksums for those of the step.
        self._sums.update(record.items)
        if self._items is None or self._is_failing:
            items = self._live.all_items()
            self._sums.update(items)
            self._items = StagedItems(self._folder, items)
        size = self._items.stage(record.step, record.items)
        self._is_failing = False
        return replace(handed, staged_bytes=handed.staged_bytes + size)

    def _set_aside(self) -> None:
        folder = self._folder
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
            *live.attached.parameters.values(),
            *(value for value in values if isinstance(value, torch.Tensor)),
            *chain.from_iterable(own.values() for own in averages),
        ]
        others = (value for value in values if not isinstance(value, torch.Tensor))
        plain = (value if isinstance(value, int | float) else id(value) for value in others)
        return [*map(_place, tensors), *map(_written, tensors), *plain]
