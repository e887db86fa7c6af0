"""Full snapshots of one rank on their way from its own memory to staging."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lowdiff.commit.storage import Look, Trainer
from lowdiff.core import devices
from lowdiff.core.events import Code
from lowdiff.core.layout import is_dense, share_owners
from lowdiff.core.memory import byte_view
from lowdiff.core.nested import copied, each_tensor
from lowdiff.core.sums import unsigned
from lowdiff.core.sums.host import host_sum
from lowdiff.errors import StorageError
from lowdiff.model.binding import Attached
from lowdiff.model.sharding import local_of
from lowdiff.model.tracked import Live
from lowdiff.persistence.files.mapped_file import ImageMark
from lowdiff.persistence.format.image import (
    OPTIMIZER,
    PARAMETER,
    RESIDUAL,
    SCALARS,
    ImageFile,
    ImageTensor,
)
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

#: Of others the memory need not hold the values.
_READABLE = (torch.Tensor, torch.nn.Parameter)


class Images:
    """The full snapshots of one rank; one at a time lies in staging.

    Attributes:
        step: Step of the last snapshot that was taken, -1 before the first; it may be on its way from an accelerator.
        staged_step: Step of the last one that is staged.
        is_owed: Whether one could not be taken and should be.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.step = self.staged_step = -1
        self.is_owed = False
        self._trainer = trainer
        self._file = ImageFile(trainer.folder.snapshot)
        self._retry_step, self._retry_after = -1, 1

    @property
    def due_step(self) -> int:
        """Step of the last staged one that is to be durable: each, unless some are for memory alone."""
        return self.staged_step

    def begin(self, step: int, *, is_due: bool) -> None:
        """Note that a snapshot of a step is being taken, and whether it is to be durable."""
        self.step = step

    def write(self, tensors: Sequence[ImageTensor]) -> tuple[int, int]:
        """Copy a snapshot to where processes will look for it; returns its length and checksum. For any thread.

        Raises:
            StorageError: If there is no memory for it.
        """
        return self._file.stage(tensors, torch.get_num_threads())

    def show(self, size: int, checksum: int) -> ImageMark:
        """Tell the processes of the snapshot that was begun, and is whole."""
        mark = self._publish(size, checksum)
        self.staged_step = self.step
        self.is_owed = False
        self._retry_step, self._retry_after = -1, 1
        self._trainer.errors.of_snapshot = ""
        self._trainer.counters.snapshots += 1
        return mark

    def _publish(self, size: int, checksum: int) -> ImageMark:
        mark = ImageMark(self.step, size, checksum)
        self._trainer.page.update(image=mark)
        return mark

    def make_due(self) -> None:
        """Have the snapshot that was begun last become durable, if it was for memory alone."""

    def give_up(self) -> None:
        """Note that the snapshot that was begun does not come."""
        self.step = self.staged_step

    def begin_anew(self, durable_snapshot: int) -> None:
        """Owe a snapshot, because staging was removed, and with it one that is not durable."""
        self.step = self.staged_step = min(self.step, durable_snapshot)
        self.is_owed = True

    def release(self) -> None:
        """Keep none mapped: whoever removes its file has the memory back."""
        self._file.release()

    def is_ready(self, step: int, look: Look) -> bool:
        """Whether one after ``step`` finds its memory free, and the writer is well."""
        return self.may_retry(step) and not look.writer.error and self.is_free(look, is_due=True)

    def is_free(self, look: Look, *, is_due: bool) -> bool:
        """Whether the next one finds its memory free, as a look at storage says.

        Args:
            look: At storage.
            is_due: Whether the next one is to be durable.
        """
        return look.writer.durable_snapshot >= self.step

    def may_retry(self, step: int) -> bool:
        """Whether one that found no memory may be tried again after ``step``."""
        return step >= self._retry_step

    def owe_for(self, error: Exception, step: int) -> None:
        """Owe the snapshot of a step, which cannot be written now: there is no memory, or a device failed."""
        # Each try costs the ranks that have the memory a snapshot.
        self._retry_step = step + self._retry_after
        self._retry_after = min(2 * self._retry_after, self._trainer.settings.snapshot_every)
        if not self.is_owed:
            Code.SNAPSHOT_PUT_OFF.warn(f"no full snapshot now: {error}", rank=self._trainer.rank)
        self.is_owed = True
        self._trainer.errors.of_snapshot = str(error)


