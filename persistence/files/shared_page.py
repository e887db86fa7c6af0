"""A page of shared memory through which one process publishes its progress to others."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack
from crc32c import crc32c

from lowdiff.persistence.files.mapped_file import MappedFile, read_view

_SLOT_BYTES = 4096
_HEAD = struct.Struct("<QII")


class Page:
    """Two alternating checksummed slots of a fixed size, so that a reader always finds a whole one."""

    def __init__(self, path: Path) -> None:
        self._file = MappedFile(path, 2 * _SLOT_BYTES)
        self._sequence = _newest(self._file.view, (0, {}))[0]

    def publish(self, content: Mapping[str, Any]) -> None:
        """Replace the content for readers: plain values, at most ``_SLOT_BYTES`` with the head."""
        body = msgpack.packb(content)
        self._sequence += 1
        start = (self._sequence % 2) * _SLOT_BYTES
        head = _HEAD.pack(self._sequence, len(body), _checksum(self._sequence, body))
        self._file.view[start + _HEAD.size : start + _HEAD.size + len(body)] = body
        self._file.view[start : start + _HEAD.size] = head


class PageReader:
    """Reader of a page; keeps the page mapped."""

    def __init__(self, path: Path) -> None:
        self._view = read_view(path)
        self._last: tuple[int, dict[str, Any]] = (0, {})

    def read(self) -> dict[str, Any]:
        """Return the newest whole content; empty before the first."""
        # A slow reader may find both slots in the middle of an update; it then returns the last
        # content.
        self._last = _newest(self._view, self._last)
        return self._last[1]


@dataclass(frozen=True, slots=True)
class ImageMark:
    """Mark on a page that a staged image is whole and stays until it is durable.

    Attributes:
        step: Step of the image.
        bytes: Length of the image.
        checksum: CRC-32C of all of it.
    """

    step: int
    bytes: int
    checksum: int


def _newest(view: memoryview, known: tuple[int, dict[str, Any]]) -> tuple[int, dict[str, Any]]:
    """Return sequence and content of the newest whole slot; the known ones if none is newer."""
    found = known
    # A page that is just being created has length 0.
    for start in range(0, len(view), _SLOT_BYTES):
        sequence, size, checksum = _HEAD.unpack_from(view, start)
        if sequence > found[0]:
            body = bytes(view[start + _HEAD.size : start + _HEAD.size + min(size, _SLOT_BYTES)])
            if len(body) == size and checksum == _checksum(sequence, body):
                found = (sequence, msgpack.unpackb(body, use_list=False))
    return found


def _checksum(sequence: int, body: bytes) -> int:
    # The sequence is included, so that a torn head cannot present an old body as the newest.
    return int(crc32c(body, crc32c(sequence.to_bytes(8, "little"))))
