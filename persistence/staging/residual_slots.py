"""Rotating slots on tmpfs for a rank's error-feedback residual.

The residual of step ``t`` is written straight into its slot while the step is computed, without an
extra copy. Three slots suffice: staging ``t`` precedes this rank's first residual write of
``t + 1``, and a rank can only reach the writes of ``t + 2`` once every rank has staged ``t``.

A slot carries the number of its residual, and 0 while it is being written. Memory that a process
stored survives the process in the order of the stores. While the same kernel runs, no checksum is
therefore needed to distinguish a whole residual from a torn one. The writer takes a checksum when
the trainer is gone: from then on, slots are ordinary files whose changes must be noticed.
"""

from __future__ import annotations

import hashlib
import mmap
import secrets
import struct
from pathlib import Path

import numpy as np
from crc32c import crc32c

from lowdiff.core.events import Code
from lowdiff.persistence.files.lease import this_machine
from lowdiff.persistence.files.mapped_file import MappedFile, read_view
from lowdiff.types import Layout, ResidualLayout, ResidualMark

_HEAD = struct.Struct("<QQ")
_STAMP = struct.Struct("<QQ")
_CHECKSUM = struct.Struct("<Q")
_HEAD_BYTES = 128
_BOOT_BYTES = 32
_BOOT_AT = _HEAD_BYTES - _BOOT_BYTES
_MOST_SLOTS = (_BOOT_AT - _HEAD.size) // _STAMP.size
_HALF = 32


class ResidualSlots:
    """The slots of a live trainer.

    Attributes:
        views: Per slot, one view per parameter, zeroed, sharing the file's memory.
    """

    def __init__(self, path: Path, layout: Layout, num_slots: int) -> None:
        """Allocate all slots.

        Raises:
            StorageError: If there is no memory for them.
        """
        assert num_slots <= _MOST_SLOTS
        ranges = ResidualLayout(layout)
        self._view = MappedFile(path, _file_bytes(num_slots, ranges.slot_bytes)).view
        _HEAD.pack_into(self._view, 0, num_slots, ranges.slot_bytes)
        self._view[_BOOT_AT:_HEAD_BYTES] = _boot()
        self.views = [_of_parameters(slot, ranges) for slot in _slots_of(self._view)]
        # Incarnations use different numbers: a record may be read beside another history's slots.
        self._generation = secrets.randbits(62)

    def reuse(self, slot: int) -> None:
        """Mark a slot as being written."""
        _STAMP.pack_into(self._view, _stamp_at(slot), 0, 0)

    def complete(self, slot: int) -> ResidualMark:
        """Mark a slot as written; return the mark that names it until it is written again."""
        mark = self.promise(slot)
        self.keep(mark)
        return mark

    def promise(self, slot: int) -> ResidualMark:
        """Return the mark that will name what is being written to a slot, from `keep` on."""
        self._generation += 1
        return ResidualMark(slot, self._generation)

    def keep(self, mark: ResidualMark) -> None:
        """Mark a slot as written, as it was promised."""
        _STAMP.pack_into(self._view, _stamp_at(mark.slot), mark.generation, 0)

    def complete_copy(self, slot: int, generation: int, checksum: int) -> None:
        """Mark a slot as holding a copy of a residual of another file.

        Args:
            slot: The slot.
            generation: Number of the residual in the other file.
            checksum: CRC-32C of the whole slot.
        """
        stamp = generation, _with_generation(checksum, generation)
        _STAMP.pack_into(self._view, _stamp_at(slot), *stamp)

    def whole(self, slot: int) -> memoryview:
        """Return all bytes of a slot."""
        return _slots_of(self._view)[slot]

    def read(self, mark: ResidualMark, target: memoryview) -> bool:
        """Copy a residual, while another thread may write to the slots.

        Args:
            mark: Names the residual.
            target: As many bytes as a slot has.

        Returns:
            Whether the residual was there until it had been copied.
        """
        if not self._holds(mark):
            return False
        # This lets other threads run.
        np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(self.whole(mark.slot), np.uint8))
        return self._holds(mark)

    def _holds(self, mark: ResidualMark) -> bool:
        generation, _ = _STAMP.unpack_from(self._view, _stamp_at(mark.slot))
        return bool(generation == mark.generation)


def read_slot(path: Path, layout: Layout, mark: ResidualMark) -> list[memoryview] | None:
    """Return views of a residual that a dead trainer left, in whichever slot of the file: copies have other slots.

    Return None if the file does not fit, if no slot holds that residual, or if it was changed.
    """
    try:
        view = read_view(path)
    except FileNotFoundError:
        return None
    ranges, slots = ResidualLayout(layout), _slots_of(view)
    stamps = [_STAMP.unpack_from(view, _stamp_at(number)) for number in range(len(slots))]
    found = [i for i, (generation, _) in enumerate(stamps) if generation == mark.generation != 0]
    if not found or len(slots[found[0]]) != ranges.slot_bytes:
        return None
    slot, (generation, checksum) = slots[found[0]], stamps[found[0]]
    if _is_of(checksum, generation):
        is_whole = checksum == _checksum(slot, generation)
    else:
        # If staging is on a disk and power failed, the file's pages may be of different times.
        is_whole = view[_BOOT_AT:_HEAD_BYTES] == _boot()
    return _of_parameters(slot, ranges) if is_whole else None


def checksum_slots(path: Path) -> None:
    """Take a checksum of every whole slot of a dead trainer, unless the slot has one."""
    try:
        with path.open("r+b") as file:
            view = memoryview(mmap.mmap(file.fileno(), 0))
    except (FileNotFoundError, ValueError):  # no residual, or an empty file
        return
    except OSError as error:
        Code.RESIDUAL_UNCHECKED.warn(f"{path} gets no checksum: {error}")
        return
    for number, slot in enumerate(_slots_of(view)):
        generation, known = _STAMP.unpack_from(view, _stamp_at(number))
        if generation and not _is_of(known, generation):
            checksum = _checksum(slot, generation)
            _CHECKSUM.pack_into(view, _stamp_at(number) + _CHECKSUM.size, checksum)


def _checksum(slot: memoryview, generation: int) -> int:
    """Return a slot's CRC-32C, with half of its residual's number above it."""
    return _with_generation(int(crc32c(slot)), generation)


def _with_generation(checksum: int, generation: int) -> int:
    return (generation & (1 << _HALF) - 1) << _HALF | checksum


def _is_of(checksum: int, generation: int) -> bool:
    return checksum != 0 and checksum >> _HALF == generation & (1 << _HALF) - 1


def _boot() -> bytes:
    """Return a name of the running kernel."""
    return hashlib.blake2b(this_machine().encode(), digest_size=_BOOT_BYTES).digest()


def _slots_of(view: memoryview) -> list[memoryview]:
    """Return every slot of a file; none if the file has another format."""
    if len(view) < _HEAD_BYTES:
        return []
    num_slots, size = _HEAD.unpack_from(view)
    if num_slots > _MOST_SLOTS or len(view) != _file_bytes(num_slots, size):
        return []
    return [view[_file_bytes(i, size) : _file_bytes(i + 1, size)] for i in range(num_slots)]


def _file_bytes(num_slots: int, slot_bytes: int) -> int:
    return _HEAD_BYTES + num_slots * slot_bytes


def _stamp_at(slot: int) -> int:
    return _HEAD.size + slot * _STAMP.size


def _of_parameters(slot: memoryview, ranges: ResidualLayout) -> list[memoryview]:
    return [slot[start:stop] for start, stop in ranges.ranges]
