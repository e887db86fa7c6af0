"""Rolling snapshots in the live run: after each step of a cycle the next slice is copied.

A cycle ends at a multiple of ``snapshot_every``, so that the cycles of all ranks end together,
whenever each began. It copies what an atomic snapshot of its last step would hold of this rank's
share, but each block as of its own step; what is small is as of the last step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch

from lowdiff.attached import Attached
from lowdiff.layout import byte_view, shard_owners
from lowdiff.persistence.cycles import (
    BLOCKS,
    PADDING,
    SLICES,
    Cuttable,
    CycleMark,
    SliceRef,
    cut,
    encode_slices,
)
from lowdiff.persistence.framing import RecordKind
from lowdiff.persistence.snapshots import (
    OPTIMIZER,
    PARAMETER,
    RESIDUAL,
    ImageEntry,
    ImageTensor,
    image_header,
)
from lowdiff.persistence.values import encode
from lowdiff.recovery.images import image_tensor
from lowdiff.recovery.optimizers import granularity
from lowdiff.recovery.state import AVERAGE_ITEM
from lowdiff.settings import Settings
from lowdiff.snapshot import Live, is_full
from lowdiff.stager import Stager
from lowdiff.types import Payload

#: Blocks start at multiples of so many elements; replay does not need it, copies like it.
_ATOM = 64
#: The header's length is settled when a cycle begins, but not yet how many small tensors there are.
_SPARE_HEADER_BYTES, _SPARE_ENTRY_BYTES = 4096, 256
_HEADER_ALIGNMENT = 64
_TAIL_ALIGNMENT = 8


@dataclass(frozen=True, slots=True)
class _Share:
    """Tensors that are copied together, element by element.

    Attributes:
        key: Layout index of a parameter, with its optimizer state and averages; or the name of a
            residual.
        lanes: Name in the image, ascending -> tensor; all of one shape.
        whole: Whether it stays in one piece: its optimizer couples the elements, or they do not lie
            in memory in the order in which an image stores them.
    """

    key: int | str
    lanes: Mapping[str, torch.Tensor]
    whole: bool

    @property
    def entries(self) -> list[ImageEntry]:
        """What the image's header says of the lanes."""
        return [ImageEntry(n, _code(t.dtype), tuple(t.shape)) for n, t in self.lanes.items()]

    def piece(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Some elements of one lane, shared; all of them in its own shape."""
        tensor = self.lanes[name].detach()
        return tensor if (start, stop) == (0, tensor.numel()) else tensor.view(-1)[start:stop]


@dataclass(frozen=True, slots=True)
class _Now:
    """Finds what is to be copied at one moment: optimizers may put other tensors in place of old."""

    attached: Attached
    residuals: Mapping[str, torch.Tensor]
    averages: Mapping[str, Mapping[int, torch.Tensor]]

    @classmethod
    def of(cls, live: Live) -> _Now:
        return cls(live.attached, live.residual.named(), live.averages.named_tensors())

    def share(self, key: int | str) -> _Share:
        """What is copied together under a key of `_Share`."""
        if isinstance(key, int):
            return self._state(key)
        tensor = self.residuals[key]
        return _Share(key, {RESIDUAL + key: tensor}, not tensor.is_contiguous())

    def _state(self, index: int) -> _Share:
        spec, parameter = self.attached.layout.parameters[index], self.attached.parameters[index]
        owner = self.attached.owner[index]
        lanes = {PARAMETER + spec.name: parameter.detach()}
        for key, value in self.attached.optimizers[owner].state.get(parameter, {}).items():
            if is_full(key, value, parameter):
                lanes[f"{OPTIMIZER}{owner}/{spec.name}/{key}"] = value
        for name, tensors in self.averages.items():
            if index in tensors:
                lanes[f"{AVERAGE_ITEM}{name}/{spec.name}"] = tensors[index]
        couples = granularity(self.attached.specs[owner]) != "element"
        whole = couples or not all(tensor.is_contiguous() for tensor in lanes.values())
        return _Share(index, dict(sorted(lanes.items())), whole)


@dataclass(slots=True)
class _Cycle:
    """One cycle while it goes on.

    Attributes:
        first: Its first step.
        last: Its last.
        entries: Tensors that are copied slice by slice, in their order in the image.
        offsets: Where each starts in the file, by name.
        header_bytes: Length kept for the image's header.
        slices: Per step: ``(index of the share, start, stop)``.
        shares: Keys of what is shared out.
        copied: Last step whose slice was staged.
        done: Meta part and checksum of every slice that was staged.
        blocks: What each of them says of its blocks, as the image holds it.
    """

    first: int
    last: int
    entries: list[ImageEntry]
    offsets: dict[str, int]
    header_bytes: int
    slices: list[list[tuple[int, int, int]]]
    shares: list[int | str]
    copied: int
    done: list[tuple[bytes, int]] = field(default_factory=list)
    blocks: list[dict[str, Any]] = field(default_factory=list)

    @property
    def end(self) -> int:
        """Offset behind the last tensor that is copied slice by slice."""
        return self.header_bytes + sum(entry.nbytes for entry in self.entries)

    @property
    def first_base(self) -> int:
        """Lowest step of a block."""
        return min((found["step"] for found in self.blocks), default=self.last)


class Rolling:
    """Takes the rolling snapshots of one rank.

    Reference: Gray and Reuter, "Transaction Processing" (1993), section 11.3, calls it a fuzzy
    checkpoint; there pages are written as they are met, here all in turn.
    """

    def __init__(self, live: Live, stager: Stager, settings: Settings) -> None:
        self._live = live
        self._stager = stager
        self._settings = settings
        self._owners = shard_owners(live.attached.layout, live.world_size)
        self._cycle: _Cycle | None = None
        self._slices_at = 0, 0
        self._tail_bytes = 0

    def restart(self) -> None:
        """Give up the cycle: an atomic snapshot was taken, of a step that cannot be replayed, say."""
        self._cycle = None

    def copy(self, step: int, held: Sequence[int]) -> None:
        """Stage the slice of a step that has ended, before the differential of the step is.

        In that order a differential that is durable says that the slices up to its step were
        written, so both may be overwritten in staging.

        Args:
            step: The step that has ended.
            held: Layout indices of parameters that hold a gradient.
        """
        with self._stager.timed("snapshot_seconds"):
            cycle = self._cycle
            if cycle is not None and (
                self._stager.is_lost(cycle.last) or self._stager.dropped_step >= cycle.first
            ):
                cycle = None
            if cycle is None or cycle.last < step:
                cycle = self._cycle = self._begin(step)
            if cycle is None or step <= cycle.copied:
                return
            if not self._stage_slice(cycle, step):  # optimizer state that was not there before
                cycle = self._cycle = self._begin(step)
                if cycle is None or not self._stage_slice(cycle, step):
                    return self.restart()
            if step == cycle.last and not self._stage_last(cycle, held):
                return self.restart()
            cycle.copied = step

    def finish(self, step: int) -> bool:
        """Stage the mark, if a cycle ends with this step, whose differential is staged."""
        cycle = self._cycle
        if cycle is None or (cycle.last, cycle.copied) != (step, step):
            return False
        self._cycle = None
        size = cycle.end + self._tail_bytes
        meta, checksum = cycle.done[-1]
        mark = CycleMark(step, cycle.first_base, size, self._slices_at, meta, checksum)
        with self._stager.timed("snapshot_seconds"):
            self._stager.stage_cycle(step, mark.encode())
        return True

    # How a cycle begins

    def _begin(self, step: int) -> _Cycle | None:
        """The cycle that ``step`` is the first of; None if it would be too short, or of no use."""
        every = self._settings.snapshot_every
        last = -(-step // every) * every
        length = last - step + 1
        retention = self._settings.retention
        if (
            length < 2
            or 2 * length < every
            or self._stager.is_lost(last)
            or (retention is not None and retention.last_kept_step(step, last) is not None)
        ):
            return None
        now = _Now.of(self._live)
        keys: list[int | str] = [
            i for i, owner in enumerate(self._owners) if owner == self._live.rank
        ]
        keys += now.residuals
        shares = [now.share(key) for key in keys]
        entries = [entry for share in shares for entry in share.entries]
        entries.sort(key=lambda entry: (-entry.item_bytes, entry.name))
        spare = _SPARE_HEADER_BYTES + _SPARE_ENTRY_BYTES * len(self._live.tracker.tensors)
        header_bytes = len(image_header(entries)) + spare
        header_bytes += -header_bytes % _HEADER_ALIGNMENT
        offsets, offset = {}, header_bytes
        for entry in entries:
            offsets[entry.name] = offset
            offset += entry.nbytes
        things = [_cuttable(share) for share in shares]
        slices = cut(things, length)
        return _Cycle(step, last, entries, offsets, header_bytes, slices, keys, copied=step - 1)

    # What is staged

    def _stage_slice(self, cycle: _Cycle, step: int) -> bool:
        """Copy the slice of a step; False if what is to be copied is not what it was."""
        planned = {entry.name: entry for entry in cycle.entries}
        blocks: list[list[int]] = []
        state: list[dict[str, dict[str, Any]]] = [{} for _ in self._live.attached.optimizers]
        pieces: list[torch.Tensor] = []
        ranges: list[tuple[int, int]] = []
        now = _Now.of(self._live)
        for index, start, stop in cycle.slices[step - cycle.first]:
            key = cycle.shares[index]
            share = now.share(key)
            if [planned.get(entry.name) for entry in share.entries] != share.entries or (
                share.whole and (start, stop) != (0, next(iter(share.lanes.values())).numel())
            ):
                return False
            for entry in share.entries:
                pieces.append(self._live.copies.fetch(share.piece(entry.name, start, stop)))
                offset = cycle.offsets[entry.name] + start * entry.item_bytes
                ranges.append((offset, pieces[-1].nbytes))
            if isinstance(key, int):
                blocks.append([key, start, stop])
                self._add_scalars(state, key)
        if blocks:
            cycle.blocks.append({"step": step, "blocks": blocks, "state": state})
        self._live.copies.then(
            lambda: self._stage(cycle, step, ranges, [_image_bytes(piece) for piece in pieces])
        )
        return True

    def _add_scalars(self, state: list[dict[str, dict[str, Any]]], index: int) -> None:
        """Optimizer state that is not element by element; replay of a block starts from its own."""
        attached = self._live.attached
        parameter, owner = attached.parameters[index], attached.owner[index]
        found = {
            key: self._live.copies.fetch(value.detach().clone())
            if isinstance(value, torch.Tensor)
            else value
            for key, value in attached.optimizers[owner].state.get(parameter, {}).items()
            if not is_full(key, value, parameter)
        }
        if found:
            state[owner][attached.layout.parameters[index].name] = found

    def _stage_last(self, cycle: _Cycle, held: Sequence[int]) -> bool:
        """Stage the header and what is small; False if the header is longer than was foreseen.

        It holds the checksums of all slices, so an accelerator's last one is waited for.
        """
        self._add_empty(cycle)
        small_tensors = self._live.small(held)
        self._live.copies.finish()
        extra = {BLOCKS: encode(cycle.blocks), SLICES: encode_slices(cycle.done)}
        small = [
            *small_tensors(),
            *(ImageTensor(n, "U8", (len(data),), memoryview(data)) for n, data in extra.items()),
        ]
        # Widest items first, from a multiple of the widest: safetensors maps tensors as they lie.
        small.sort(key=lambda tensor: (-tensor.item_bytes, tensor.name))
        padding = bytes(-cycle.end % _TAIL_ALIGNMENT)
        filler = ImageTensor(PADDING, "U8", (len(padding),), memoryview(padding))
        tail = [filler, *small] if padding else small
        header = image_header([*cycle.entries, *tail], cycle.header_bytes)
        if len(header) != cycle.header_bytes:
            return False
        offset = cycle.end
        for tensor in tail:
            if tensor.name == SLICES:
                self._slices_at = offset, tensor.nbytes
            offset += tensor.nbytes
        self._tail_bytes = offset - cycle.end
        pieces = [memoryview(header), *(tensor.data for tensor in tail)]
        ranges = [(0, len(header)), (cycle.end, self._tail_bytes)]
        self._stage(cycle, cycle.last, ranges, pieces)
        return True

    def _add_empty(self, cycle: _Cycle) -> None:
        """Parameters without elements are in no slice, but their optimizer's state may have scalars."""
        state: list[dict[str, dict[str, Any]]] = [{} for _ in self._live.attached.optimizers]
        empty = [key for key in cycle.shares if isinstance(key, int) and self._is_empty(key)]
        for index in empty:
            self._add_scalars(state, index)
        if empty:
            blocks = [[index, 0, 0] for index in empty]
            cycle.blocks.append({"step": cycle.last, "blocks": blocks, "state": state})

    def _is_empty(self, index: int) -> bool:
        return self._live.attached.layout.parameters[index].numel == 0

    def _stage(
        self,
        cycle: _Cycle,
        step: int,
        ranges: Sequence[tuple[int, int]],
        pieces: Sequence[memoryview],
    ) -> None:
        meta = SliceRef(cycle.last, len(cycle.done), tuple(ranges)).encode()
        checksum = self._stager.stage(RecordKind.SLICE, step, meta, Payload(()), pieces=pieces)
        cycle.done.append((meta, checksum))


@lru_cache
def _code(dtype: torch.dtype) -> str:
    """The dtype as an image's header names it."""
    return image_tensor("", torch.empty(0, dtype=dtype, device="cpu")).dtype


def _image_bytes(tensor: torch.Tensor) -> memoryview:
    """A tensor on the CPU in the image's order."""
    return byte_view(tensor.contiguous()) if tensor.numel() else memoryview(b"")


def _cuttable(share: _Share) -> Cuttable:
    numel = next(iter(share.lanes.values())).numel()
    element_bytes = sum(entry.item_bytes for entry in share.entries)
    return Cuttable(numel, element_bytes, numel if share.whole else _ATOM)