class Overwritten(Exception):
    """Something else than an optimizer wrote to a tensor while a snapshot was copied, so the copy is of no step.

    The argument names the tensor.
    """


@dataclass(frozen=True, slots=True, eq=False)
class Trailing:
    """Tensors of a snapshot that only an optimizer's next step writes, copied beside what the device does until then.

    Attributes:
        names: Of each.
        trail: Has them copied.
        sums: On their way: checksums that the device took when the snapshot was taken. Whatever else writes to the
            tensors does not hold the copy.
    """

    names: Sequence[str]
    trail: devices.Trail
    sums: devices.Fetch

    def arrived(self) -> dict[str, torch.Tensor]:
        """Return them on the CPU, by name, once they are here.

        Raises:
            Overwritten: If one is not as it was.
            StorageError: If the device fails meanwhile.
        """
        # First: as long as the device has not come to them, no piece would be done, and each pause would be long.
        (sums,) = self.sums.arrived()
        try:
            here = dict(zip(self.names, self.trail.arrived(), strict=True))
        except StorageError:
            if freed := self.trail.freed():
                raise Overwritten(self.names[freed[0]]) from None
            raise
        changed = self.changed(here, unsigned(sums))
        if changed:
            raise Overwritten(changed[0])
        return here

    def changed(self, here: Mapping[str, torch.Tensor], sums: Sequence[int]) -> list[str]:
        """Return the names of those whose copies have other checksums."""
        pairs = zip(here.items(), sums, strict=True)
        return [name for (name, host), number in pairs if host_sum(byte_view(host)) != number]


@dataclass(frozen=True, slots=True, eq=False)
class Share:
    """What one rank stores of a state, as it is when this is made; it may be on its way from an accelerator.

    Attributes:
        names: Of the tensors in the image.
        values: All else: groups, optimizer state, and which parameters the step's record holds.
        items: Items that are no tensors.
        leaving: The tensors of both, in this order, but those that trail.
        trailing: Those that are copied beside the next step; None where there are none.
    """

    names: Sequence[str]
    values: Sequence[Any]
    items: Mapping[str, bytes]
    leaving: devices.Leaving
    trailing: Trailing | None

    @property
    def travels(self) -> bool:
        """Whether any tensor comes from a device."""
        return self.leaving.travels or self.trailing is not None

    def hold(self) -> None:
        """Have the device copy what is left before it does what is queued from now on."""
        if self.trailing is not None:
            self.trailing.trail.hold()

    def images(self) -> list[ImageTensor]:
        """Return the tensors of the image; waits for what is on its way.

        Raises:
            Overwritten: If what trails was written by something else than an optimizer.
            StorageError: If a device fails meanwhile.
        """
        trailing = {} if self.trailing is None else self.trailing.arrived()
        arrived = iter(self.leaving.arrived())
        tensors = [
            (name, trailing[name] if name in trailing else next(arrived)) for name in self.names
        ]
        groups, state, held = each_tensor(
            self.values,
            lambda _, tensor: devices.belonging(next(arrived), devices.place_of(tensor)),
        )
        scalars = scalars_tensor(groups, state, held, dict(self.items))
        return image_tensors([*tensors, (SCALARS, scalars)])


def share_of(live: Live, sealed: Sealed, *, lasts: bool = False, trails: bool = False) -> Share:
    """Read everything that this rank stores of the current state, which is that of ``sealed``.

    Hyper-parameters are those that were sealed: a scheduler may have moved them since, at an epoch's
    end say.

    Args:
        live: The training.
        sealed: The step.
        lasts: Whether it may be read while training goes on: whatever travels is then read by another thread.
        trails: Whether what only optimizers write may be copied beside the next step; `Share.hold` is called before
            they do.
    """
    tracker = live.tracker
    # Tensor names hold the item's own prefix: "buffer/...", "frozen/..." or "tensor/...".
    tensors = {
        name: value
        for name, value in tracker.tensors.items()
        if not (live.shares_constants and tracker.is_as_started(name))
    }
    tensors |= {RESIDUAL + name: values for name, values in live.residual.named().items()}
    return _share(live, sealed, live.rank, tensors, tracker.committed, lasts=lasts, trails=trails)


