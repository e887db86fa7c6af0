"""Staging as the session uses it: filled with steps and snapshots, made anew where it was removed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch

from lowdiff.commit.agreement import RankNews
from lowdiff.commit.queue import StepQueue
from lowdiff.commit.run_lock import StagingArea
from lowdiff.commit.standby import Standby
from lowdiff.core.layout import share_owners
from lowdiff.errors import StorageError
from lowdiff.model.binding import Attached
from lowdiff.model.sharding import local_of
from lowdiff.model.tracked import Live
from lowdiff.persistence.files.mapped_file import ImageMark
from lowdiff.persistence.format.differentials import numbered
from lowdiff.persistence.format.framing import RecordKind
from lowdiff.persistence.format.image import OPTIMIZER, PARAMETER, RESIDUAL, SCALARS, ImageTensor
from lowdiff.persistence.staging.measurements import Recorder as MeasurementRecorder
from lowdiff.protocols import Reducer
from lowdiff.recovery.images import image_tensors, scalars_tensor
from lowdiff.recovery.state import (
    AVERAGE_ITEM,
    BUFFER_ITEM,
    FROZEN_ITEM,
    TENSOR_ITEM,
    decode_item,
    is_scalar,
)
from lowdiff.step.states import Sealed
from lowdiff.types import Section


class Copies(Protocol):
    """Copies that ranks keep for each other in the memory of several nodes."""

    @property
    def held_step(self) -> int:
        """The newest step of which this rank holds all that it keeps; see `RankNews`."""
        ...

    @property
    def copied_step(self) -> int:
        """The newest step of which it holds the images; see `RankNews`."""
        ...

    @property
    def owes_snapshot(self) -> bool:
        """Whether only a snapshot makes further copies of use."""
        ...

    def stage_base(self, sealed: Sealed) -> None:
        """Tell what an incarnation begins with; its first snapshot follows."""
        ...

    def stage_ahead(self, own: Sequence[Section], reducer: Reducer, number: int) -> None:
        """Keep what an optimizer is about to use, of this rank's share and of those of others."""
        ...

    def stage(self, sealed: Sealed, checksum: int) -> None:
        """Tell what this rank alone has of a step, and keep what others store of it."""
        ...

    def show(self, step: int, committed_step: int, told_step: int) -> int:
        """Tell replicas of others how far all ranks are; returns to which step replicas may go on."""
        ...

    def begin_anew(self) -> None:
        """Make the folders again after somebody removed staging."""
        ...

    def snapshot(self, sealed: Sealed, path: Path, mark: ImageMark) -> None:
        """Send this rank's share of a snapshot where it is nowhere else, and make the shares of others."""
        ...

    def keep_up(self, step: int) -> None:
        """Wait where what is kept of a state is too far behind."""
        ...

    def hear(self, heard: Sequence[RankNews]) -> None:
        """Note what all ranks hold."""
        ...


class Staging:
    """One rank's staging memory: residual, queue and image.

    Whatever finds that somebody removed it goes on: the next commit makes it anew. Large because all that is
    kept of a step passes here, in one order.

    Args:
        area: The folder.
        queue: Takes steps and images.
        live: Its residual lies there.
        measurements: So do its measurements.
        standby: Keeps the items of its last two steps for survivors; None where nobody would save it.
        copies: On other nodes; None where there are none.
    """

    def __init__(
        self,
        area: StagingArea,
        queue: StepQueue,
        live: Live,
        measurements: MeasurementRecorder,
        standby: Standby | None,
        copies: Copies | None,
    ) -> None:
        self._area = area
        self._queue = queue
        self._live = live
        self._measurements = measurements
        self._standby = standby
        self._copies = copies

    @property
    def is_gone(self) -> bool:
        """Whether somebody removed or damaged the folder, or files of it."""
        return self._queue.is_gone or (self._standby is not None and self._standby.is_gone)

    @property
    def item_sums(self) -> tuple[int, int, int]:
        """Checksums of generators, of buffers and of other items as staged last; 0 where not compared."""
        return (0, 0, 0) if self._standby is None else self._standby.sums

    @property
    def copied_steps(self) -> tuple[int, int]:
        """The newest steps of which this rank holds what it keeps for others, and the images; see `RankNews`."""
        return (
            (-1, -1) if self._copies is None else (self._copies.held_step, self._copies.copied_step)
        )

    @property
    def owes_snapshot(self) -> bool:
        """Whether a full snapshot should be taken, for this rank's own sake or for its copies."""
        return self._queue.owes_snapshot or (
            self._copies is not None and self._copies.owes_snapshot
        )

    def keep_up(self, step: int) -> None:
        """Wait for copies that are too far behind the step that was staged last."""
        if self._copies is not None:
            with self._queue.storage.counters.waiting():
                self._copies.keep_up(step)

    def hear(self, heard: Sequence[RankNews]) -> None:
        """Note what all ranks hold of the step that was staged last."""
        if self._copies is not None:
            self._copies.hear(heard)

    def items(self, step: int) -> Mapping[str, bytes] | None:
        """Return all items as of a step, however far the live ones have moved since; None if not kept.

        With error feedback a snapshot is never taken of them: its residual is in the live training alone.
        """
        if self._standby is None or self._live.residual.layout.parameters:
            return None
        return self._standby.items(step)

    def show(self, step: int, committed_step: int, *, preempted: bool) -> None:
        """Tell all processes, and who watches the run, how far this rank is."""
        storage, settled = self._queue.storage, committed_step
        if self._copies is not None:
            settled = self._copies.show(step, committed_step, storage.page.status.settled_step)
        storage.show(step, settled, committed_step, preempted=preempted)

    def is_as_committed(self) -> bool:
        """Whether nothing wrote to what survivors would save, since the last commit; see `Standby`."""
        return self._standby is None or self._standby.is_as_committed()

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
        if self._standby is not None:
            self._standby.begin_anew()
        if self._copies is not None:
            self._copies.begin_anew()
        self._queue.begin_anew(step)

    def stage_base(self, base: Sealed) -> None:
        """Name the residual that an incarnation starts from, should it die in its first step."""
        record = replace(base.differential, held=())
        self._queue.stage(RecordKind.BASE, record, rebases=False)
        if self._standby is not None:
            self._standby.stage_base(record)
        if self._copies is not None:
            self._copies.stage_base(base)

    def stage_ahead(self, step: int, reducer: Reducer, number: int) -> None:
        """Stage gradients before their optimizer's step ends; see `StepQueue`."""
        with self._unless_gone():
            if not self._queue.logs_steps:
                own = numbered(reducer.payload().sections, number)
                if self._copies is not None:
                    self._copies.stage_ahead(own, reducer, number)
                self._queue.stage_ahead(step, own)
            if self._standby is not None:
                self._standby.stage_ahead(step)

    def stage(self, sealed: Sealed) -> None:
        """Stage a step's record."""
        record = sealed.differential
        with self._unless_gone():
            self._queue.stage(RecordKind.DIFFERENTIAL, record, rebases=sealed.rebases)
            if self._standby is not None:
                self._queue.storage.counters.staged_bytes += self._standby.stage(record)
            if self._copies is not None:
                self._copies.stage(sealed, self._queue.staged_checksum)

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
                items = self.items(step)
                if items is None:
                    tensors = partial(share_of, self._live, sealed)
                else:  # buffers may have moved on since
                    rank = self._live.rank
                    tensors = partial(share_of_items, self._live, sealed, rank, items)
                self._queue.stage_snapshot(step, tensors, required=required)
                if self._copies is not None and self._queue.images.step == step:
                    storage = self._queue.storage
                    mark = storage.page.status.image
                    assert mark is not None
                    self._copies.snapshot(sealed, storage.folder.snapshot, mark)
            if waits and not self._queue.storage.degrades:
                self._queue.wait_for_snapshot()

    @contextmanager
    def _unless_gone(self) -> Iterator[None]:
        try:
            yield
        except StorageError:
            if not self.is_gone:
                raise


