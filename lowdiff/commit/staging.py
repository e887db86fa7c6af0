"""Staging as the session uses it: filled with steps and snapshots, made anew where it was removed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch

from lowdiff.commit.agreement import RankNews
from lowdiff.commit.protection import Protection
from lowdiff.commit.run_lock import StagingArea
from lowdiff.commit.sinks import Ahead, Handed, Snapshot
from lowdiff.commit.storage import Look, Trainer
from lowdiff.core.events import Code
from lowdiff.core.layout import share_owners
from lowdiff.errors import StorageError
from lowdiff.model.binding import Attached
from lowdiff.model.sharding import local_of
from lowdiff.model.tracked import Live
from lowdiff.persistence.format.differentials import numbered
from lowdiff.persistence.format.image import OPTIMIZER, PARAMETER, RESIDUAL, SCALARS, ImageTensor
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


class Staging:
    """One rank's staging memory as training fills it: what is staged goes through all sinks, in one order.

    Large because all that is handed on passes here. Whatever finds that somebody removed it goes on: the next commit makes it anew.

    Args:
        area: The folder.
        trainer: This rank's training, whose measurements lie there.
        live: Its residual lies there as well.
        protection: Takes steps and images, its queue first.

    Attributes:
        protection: As given.
    """

    def __init__(
        self,
        area: StagingArea,
        trainer: Trainer,
        live: Live,
        protection: Protection,
    ) -> None:
        self.protection = protection
        self._area = area
        self._trainer = trainer
        self._live = live
        self._queue = protection.queue
        self._sinks = protection.sinks

    def is_gone(self, look: Look) -> bool:
        """Whether somebody removed or damaged the folder, or files of it."""
        return any(sink.is_gone(look) for sink in self._sinks)

    def owes_snapshot(self, look: Look) -> bool:
        """Whether a full snapshot should be taken, for whichever sink."""
        return any(sink.owes_snapshot(look) for sink in self._sinks)

    def news(self, step: int, look: Look) -> dict[str, Any]:
        """Return fields of `RankNews` that say how the sinks stand after a step."""
        news = {"owes_snapshot": self.owes_snapshot(look)}
        for sink in self._sinks:
            news |= sink.news(step, look)
        return news

    def hear(self, heard: Sequence[RankNews]) -> None:
        """Note what all ranks said after the step that was staged last."""
        for sink in self._sinks:
            sink.hear(heard)

    def keep_up(self, step: int) -> None:
        """Wait for what is too far behind the step that was staged last."""
        for sink in self._sinks:
            sink.keep_up(step)

    def items(self, step: int) -> Mapping[str, bytes] | None:
        """Return all items as of a step, however far the live ones have moved since; None if not kept.

        With error feedback a snapshot is never taken of them: its residual is in the live training alone.
        """
        if self._live.residual.layout.parameters:
            return None
        every = (sink.items(step) for sink in self._sinks)
        return next((items for items in every if items is not None), None)

    def show(self, step: int, committed_step: int, *, preempted: bool) -> None:
        """Tell all processes, and who watches the run, how far this rank is."""
        told = self._trainer.page.status.settled_step
        settled = [sink.show(step, committed_step, told) for sink in self._sinks]
        self._trainer.show(step, min(settled), preempted=preempted)

    def is_as_committed(self) -> bool:
        """Whether nothing wrote to what sinks would save, since the last commit."""
        return all(sink.is_as_committed() for sink in self._sinks)

    def renew(self, step: int) -> None:
        """Make the folder anew, after ``step``; a full snapshot is owed.

        Raises:
            StorageError: If it cannot be made.
        """
        try:
            self._renew(step)
        except (OSError, StorageError):  # whoever removes files may not have finished
            self._renew(step)
        durable_step = self.protection.storage.writer.read_status().durable_step
        root = self._trainer.folder.root
        Code.STAGING_REMOVED.warn(
            f"somebody removed or damaged {root}, or files in it, while training uses it: "
            f"{_lost(durable_step, step)}; it is made anew, and a full snapshot follows",
            rank=self._trainer.rank,
            step=step,
            durable_step=durable_step,
        )

    def _renew(self, step: int) -> None:
        self.protection.storage.end_processes()
        self._queue.images.release()
        self._area.make_anew()
        self._live.residual.move(self._area.folder.residual)
        self._trainer.meter.recorder.reopen()
        # The queue last: it starts the processes, which look for the rest.
        for sink in reversed(self._sinks):
            sink.begin_anew(step)

    def stage_base(self, base: Sealed) -> None:
        """Stage what an incarnation starts from, should it die in its first step."""
        handed = Handed(base, self._queue.attend())
        for sink in self._sinks:
            handed = sink.stage_base(handed)
        self._trainer.counters.staged_bytes += handed.staged_bytes

    def stage_ahead(self, step: int, reducer: Reducer, number: int) -> None:
        """Stage gradients before their optimizer's step ends, where that saves a copy."""
        with self._unless_gone():
            ahead = Ahead(step, number, (), None)
            if not self._queue.logs_steps:
                sections = numbered(reducer.payload().sections, number)
                ahead = Ahead(step, number, sections, reducer)
            for sink in reversed(self._sinks):
                sink.stage_ahead(ahead)

    def stage(self, sealed: Sealed, look: Look) -> Look:
        """Stage a step; returns the newest look at storage."""
        handed = Handed(sealed, look)
        with self._unless_gone():
            try:
                for sink in self._sinks:
                    handed = sink.stage(handed)
            finally:
                self._trainer.counters.staged_bytes += handed.staged_bytes
        return handed.look

    def snapshot(
        self, sealed: Sealed, look: Look, *, required: bool = False, waits: bool = False
    ) -> None:
        """Stage a snapshot of a sealed step, unless that was the last one staged.

        Args:
            sealed: The step; the live state must still be its state.
            look: At storage.
            required: Whether to wait for memory, and for the snapshot before.
            waits: Whether to wait until it is durable, unless ``backpressure="degrade"``.

        Raises:
            StorageError: If it is required and there is no memory for it.
        """
        step, images = sealed.differential.step, self._queue.images
        with nullcontext() if required else self._unless_gone():
            if images.step != step:
                items = self.items(step)
                tensors = partial(share_of, self._live, sealed)
                if items is not None:  # buffers may have moved on since
                    rank = self._live.rank
                    tensors = partial(share_of_items, self._live, sealed, rank, items)
                path = self._trainer.folder.snapshot
                snapshot = Snapshot(sealed, look, tensors, required, path)
                for sink in self._sinks:
                    snapshot = sink.snapshot(snapshot)
                look = snapshot.look
            if waits and not self._trainer.degrades:
                self._queue.wait_for_snapshot(look)

    @contextmanager
    def _unless_gone(self) -> Iterator[None]:
        try:
            yield
        except StorageError:
            if not self.is_gone(self._queue.look()):
                raise


def _lost(durable_step: int, step: int) -> str:
    if durable_step >= step:
        return f"every step up to {step} is durable"
    steps = f"step {step}" if durable_step + 1 == step else f"steps {durable_step + 1} to {step}"
    return f"{steps} cannot be recovered"


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
