"""The page through which the writer process tells the trainer how far it is."""

from __future__ import annotations

import struct
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import msgpack
from crc32c import crc32c

from lowdiff.persistence.memory import MappedFile, read_view

_SLOT_BYTES = 2048
_HEAD = struct.Struct("<QII")


@dataclass(frozen=True, slots=True)
class WriterStatus:
    """What the writer has done.

    Attributes:
        durable_step: Differentials up to here are fsynced; the base step at the start.
        durable_snapshot: Step of the newest fsynced snapshot of this incarnation, -1 for none.
        segment_bytes: Bytes of differentials written, framing included.
        snapshot_bytes: Bytes of snapshots written.
        batches: Durable writes of differentials.
        error: What went wrong last, empty when all is well.
        remote_step: Differentials up to here, and all they build on, are in the store; -1 before
            the base step is, or without a store.
        remote_snapshot: Step of the newest snapshot of this incarnation in the store, -1 for none.
        remote_bytes: Bytes uploaded.
        remote_retries: Uploads that failed and were or will be repeated.
        remote_error: Why uploads do not go on now, empty when all is well.
        closed: True once everything staged before the trainer's end is durable.
    """

    durable_step: int
    durable_snapshot: int = -1
    segment_bytes: int = 0
    snapshot_bytes: int = 0
    batches: int = 0
    error: str = ""
    remote_step: int = -1
    remote_snapshot: int = -1
    remote_bytes: int = 0
    remote_retries: int = 0
    remote_error: str = ""
    closed: bool = False


class StatusPage:
    """Two alternating checksummed slots: a reader always finds one whole."""

    def __init__(self, path: Path, status: WriterStatus) -> None:
        self._file = MappedFile(path, 2 * _SLOT_BYTES)
        self._sequence = _newest(self._file.view)[0]
        self.status = status
        self.update()

    def update(self, **changes: object) -> None:
        """Change some fields and publish."""
        self.status = replace(self.status, **changes)  # type: ignore[arg-type]
        content = asdict(self.status)
        content["error"] = _fitting(self.status.error, 1000)
        content["remote_error"] = _fitting(self.status.remote_error, 600)
        body = msgpack.packb(content)
        self._sequence += 1
        start = (self._sequence % 2) * _SLOT_BYTES
        head = _HEAD.pack(self._sequence, len(body), _checksum(self._sequence, body))
        self._file.view[start + _HEAD.size : start + _HEAD.size + len(body)] = body
        self._file.view[start : start + _HEAD.size] = head


class StatusReader:
    """The trainer's end; keeps the page mapped."""

    def __init__(self, path: Path) -> None:
        self._view = read_view(path)
        self._last: tuple[int, dict[str, Any]] = (0, {"durable_step": -1})

    def read(self) -> WriterStatus:
        """The newest whole status; ``durable_step`` is -1 while there is none."""
        # A reader that was held up between the slots may find both in the middle of an update.
        self._last = max(_newest(self._view), self._last, key=lambda found: found[0])
        return WriterStatus(**self._last[1])


def _newest(view: memoryview) -> tuple[int, dict[str, Any]]:
    found: tuple[int, dict[str, Any]] = (0, {"durable_step": -1})
    # Whoever opens the page while it is being created finds a file of no length.
    for start in range(0, len(view), _SLOT_BYTES):
        sequence, size, checksum = _HEAD.unpack_from(view, start)
        body = bytes(view[start + _HEAD.size : start + _HEAD.size + min(size, _SLOT_BYTES)])
        if sequence > found[0] and len(body) == size and checksum == _checksum(sequence, body):
            found = (sequence, msgpack.unpackb(body))
    return found


def _checksum(sequence: int, body: bytes) -> int:
    # With the sequence, or a torn head could pass an old body off as the newest.
    return int(crc32c(body, crc32c(sequence.to_bytes(8, "little"))))


def _fitting(error: str, most_bytes: int) -> str:
    """The beginning of a message, so that it fits a slot whatever its alphabet."""
    return error.encode(errors="replace")[:most_bytes].decode(errors="ignore")
