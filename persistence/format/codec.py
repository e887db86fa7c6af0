"""Lossless compression of a record: arrays by gaps, byte planes and zstd, text by zstd.

Bytes of one significance look alike (exponents repeat, high bytes of gaps are mostly 0). Each byte
plane is therefore compressed on its own, and a plane of noise is stored as it is. A coded array is
a plane count (u8), the stored bytes of each plane (u64 each), then the planes, least significant
first; all little-endian. ``"raw"`` is the array's bytes. An empty array has no bytes. Item type and
count are in the section's header.
"""

from __future__ import annotations

import struct
import threading
from typing import Any

import numpy as np
import numpy.typing as npt
import zstandard

from lowdiff.errors import ConfigError
from lowdiff.persistence.format.values import BadEncoding
from lowdiff.types import Bits

#: Every coding; the position is the coding's number in files.
CODINGS = ("raw", "ascending", "planes")

_INT64 = np.dtype("<i8")
_UNSIGNED = tuple(map(np.dtype, ("<u1", "<u2", "<u4", "<u8")))
# A zstd block of 4 bytes makes at most 128 KiB.
_MAX_RATIO = 1 << 15
# Scalars have no count of their own, so this ratio bounds what they may expand to.
_MAX_TEXT_RATIO = 256

_Unsigned = npt.NDArray[np.unsignedinteger[Any]]


class Codec:
    """Encodes and decodes arrays; may be shared between threads.

    Args:
        max_payload_bytes: Most bytes that a record's sections may decode to, for records of
            unknown origin; None leaves only zstd's own limit.
    """

    def __init__(self, *, max_payload_bytes: int | None = None) -> None:
        self._zstd = _Contexts()
        self.max_payload_bytes = max_payload_bytes

    def encode(self, coding: str, data: Bits) -> bytes:
        """Code a one-dimensional array.

        Args:
            coding: One of ``CODINGS``.
            data: int64, not negative, strictly ascending, for ``"ascending"``; else unsigned.

        Raises:
            ConfigError: If the coding is unknown, or the array does not fit the coding.
        """
        _check_type(coding, data.dtype, ConfigError)
        if data.ndim != 1:
            raise ConfigError(f"a section has one dimension, got shape {data.shape}; flatten it")
        if data.size == 0:
            return b""
        if coding == "raw":
            return data.tobytes()
        words, num_planes = _gaps(data) if coding == "ascending" else (data, data.itemsize)
        planes = [self._shrunk(plane) for plane in _split(words, num_planes)]
        sizes = struct.pack(f"<B{len(planes)}Q", len(planes), *map(len, planes))
        return b"".join([sizes, *planes])

    def decode(
        self, coding: str, dtype: np.dtype[Any], count: int, data: bytes | memoryview
    ) -> Bits:
        """Rebuild the array in its own memory.

        A ``count`` above 2^15 times the length of ``data``, the most that zstd can expand, is
        refused before anything is allocated.

        Args:
            coding: The coding that the array was encoded with.
            dtype: Item type of the array.
            count: Number of entries.
            data: Result of :meth:`encode`, or arbitrary bytes.

        Raises:
            BadEncoding: If ``data`` is not exactly ``count`` entries in that coding.
        """
        _check_type(coding, dtype, BadEncoding)
        if coding == "raw" or count == 0:
            if count * dtype.itemsize != len(data):
                raise BadEncoding(f"{len(data)} bytes for {count} entries of {dtype}")
            return np.frombuffer(data, dtype).copy()
        planes = _parse_planes(memoryview(data).cast("B"))
        if coding == "ascending":
            return _ascending(self._joined(planes, _word_of(len(planes)), count))
        if len(planes) != dtype.itemsize:
            raise BadEncoding(f"{len(planes)} byte planes for {dtype}")
        return self._joined(planes, dtype, count)

    def shrink(self, text: bytes | memoryview) -> bytes | None:
        """Return ``text`` as one zstd frame with its size; None if it must be stored as it is.

        None means that a frame would not be smaller, or would expand more than 256 times.
        """
        frame = self._zstd.compressor.compress(text)
        return frame if len(frame) < len(text) <= _MAX_TEXT_RATIO * len(frame) else None

    def expand(self, frame: bytes | memoryview) -> bytes:
        """Undo ``shrink``.

        Raises:
            BadEncoding: If ``frame`` is not exactly one such frame. A frame that claims to expand
                more than 256 times is refused before anything is allocated.
        """
        size = _content_size(frame)
        if not len(frame) < size <= _MAX_TEXT_RATIO * len(frame):
            raise BadEncoding(f"a zstd frame of {size} bytes in {len(frame)}")
        return self._expanded(frame)

    def _shrunk(self, plane: npt.NDArray[np.uint8]) -> bytes | memoryview:
        frame = self._zstd.compressor.compress(plane.data)
        # Strictly smaller, so that the length distinguishes a frame from a plane stored as it is.
        return frame if len(frame) < plane.size else plane.data

    def _joined(self, planes: list[memoryview], dtype: np.dtype[Any], count: int) -> _Unsigned:
        for plane in planes:  # check all planes before anything is allocated
            _check_plane(plane, count)
        words = np.zeros(count, dtype)
        columns = words.view(np.uint8).reshape(count, dtype.itemsize)
        for i, plane in enumerate(planes):
            stored = plane if len(plane) == count else self._expanded(plane)
            columns[:, i] = np.frombuffer(stored, np.uint8)
        return words

    def _expanded(self, frame: bytes | memoryview) -> bytes:
        try:
            return self._zstd.decompressor.decompress(frame, allow_extra_data=False)
        except zstandard.ZstdError as e:
            raise BadEncoding(f"a damaged zstd frame: {e}") from e


