"""The replica's state as one memory file: tensors that are updated in place, never seen half done.

A file holds one rank's share of the state. It is cut into the units of replay, each with its own step:
a unit's tensors are copied into the undo area before the optimizer writes them, and the unit's step
moves on once they are written. So whoever opens the file after a ``kill -9`` puts back at most one
unit, and finds every unit at the step before or after the one that was under way.

What is small (items, hyper-parameters, an optimizer's numbers, the checksum of a unit's parameters and
averages) alternates between two checksummed slots; a new file has a unit's first one already. Header and
base have a checksum, too; only the moments have none. Survives the death of every process, not that of
the memory: where staging is on a disk, a file of an earlier boot may hold pages of different steps, so a
note beside it says under which kernel it was written.
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import struct
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from crc32c import crc32c

from lowdiff.core.layout import dtype_name
from lowdiff.core.memory import byte_view
from lowdiff.errors import DamagedFile, StorageError
from lowdiff.persistence.files.lease import this_machine
from lowdiff.persistence.files.mapped_file import MappedFile
from lowdiff.persistence.files.paths import StagingFolder
from lowdiff.persistence.format.values import decode, encode
from lowdiff.persistence.staging.budget import is_in_memory
from lowdiff.recovery.replay.blocks import Unit
from lowdiff.types import Block

_MAGIC = b"LDREPLCA"
_LENGTH = struct.Struct("<8sQI")
_SLOT = struct.Struct("<QII")
_UNDO = struct.Struct("<QQQI")
_ALIGNMENT = 64
#: Errors that say nothing about a file: the next try may succeed.
PASSING = (errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOLCK)


@dataclass(frozen=True, slots=True, eq=False)
class Contents:
    """Initial content of a new file.

    Attributes:
        step: The step of all of it.
        tensors: Name -> flat CPU tensor.
        units: How the tensors are stepped.
        unit_bytes: Bytes that the largest unit writes.
        base: Plain values that hold for the whole life of the file.
        unit_values: What is kept beside the tensors of each unit, as `ReplicaFile.finish` gets it.
        unit_slot_bytes: Capacity for one unit's values.
        step_slot_bytes: Capacity for what a step changes of everything else.
    """

    step: int
    tensors: Mapping[str, torch.Tensor]
    units: Sequence[Unit]
    unit_bytes: int
    base: Mapping[str, Any]
    unit_values: Sequence[bytes]
    unit_slot_bytes: int
    step_slot_bytes: int


class SlotTooSmall(Exception):
    """A value does not fit, or has no place; a new file has to be made."""


class ReplicaFile:
    """One file, mapped: shared by the replica that owns it, privately by whoever recovers.

    Large because reader and owner use one layout of the file, which no other module knows.
    """

    def __init__(self, path: Path, view: memoryview, regions: Mapping[str, Any]) -> None:
        self.path = path
        self._view = view
        self._regions = regions
        self.units = [
            Unit(optimizer, tuple(Block(*block) for block in blocks))
            for optimizer, blocks in regions["plan"]
        ]
        self.base_step: int = regions["step"]
        #: Step of every unit, uint64, mapped.
        self.unit_steps = np.frombuffer(self._region("units"), np.uint64)

    @classmethod
    def create(cls, path: Path, contents: Contents) -> ReplicaFile:
        """Write a new file; it counts once its number is published.

        Raises:
            StorageError: If there is no memory for it.
        """
        base = encode(dict(contents.base))
        sizes = {name: tensor.nbytes for name, tensor in contents.tensors.items()} | {
            "base": len(base),
            "units": 8 * len(contents.units),
            "unit slots": 2 * len(contents.units) * (_SLOT.size + contents.unit_slot_bytes),
            "step slots": 2 * (_SLOT.size + contents.step_slot_bytes),
            "undo": _ALIGNMENT + contents.unit_bytes,
        }
        places, end = {}, 0
        for name, size in sizes.items():
            places[name] = [end, size]
            end += size + -size % _ALIGNMENT
        regions = {
            "step": contents.step,
            "base checksum": crc32c(base),
            "places": places,
            "dtypes": {name: dtype_name(t.dtype) for name, t in contents.tensors.items()},
            "plan": [
                [u.optimizer, [[b.parameter, b.start, b.stop] for b in u.blocks]]
                for u in contents.units
            ],
        }
        header = json.dumps(regions, separators=(",", ":")).encode()
        start = _start(len(header))
        file = MappedFile(path, max(1, start + end))
        file.view[: _LENGTH.size] = _LENGTH.pack(_MAGIC, len(header), crc32c(header))
        file.view[_LENGTH.size : _LENGTH.size + len(header)] = header
        made = cls(path, file.view[start:], regions)
        for name, tensor in contents.tensors.items():
            if tensor.numel():
                made._region(name)[:] = byte_view(tensor)
        made._region("base")[:] = base
        for unit, values in enumerate(contents.unit_values):
            made._write_unit_slot(unit, contents.step, values)
        made.unit_steps[:] = contents.step
        return made

    @classmethod
    def open(cls, path: Path, *, private: bool) -> ReplicaFile:
        """Map an existing file.

        Args:
            path: The file.
            private: Whether what is written stays this process's own (copy on write).

        Raises:
            DamagedFile: If it is not there, not one of ours, cut short, or its header fails its checksum.
            OSError: If this process gets no memory or descriptor for it.
        """
        # Populating a private map that may be written would copy all of it.
        flags = mmap.MAP_PRIVATE if private else mmap.MAP_SHARED | mmap.MAP_POPULATE
        try:
            with path.open("r+b") as opened:
                size = os.fstat(opened.fileno()).st_size
                view = memoryview(mmap.mmap(opened.fileno(), size, flags))
            magic, length, checksum = _LENGTH.unpack_from(view)
            if magic != _MAGIC:
                raise DamagedFile(path, "it is no replica's state")
            header = bytes(view[_LENGTH.size : _LENGTH.size + length])
            if checksum != crc32c(header):
                raise DamagedFile(path, "its header fails its checksum")
            regions, content = json.loads(header), view[_start(length) :]
            if len(content) < max(offset + size for offset, size in regions["places"].values()):
                raise DamagedFile(path, "it is cut short")
            return cls(path, content, regions)
        except (OSError, ValueError, KeyError, struct.error) as error:
            if isinstance(error, OSError) and error.errno in PASSING:
                raise
            raise DamagedFile(path, f"it cannot be read ({error!r})") from error

    def tensors(self) -> dict[str, torch.Tensor]:
        """Name -> flat tensor that shares the file's memory."""
        return {
            name: torch.from_numpy(np.frombuffer(self._region(name), np.uint8)).view(
                getattr(torch, dtype)
            )
            if self._regions["places"][name][1]
            else torch.empty(0, dtype=getattr(torch, dtype), device="cpu")
            for name, dtype in self._regions["dtypes"].items()
        }

    def base(self) -> dict[str, Any]:
        """`Contents.base` as it was given.

        Raises:
            DamagedFile: If it fails its checksum.
        """
        data = self._region("base")
        if crc32c(data) != self._regions["base checksum"]:
            raise DamagedFile(self.path, "what it was made with fails its checksum")
        found: dict[str, Any] = decode(data)
        return found

    # The unit under way

    def save(self, unit: int, tensors: Iterable[torch.Tensor]) -> None:
        """Keep a unit's tensors as they are before it is stepped."""
        undo = self._region("undo")
        end = _ALIGNMENT
        for tensor in tensors:
            if tensor.numel():
                data = byte_view(tensor)
                undo[end : end + data.nbytes] = data
                end += data.nbytes
        head = struct.pack("<QQQ", unit, int(self.unit_steps[unit]), end - _ALIGNMENT)
        undo[: _UNDO.size] = head + struct.pack("<I", crc32c(head))

    def unfinished(self) -> int | None:
        """The unit that was being written when the replica died, if one was."""
        unit, step, _, checksum = _UNDO.unpack_from(self._region("undo"))
        head = bytes(self._region("undo")[: _UNDO.size - 4])
        is_whole = checksum == crc32c(head) and unit < len(self.units)
        return unit if is_whole and step == self.unit_steps[unit] else None

    def put_back(self, tensors: Iterable[torch.Tensor]) -> None:
        """Undo what was written of the unfinished unit, whose tensors these are."""
        undo = self._region("undo")
        end = _ALIGNMENT
        for tensor in tensors:
            if tensor.numel():
                data = byte_view(tensor)
                data[:] = undo[end : end + data.nbytes]
                end += data.nbytes

    def finish(self, unit: int, step: int, values: bytes) -> None:
        """A unit is written: from now on it is at ``step``, with these values beside its tensors.

        Raises:
            SlotTooSmall: If the values have grown.
        """
        self._write_unit_slot(unit, step, values)
        self.unit_steps[unit] = step

    def unit_values(self, unit: int) -> bytes:
        """Return what the unit's last `finish` got, or what the file was made with.

        Raises:
            DamagedFile: If that, or the unit's step, is not as it was written.
        """
        step = int(self.unit_steps[unit])
        found = self._read_slot("unit slots", 2 * unit + step % 2, 2 * len(self.units))
        if found is None or found[0] != step:
            raise DamagedFile(self.path, f"unit {unit} fails its checksum at step {step}")
        return found[1]

    def reach(self) -> int:
        """The step of the furthest unit; one that fails its checksum is left out."""
        steps = []
        for unit, step in enumerate(self.unit_steps):
            with suppress(DamagedFile):
                self.unit_values(unit)
                steps.append(int(step))
        return max(steps, default=self.base_step)

    # The step

    def finish_step(self, step: int, values: bytes) -> None:
        """All units are at ``step``, and this is what else belongs to it.

        Raises:
            SlotTooSmall: If the values have grown.
        """
        self._write_slot("step slots", step % 2, 2, step, values)

    def last_step(self) -> tuple[int, bytes] | None:
        """The newest finished step, and what `finish_step` got; None before the first."""
        found = [self._read_slot("step slots", index, 2) for index in range(2)]
        return max((f for f in found if f is not None), default=None)

    def _write_unit_slot(self, unit: int, step: int, values: bytes) -> None:
        self._write_slot("unit slots", 2 * unit + step % 2, 2 * len(self.units), step, values)

    def _write_slot(self, name: str, index: int, count: int, step: int, data: bytes) -> None:
        slot = self._slot(name, index, count)
        if _SLOT.size + len(data) > len(slot):
            raise SlotTooSmall(name)
        slot[_SLOT.size : _SLOT.size + len(data)] = data
        slot[: _SLOT.size] = _SLOT.pack(step, len(data), _checksum(step, data))

    def _read_slot(self, name: str, index: int, count: int) -> tuple[int, bytes] | None:
        slot = self._slot(name, index, count)
        step, size, checksum = _SLOT.unpack_from(slot)
        data = bytes(slot[_SLOT.size : _SLOT.size + size])
        is_whole = size > 0 and len(data) == size and checksum == _checksum(step, data)
        return (step, data) if is_whole else None

    def _slot(self, name: str, index: int, count: int) -> memoryview:
        region = self._region(name)
        size = len(region) // count
        return region[index * size : (index + 1) * size]

    def _region(self, name: str) -> memoryview:
        offset, size = self._regions["places"][name]
        return self._view[offset : offset + size]


