"""Memory-mapped files on tmpfs, which outlive every process that maps them, and pages of progress."""

from __future__ import annotations

import errno
import mmap
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack
from crc32c import crc32c

from lowdiff.errors import DamagedFile, StorageError

_SLOT_BYTES = 4096
_HEAD = struct.Struct("<QII")


class MappedFile:
    """A file of fixed size, mapped for reading and writing.

    All pages are allocated when the file is created: a store into a hole of a full tmpfs would be
    a SIGBUS, which kills training.
    """

    def __init__(self, path: Path, size: int) -> None:
        """Open or create ``path`` with exactly ``size`` bytes.

        Raises:
            StorageError: If there is not enough memory.
        """
        self.path = path
        self.size = size
        try:
            self._map = _mapped(path, size)
            found = os.stat(path)
        except OSError as error:
            raise StorageError(_refusal(path, size, error)) from error
        self._identity = found.st_dev, found.st_ino
        self.view = memoryview(self._map)

    @property
    def is_whole(self) -> bool:
        """Whether the path still names the file, and nobody has cut it: a store into what is gone would be a SIGBUS."""
        try:
            there = os.stat(self.path)
        except OSError:
            return False
        return (there.st_dev, there.st_ino, there.st_size) == (*self._identity, self.size)

    def resize(self, size: int) -> None:
        """Give the file another size; pages that it had stay mapped. Nobody may hold the view.

        Raises:
            StorageError: If there is not enough memory.
        """
        try:
            descriptor = os.open(self.path, os.O_RDWR)
            try:
                os.posix_fallocate(descriptor, 0, size)
            finally:
                os.close(descriptor)
            self.view.release()
            self._map.resize(size)
        except OSError as error:
            raise StorageError(_refusal(self.path, size, error)) from error
        self.view = memoryview(self._map)
        self.size = size

    def renamed(self, path: Path) -> None:
        """Rename the file; the mapping stays.

        Raises:
            StorageError: If the file does not exist any more.
        """
        try:
            self.path.rename(path)
        except OSError as error:
            raise StorageError(_refusal(path, self.size, error)) from error
        self.path = path


def _mapped(path: Path, size: int) -> mmap.mmap:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        # Allocate pages before the length is visible, so that other processes find no hole either.
        os.posix_fallocate(descriptor, 0, size)
        os.ftruncate(descriptor, size)
        # Populate now, so that the training thread takes no page fault at its first store.
        return mmap.mmap(descriptor, size, mmap.MAP_SHARED | mmap.MAP_POPULATE)
    finally:
        os.close(descriptor)


def mapped_privately(path: Path) -> memoryview:
    """Map a file as it is; what is written to the memory does not reach the file.

    Raises:
        FileNotFoundError: If there is none.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        size = os.fstat(descriptor).st_size
        return memoryview(mmap.mmap(descriptor, size, mmap.MAP_PRIVATE))
    finally:
        os.close(descriptor)


def _refusal(path: Path, size: int, error: OSError) -> str:
    """Return the error text for memory that staging does not get."""
    way_out = "pass Checkpointer(..., staging=OTHER_FOLDER)"
    if error.errno in (errno.ENOSPC, errno.ENOMEM):
        why = f"that file system is full; free it, enlarge it, or {way_out}"
    elif error.errno == errno.EDQUOT:
        why = f"your quota there is used up; free some, have it raised, or {way_out}"
    else:
        why = f"cannot have it ({error.strerror}); mend that, or {way_out}"
    return f"staging needs {size / 2**20:.1f} MiB at {path}, and {why}"


def read_view(path: Path) -> memoryview:
    """Map a whole file read-only; return an empty view for an empty file.

    Raises:
        FileNotFoundError: If the file does not exist.
        DamagedFile: If the file cannot be read.
    """
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size == 0:
                return memoryview(b"")
            return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    except FileNotFoundError:
        raise
    except OSError as error:
        raise DamagedFile(path, f"it cannot be read ({error})") from error


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
        slot: Which of the images that stay in memory it is; -1 for the one that stays until it is durable.
    """

    step: int
    bytes: int
    checksum: int
    slot: int = -1


def _newest(view: memoryview, known: tuple[int, dict[str, Any]]) -> tuple[int, dict[str, Any]]:
    """Return sequence and content of the newest whole slot; the known ones if none is newer."""
    found = known
    # A page that is just being created has length 0; of one that was cut, a slot without its head is none.
    for start in range(0, len(view) - _HEAD.size + 1, _SLOT_BYTES):
        sequence, size, checksum = _HEAD.unpack_from(view, start)
        if sequence > found[0]:
            body = bytes(view[start + _HEAD.size : start + _HEAD.size + min(size, _SLOT_BYTES)])
            if len(body) == size and checksum == _checksum(sequence, body):
                found = (sequence, msgpack.unpackb(body, use_list=False))
    return found


def _checksum(sequence: int, body: bytes) -> int:
    # The sequence is included, so that a torn head cannot present an old body as the newest.
    return int(crc32c(body, crc32c(sequence.to_bytes(8, "little"))))
