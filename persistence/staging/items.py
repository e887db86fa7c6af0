"""Items of a rank in staging as of its last two steps, for whoever saves its state after a failure.

A file holds all items as the incarnation began with them. Two more take turns: each holds the items that
changed since, as of one step. So a kill while one is written leaves the step before. A last one holds them
as they were before an optimizer stepped: most items are then what they will be at the step's end, so that
a rank that dies in between has left almost all that it alone had.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path

from crc32c import crc32c

from lowdiff.errors import StorageError
from lowdiff.persistence.files.paths import NUM_ITEM_SLOTS, StagingFolder
from lowdiff.persistence.format.values import BadEncoding, decode, encode

#: Step, length, checksum, and the optimizer call that the items are ahead of.
_HEAD = struct.Struct("<QQIB")
#: Slot of the items that the incarnation began with; the others take turns.
_BASE, _NUM_TURNS, _AHEAD, _NEW_BASE = 0, 2, NUM_ITEM_SLOTS - 1, NUM_ITEM_SLOTS
#: An item of more bytes that has not changed for some steps is not written again.
_LARGE_BYTES, _SETTLED_STEPS = 1 << 16, 3


class StagedItems:
    """Writes the items of one rank.

    Args:
        stage: The rank's staging folder.
        base: All items as the incarnation begins with them, by name: encoded values.
    """

    def __init__(self, stage: StagingFolder, base: Mapping[str, bytes]) -> None:
        self._stage = stage
        #: Items that changed since the base, and when they last did.
        self._changed: dict[str, bytes] = {}
        self._changed_at: dict[str, int] = {}
        write_items(stage.items(_BASE), 0, base)

    @property
    def changing(self) -> AbstractSet[str]:
        """Names of the items that are written in each step."""
        return self._changed.keys()

    def stage(self, step: int, changed: Mapping[str, bytes]) -> int:
        """Stage all that has changed since the base, as of ``step``; returns its bytes.

        Args:
            step: The step.
            changed: What changed in it.

        Raises:
            StorageError: If there is no memory for them.
        """
        self._changed.update(changed)
        self._changed_at.update(dict.fromkeys(changed, step))
        self._settle(step)
        return write_items(self._stage.items(_turn(step)), step, self._changed)

    def _settle(self, step: int) -> None:
        """Write a large item that has not changed for some steps into the base, and then no more."""
        settled = {
            name: self._changed[name]
            for name, at in self._changed_at.items()
            if at < step - _SETTLED_STEPS and len(self._changed[name]) > _LARGE_BYTES
        }
        base = _read(self._stage, _BASE) if settled else None
        if base is not None:
            new = self._stage.items(_NEW_BASE)
            write_items(new, 0, base.items | settled)
            new.replace(self._stage.items(_BASE))
            for name in settled:
                del self._changed[name], self._changed_at[name]

    def put_ahead(self, step: int, items: Mapping[str, bytes], call: int) -> None:
        """Stage items as they are before an optimizer makes ``step``, or a part of it.

        Args:
            step: The step.
            items: What changes from step to step.
            call: Which optimizer call of the step it is.

        Raises:
            StorageError: If there is no memory for them.
        """
        write_items(self._stage.items(_AHEAD), step, items, call % 256)


def write_items(path: Path, step: int, items: Mapping[str, bytes], mark: int = 0) -> int:
    """Write items as of a step into a file; returns their bytes. A kill in between leaves no items.

    Raises:
        StorageError: If there is no memory for them.
    """
    body = encode(dict(items), name="items")
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            # The checksum tells of a kill in between.
            data = _HEAD.pack(step, len(body), _checksum(step, mark, body), mark) + body
            if os.pwrite(descriptor, data, 0) != len(data):
                raise StorageError(f"{path} was written in part: its file system is full")
        finally:
            os.close(descriptor)
    except OSError as error:
        raise StorageError(f"items of step {step} cannot be staged at {path}: {error}") from error
    return len(body)


def read_items_at(path: Path, step: int) -> dict[str, bytes] | None:
    """Return what `write_items` wrote as of a step; None if that is not there, or damaged."""
    found = _read_file(path)
    return None if found is None or found.step != step else found.items


def read_items(stage: StagingFolder, step: int) -> dict[str, bytes] | None:
    """Return all items of a rank as of a step; None if they are not there, or damaged."""
    base, changed = _read(stage, _BASE), _read(stage, _turn(step))
    if base is None or changed is None or changed.step != step:
        return None
    return base.items | changed.items


def read_ahead(stage: StagingFolder, step: int) -> tuple[int, dict[str, bytes]]:
    """Return which optimizer call of a step was a rank's last, and its items before; -1 and none before the first."""
    found = _read(stage, _AHEAD)
    return (-1, {}) if found is None or found.step != step else (found.mark, found.items)


def _turn(step: int) -> int:
    return 1 + step % _NUM_TURNS


@dataclass(frozen=True, slots=True)
class _Content:
    step: int
    mark: int
    items: dict[str, bytes]


def _read(stage: StagingFolder, slot: int) -> _Content | None:
    return _read_file(stage.items(slot))


def _read_file(path: Path) -> _Content | None:
    try:
        data = path.read_bytes()
    except OSError:
        return None
    if len(data) < _HEAD.size:
        return None
    step, size, checksum, mark = _HEAD.unpack_from(data)
    body = data[_HEAD.size : _HEAD.size + size]
    if len(body) != size or checksum != _checksum(step, mark, body):
        return None
    try:
        return _Content(step, mark, decode(body))
    except BadEncoding:
        return None


def _checksum(step: int, mark: int, body: bytes) -> int:
    return int(crc32c(body, crc32c(bytes([*step.to_bytes(8, "little"), mark]))))
