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
from dataclasses import dataclass

from crc32c import crc32c

from lowdiff.errors import StorageError
from lowdiff.persistence.files.paths import NUM_ITEM_SLOTS, StagingFolder
from lowdiff.persistence.format.values import BadEncoding, decode, encode

#: Step, length, checksum, and the optimizer call that the items are ahead of.
_HEAD = struct.Struct("<QQIB")
#: Slot of the items that the incarnation began with; the others take turns.
_BASE, _NUM_TURNS, _AHEAD, _NEW_BASE = 0, 2, NUM_ITEM_SLOTS - 1, NUM_ITEM_SLOTS


class StagedItems:
    """Writes the items of one rank.

    Args:
        stage: The rank's staging folder.
        base: All items as the incarnation begins with them, by name: encoded values.
    """

    def __init__(self, stage: StagingFolder, base: Mapping[str, bytes]) -> None:
        self._stage = stage
        self._write(_BASE, 0, base)

    def put(self, step: int, items: Mapping[str, bytes]) -> int:
        """Stage the items that changed since the base, as of ``step``; returns their bytes.

        Raises:
            StorageError: If there is no memory for them.
        """
        return self._write(_turn(step), step, items)

    def rebase(self, items: Mapping[str, bytes]) -> None:
        """Take items, as they were at the last two steps, for those that the incarnation began with.

        Raises:
            StorageError: If there is no memory for them.
        """
        found = _read(self._stage, _BASE)
        if found is not None:
            path, new = self._stage.items(_BASE), self._stage.items(_NEW_BASE)
            self._write(_NEW_BASE, 0, found.items | dict(items))
            new.replace(path)

    def put_ahead(self, step: int, items: Mapping[str, bytes], call: int) -> None:
        """Stage items as they are before an optimizer makes ``step``, or a part of it.

        Args:
            step: The step.
            items: What changes from step to step.
            call: Which optimizer call of the step it is.

        Raises:
            StorageError: If there is no memory for them.
        """
        self._write(_AHEAD, step, items, call % 256)

    def _write(self, slot: int, step: int, items: Mapping[str, bytes], mark: int = 0) -> int:
        body = encode(dict(items), name="items")
        path = self._stage.items(slot)
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
            raise StorageError(
                f"items of step {step} cannot be staged at {path}: {error}"
            ) from error
        return len(body)


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
    try:
        data = stage.items(slot).read_bytes()
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