def share_of(live: Live, sealed: Sealed) -> list[ImageTensor]:
    """Read everything that this rank stores of the current state, which is that of ``sealed``.

    Hyper-parameters are those that were sealed: a scheduler may have moved them since, at an epoch's
    end say.
    """
    tracker = live.tracker
    # Tensor names hold the item's own prefix: "buffer/...", "frozen/..." or "tensor/...".
    tensors = {
        name: value
        for name, value in tracker.tensors.items()
        if not (live.shares_constants and tracker.is_as_started(name))
    }
    tensors |= {RESIDUAL + name: values for name, values in live.residual.named().items()}
    return _share(live, sealed, live.rank, tensors, tracker.committed)


def share_of_items(
    live: Live, sealed: Sealed, rank: int, items: Mapping[str, bytes]
) -> list[ImageTensor]:
    """Read what a rank would store of the current state; parameters and optimizer state are equal on all.

    Args:
        live: Any rank's training without error feedback.
        sealed: The step whose state it is.
        rank: Whose share.
        items: All items of that rank at that step; no bytes for one that is gone.
    """
    tensors, values = {}, {}
    for name, data in items.items():
        if not name.startswith((BUFFER_ITEM, FROZEN_ITEM, TENSOR_ITEM)):
            values[name] = data
        elif data:
            tensors[name] = decode_item(name, data)
    return _share(
        live, sealed, rank, tensors, {name: data for name, data in values.items() if data}
    )


def _share(
    live: Live,
    sealed: Sealed,
    rank: int,
    tensor_items: Mapping[str, torch.Tensor],
    items: Mapping[str, bytes],
) -> list[ImageTensor]:
    attached, averages = live.attached, live.averages.named_tensors()
    tensors: list[tuple[str, torch.Tensor]] = []
    state: list[dict[str, dict[str, Any]]] = [{} for _ in attached.optimizers]
    owners = share_owners(attached.layout, live.world_size)
    for i, spec in enumerate(attached.layout.parameters):
        if owners[i] != rank:
            continue
        parameter = attached.parameters[i]
        tensors.append((PARAMETER + spec.name, local_of(parameter)))
        entries = attached.optimizers[attached.owner[i]].state.get(parameter, {})
        for key, value in entries.items():
            if is_full(key, value, parameter):
                name = f"{OPTIMIZER}{attached.owner[i]}/{spec.name}/{key}"
                tensors.append((name, local_of(value)))
            else:
                state[attached.owner[i]].setdefault(spec.name, {})[key] = value
        tensors += [
            (f"{AVERAGE_ITEM}{name}/{spec.name}", values[i])
            for name, values in averages.items()
            if i in values
        ]
    tensors += tensor_items.items()
    groups, held = [list(own) for own in sealed.groups], list(sealed.differential.held)
    tensors.append((SCALARS, scalars_tensor(groups, state, held, dict(items))))
    return image_tensors(tensors)


def constant_images(attached: Attached) -> list[ImageTensor]:
    """The frozen parameters, to be stored once for all snapshots."""
    return image_tensors(attached.frozen_parameters().items())


def is_full(key: str, value: Any, parameter: torch.Tensor) -> bool:
    """Whether a state entry has one element per element of its parameter: a tensor of a snapshot."""
    is_shaped = isinstance(value, torch.Tensor) and value.shape == parameter.shape
    return is_shaped and not is_scalar(key, parameter.numel())
