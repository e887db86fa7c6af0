"""The checksum that the log holds of a tensor, taken in one piece."""

from __future__ import annotations

import torch
from crc32c import crc32c

from lowdiff.core.memory import byte_view


def checksum(tensor: torch.Tensor) -> int:
    """CRC-32C of a dense tensor's bytes in memory order; 0 of an empty one."""
    return int(crc32c(byte_view(tensor.detach()))) if tensor.numel() else 0