class _Contexts(threading.local):
    """zstd contexts, one pair per thread: they are slow to make and must not be shared."""

    def __init__(self) -> None:
        # On selected gradients, level 3 saves at most 1 % more than level 1.
        self.compressor = zstandard.ZstdCompressor(level=1)
        self.decompressor = zstandard.ZstdDecompressor()


def _check_plane(plane: memoryview, count: int) -> None:
    if len(plane) == count:
        return
    if not len(plane) < count <= len(plane) * _MAX_RATIO:
        raise BadEncoding(f"{len(plane)} bytes for a plane of {count}")
    size = _content_size(plane)
    if size != count:
        raise BadEncoding(f"a zstd frame of {size} bytes for a plane of {count}")


def _content_size(frame: bytes | memoryview) -> int:
    """Return the size that a zstd frame claims to expand to; -1 if it names none."""
    try:
        return zstandard.frame_content_size(frame)
    except zstandard.ZstdError as e:
        raise BadEncoding(f"no zstd frame: {e}") from e


def _check_type(coding: str, dtype: np.dtype[Any], error: type[ConfigError | BadEncoding]) -> None:
    if coding not in CODINGS:
        raise error(f"unknown coding {coding!r}; one of {', '.join(CODINGS)}")
    if coding == "ascending" and dtype != _INT64:
        raise error(f"coding 'ascending' takes int64, got {dtype}")
    if coding != "ascending" and dtype not in _UNSIGNED:
        raise error(f"coding {coding!r} takes unsigned bit patterns, got {dtype}; view them so")


def _gaps(data: Bits) -> tuple[_Unsigned, int]:
    """Return distances minus one, the first counted from -1, and the bytes of the largest distance.

    Minus one, so that every decoded sequence is strictly ascending.
    """
    if data[0] < 0 or not (data[1:] > data[:-1]).all():
        raise ConfigError(
            "coding 'ascending' takes positions in strictly ascending order from 0 up; sort them "
            "and drop duplicates, or use coding 'raw'"
        )
    gaps = np.empty_like(data)  # np.diff with prepend makes two more passes over memory
    gaps[0] = data[0]
    np.subtract(data[1:], data[:-1], out=gaps[1:])
    gaps[1:] -= 1
    num_bytes = max(1, (int(gaps.max()).bit_length() + 7) // 8)
    return gaps.astype(_word_of(num_bytes)), num_bytes


def _ascending(gaps: _Unsigned) -> npt.NDArray[np.int64]:
    """Undo ``_gaps``."""
    if gaps.itemsize == 8 and int(gaps.max()) > np.iinfo(_INT64).max:
        raise BadEncoding("a gap beyond int64")
    positions = gaps.astype(_INT64)
    positions[1:] += 1
    np.cumsum(positions, out=positions)
    # No term exceeds 2^63, so the first sum beyond int64 wraps to a negative number.
    if positions.min() < 0:
        raise BadEncoding("positions beyond int64")
    return positions


def _word_of(num_bytes: int) -> np.dtype[Any]:
    return next(dtype for dtype in _UNSIGNED if dtype.itemsize >= num_bytes)


def _split(words: Bits, num_planes: int) -> list[npt.NDArray[np.uint8]]:
    return [(words >> words.dtype.type(8 * i)).astype(np.uint8) for i in range(num_planes)]


def _parse_planes(data: memoryview) -> list[memoryview]:
    num_planes = data[0] if data else 0
    start = 1 + 8 * num_planes
    if not 1 <= num_planes <= 8 or len(data) < start:
        raise BadEncoding(f"{len(data)} bytes are too few for {num_planes} byte planes")
    planes = []
    for size in struct.unpack_from(f"<{num_planes}Q", data, 1):
        planes.append(data[start : start + size])
        start += size
    if start != len(data):
        raise BadEncoding(f"byte planes of {start} bytes in {len(data)}")
    return planes