def share_of_items(
    live: Live,
    sealed: Sealed,
    rank: int,
    items: Mapping[str, bytes],
    *,
    lasts: bool = False,
    trails: bool = False,
) -> Share:
    """Read what a rank would store of the current state; parameters and optimizer state are equal on all.

    Args:
        live: Any rank's training without error feedback.
        sealed: The step whose state it is.
        rank: Whose share.
        items: All items of that rank at that step; no bytes for one that is gone.
        lasts: See `share_of`.
        trails: See `share_of`.
    """
    tensors, values = {}, {}
    for name, data in items.items():
        if not name.startswith((BUFFER_ITEM, FROZEN_ITEM, TENSOR_ITEM)):
            values[name] = data
        elif data:
            tensors[name] = decode_item(name, data)
    kept = {name: data for name, data in values.items() if data}
    return _share(live, sealed, rank, tensors, kept, lasts=lasts, trails=trails)


def _share(
    live: Live,
    sealed: Sealed,
    rank: int,
    tensor_items: Mapping[str, torch.Tensor],
    items: Mapping[str, bytes],
    *,
    lasts: bool,
    trails: bool,
) -> Share:
    attached, averages = live.attached, live.averages.named_tensors()
    tensors: dict[str, torch.Tensor] = {}
    state: list[dict[str, dict[str, Any]]] = [{} for _ in attached.optimizers]
    owners = share_owners(attached.layout, live.world_size)
    for i, spec in enumerate(attached.layout.parameters):
        if owners[i] != rank:
            continue
        parameter = attached.parameters[i]
        tensors[PARAMETER + spec.name] = local_of(parameter)
        entries = attached.optimizers[attached.owner[i]].state.get(parameter, {})
        for key, value in entries.items():
            if is_full(key, value, parameter):
                name = f"{OPTIMIZER}{attached.owner[i]}/{spec.name}/{key}"
                tensors[name] = local_of(value)
            else:
                state[attached.owner[i]].setdefault(spec.name, {})[key] = value
        for name, followed in averages.items():
            if i in followed:
                tensors[f"{AVERAGE_ITEM}{name}/{spec.name}"] = followed[i]
    # Items do not trail: forward and backward passes write buffers and the residual.
    trailing = _trailing(live, tensors) if trails else None
    tensors |= tensor_items
    others: list[torch.Tensor] = []
    # An optimizer counts its steps in place, in tensors of one element, or keeps lists that grow.
    values = copied([[*sealed.groups], state, [*sealed.differential.held]])
    each_tensor(values, lambda _, tensor: others.append(tensor))
    apart = frozenset(() if trailing is None else trailing.names)
    whole = [tensor for name, tensor in tensors.items() if name not in apart]
    # A share that does not travel is read at once.
    lasts = lasts and (trailing is not None or any(map(devices.comes_late, [*whole, *others])))
    leaving = devices.leave([*whole, *others], lasts=lasts)
    return Share(tuple(tensors), values, dict(items), leaving, trailing)


def _trailing(live: Live, tensors: Mapping[str, torch.Tensor]) -> Trailing | None:
    """Have tensors trail that can, and can be summed as they lie; None where there are none."""
    device = live.attached.device
    if live.sums is None or not devices.copies_beside(device):
        return None
    chosen = {
        name: tensor
        for name, tensor in tensors.items()
        if tensor.device == device
        and tensor.numel()
        and type(tensor) in _READABLE
        and is_dense(tensor)
    }
    if not chosen:
        return None
    sums = devices.fetch([live.sums([*chosen.values()])])
    return Trailing(tuple(chosen), devices.Trail([*chosen.values()]), sums)


def constant_images(attached: Attached) -> list[ImageTensor]:
    """The frozen parameters, to be stored once for all snapshots."""
    return image_tensors(attached.frozen_parameters().items())


def is_full(key: str, value: Any, parameter: torch.Tensor) -> bool:
    """Whether a state entry has one element per element of its parameter: a tensor of a snapshot."""
    is_shaped = isinstance(value, torch.Tensor) and value.shape == parameter.shape
    return is_shaped and not is_scalar(key, parameter.numel())
