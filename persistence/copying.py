"""Copying into memory that outlives the process, and its checksum, in one pass."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from crc32c import crc32c

#: As much as stays in a core's second-level cache from the copy to its checksum. A checksum over
#: all of a large copy reads it from memory again, which takes half as long as the copy itself.
_PIECE_BYTES = 1 << 20


class CheckedCopy:
    """Puts one thing after the other into a target.

    Attributes:
        size: Bytes so far.
        checksum: CRC-32C of them.
    """

    def __init__(self, target: memoryview) -> None:
        self._target = target
        self.size = 0
        self.checksum = 0

    def add(self, data: bytes | memoryview | npt.NDArray[Any]) -> None:
        """Copy bytes, or those of a contiguous array."""
        source = np.frombuffer(data, np.uint8)
        for start in range(0, source.size, _PIECE_BYTES):
            piece = source[start : start + _PIECE_BYTES]
            copied = self._target[self.size : self.size + piece.size]
            np.copyto(np.frombuffer(copied, np.uint8), piece)
            self.checksum = crc32c(copied, self.checksum)
            self.size += piece.size