def note_kernel(stage: StagingFolder) -> None:
    """Say beside the files of a replica under which kernel they are written.

    Raises:
        StorageError: If that cannot be written.
    """
    try:
        stage.replica_boot.write_text(this_machine(), encoding="ascii")
    except OSError as error:
        raise StorageError(f"{stage.replica_boot} cannot be written: {error}") from error


def is_of_this_kernel(stage: StagingFolder) -> bool:
    """Whether the files of a replica are as its process left them.

    In memory nothing outlives the kernel. Of a file on a disk, a loss of power leaves what happened to
    be written back.
    """
    if is_in_memory(stage.root):
        return True
    try:
        noted = stage.replica_boot.read_bytes()
    except FileNotFoundError:
        return False
    return noted == this_machine().encode()


def sound_files(stage: StagingFolder) -> list[Path]:
    """Return the files of a replica that recovery may read; checksums tell of all but its state."""
    files = stage.replica_files()
    if is_of_this_kernel(stage):
        return files
    states = {path for _, path in stage.replica_states()}
    return [path for path in files if path not in states]


def _start(header_bytes: int) -> int:
    size = _LENGTH.size + header_bytes
    return size + -size % _ALIGNMENT


def _checksum(step: int, data: bytes) -> int:
    # With the step, or a torn head could pass old data off as those of a newer step.
    return int(crc32c(data, crc32c(step.to_bytes(8, "little"))))
