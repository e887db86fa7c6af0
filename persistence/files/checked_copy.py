"""Copy into memory that outlives the process, or out of a file, with a checksum in the same pass."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
from crc32c import crc32c

from lowdiff.core.crc import joined

Bytes: TypeAlias = "bytes | memoryview | npt.NDArray[Any]"
_Moved = TypeVar("_Moved")

#: Bytes copied before their checksum is taken. They and their source stay in a core's second-level
#: cache; a checksum after a large copy would read memory again and take half as long as the copy.
_PIECE_BYTES = 1 << 18
#: Smallest part that is worth the start of a thread.
_SHARE_BYTES = 8 << 20
#: Most parts of a file that are read at once; more do not make disks or network file systems
#: faster.
_MOST_STREAMS = 8


class CheckedCopy:
    """Copies pieces one after the other into a target.

    Attributes:
        size: Bytes copied so far.
        checksum: CRC-32C of these bytes.
    """

    def __init__(self, target: memoryview) -> None:
        self._target = np.frombuffer(target, np.uint8)
        self.size = 0
        self.checksum = 0

    def add(self, data: Bytes) -> None:
        """Copy bytes, or the bytes of a contiguous array."""
        source = np.frombuffer(data, np.uint8)
        for start in range(0, source.size, _PIECE_BYTES):
            piece = source[start : start + _PIECE_BYTES]
            copied = self._target[self.size : self.size + piece.size]
            np.copyto(copied, piece)
            self.checksum = crc32c(copied.data, self.checksum)
            self.size += piece.size


def copy_in_parallel(
    target: memoryview, parts: Sequence[memoryview], num_threads: int
) -> tuple[int, int]:
    """Copy parts one after the other into a target, by several threads at once.

    Returns:
        Number of bytes, and their CRC-32C.
    """

    def copy(start: int, stop: int) -> CheckedCopy:
        own = CheckedCopy(target[start:stop])
        for _, part in _within(parts, start, stop):
            own.add(part)
        return own

    total, checksum = sum(part.nbytes for part in parts), 0
    for own in _in_shares(copy, total, num_threads):
        checksum = joined(checksum, own.checksum, own.size) if checksum else own.checksum
    return total, checksum


def read_in_parallel(
    descriptor: int, offset: int, parts: Sequence[memoryview], num_threads: int
) -> list[int]:
    """Fill parts one after the other from a file, by several threads at once.

    Unlike a mapping, this neither maps nor faults in pages, and a failing disk is an error instead
    of a SIGBUS.

    Args:
        descriptor: Descriptor of the file.
        offset: Offset of the first part in the file.
        parts: Writable buffers.
        num_threads: Most threads to use.

    Returns:
        The CRC-32C of each of them.

    Raises:
        OSError: If the file cannot be read.
        EOFError: If the file is too short.
    """

    def read(start: int, stop: int) -> list[tuple[int, int, int]]:
        """Which parts, the bytes that were read of each, and their CRC-32C."""
        found, at = [], offset + start
        for index, part in _within(parts, start, stop):
            checksum = 0
            for first in range(0, len(part), _PIECE_BYTES):
                piece = part[first : first + _PIECE_BYTES]
                read_whole(descriptor, at, piece)
                checksum = crc32c(piece, checksum)
                at += len(piece)
            found.append((index, len(part), checksum))
        return found

    total = sum(len(part) for part in parts)
    checksums: dict[int, int] = {}
    for share in _in_shares(read, total, min(num_threads, _MOST_STREAMS)):
        for index, size, checksum in share:
            # A part that lies in several shares.
            own = checksums.get(index)
            checksums[index] = checksum if own is None else joined(own, checksum, size)
    return [checksums.get(index, 0) for index in range(len(parts))]


def checksum_of(descriptor: int, offset: int, size: int) -> int:
    """Return the CRC-32C of a part of a file, without keeping the bytes.

    Raises:
        OSError: If the file cannot be read.
        EOFError: If the file is too short.
    """
    buffer = memoryview(bytearray(min(size, _PIECE_BYTES)))
    checksum = 0
    for start in range(0, size, _PIECE_BYTES):
        piece = buffer[: size - start]
        read_whole(descriptor, offset + start, piece)
        checksum = crc32c(piece, checksum)
    return checksum


def read_whole(descriptor: int, offset: int, target: memoryview) -> None:
    """Fill ``target`` with the bytes of a file from ``offset`` on.

    Raises:
        OSError: If the file cannot be read.
        EOFError: If the file is too short.
    """
    while target:
        count = os.preadv(descriptor, [target], offset)
        if not count:
            raise EOFError(f"the file ends at byte {offset}, before the end of its content")
        target, offset = target[count:], offset + count


def _within(parts: Sequence[memoryview], start: int, stop: int) -> Iterator[tuple[int, memoryview]]:
    """Bytes ``start`` to ``stop`` of all parts together: which part, and what of it."""
    offset = 0
    for index, part in enumerate(parts):
        first, last = max(start - offset, 0), min(stop - offset, part.nbytes)
        if first < last:
            yield index, part[first:last]
        offset += part.nbytes


def _in_shares(
    move: Callable[[int, int], _Moved], total: int, num_threads: int
) -> Sequence[_Moved]:
    """Move ``total`` bytes in shares, one for each thread.

    Args:
        move: Moves those from a first to a last one.
        total: Bytes.
        num_threads: At most.

    Returns:
        What it returned of each share, in their order.
    """
    num_threads = max(1, min(num_threads, total // _SHARE_BYTES))
    if num_threads == 1:
        return [move(0, total)]
    edges = [total * share // num_threads for share in range(num_threads + 1)]
    with ThreadPoolExecutor(num_threads) as pool:
        return list(pool.map(move, edges[:-1], edges[1:]))
