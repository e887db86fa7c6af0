"""Sums by PyTorch's operations, exact on every device; see `lowdiff.core.sums`."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lowdiff.core.layout import flat

#: Words of a row.
ROW = 4096
_WORD = 4
#: Units that are summed at once: temporaries are eight times as large.
_CHUNK = 1 << 22
_UNITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def plain_sums(
    tensors: Sequence[torch.Tensor], starts: Sequence[int] | None = None
) -> torch.Tensor:
    """See `lowdiff.core.sums.Sums`."""
    pairs = zip(tensors, starts or [0] * len(tensors), strict=True)
    return torch.stack([_sum(*in_units(tensor, start)) for tensor, start in pairs])


def in_units(tensor: torch.Tensor, start: int) -> tuple[torch.Tensor, int]:
    """Return a tensor as flat integers of at most a word, and the place of the first among those of its whole."""
    size = tensor.element_size()
    unit = min(size, _WORD)
    return flat(tensor).view(_UNITS[unit]), start * (size // unit)


def weights(first: int, count: int, device: torch.device) -> torch.Tensor:
    """Return outputs of splitmix64 from one on, made odd, as int64."""
    z = torch.arange(first + 1, first + count + 1, device=device) * _signed(0x9E3779B97F4A7C15)
    z = (z ^ _shifted(z, 30)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ _shifted(z, 27)) * _signed(0x94D049BB133111EB)
    return z ^ _shifted(z, 31) | 1


def _shifted(values: torch.Tensor, by: int) -> torch.Tensor:
    """Shift to the right; zeros come in."""
    return (values >> by) & ((1 << 64 - by) - 1)


def _signed(number: int) -> int:
    return number - (1 << 64) if number >> 63 else number


def _sum(units: torch.Tensor, start: int) -> torch.Tensor:
    """Sum units of a tensor from one on."""
    size, device = units.element_size(), units.device
    total = torch.zeros((), dtype=torch.int64, device=device)
    columns = weights(0, ROW, device)
    for begin in range(0, units.numel(), _CHUNK):
        part = units[begin : begin + _CHUNK]
        first = start + begin
        place = torch.arange(first, first + part.numel(), device=device) * size
        word = place // _WORD
        lowest = first * size // _WORD // ROW
        count = (first + part.numel() - 1) * size // _WORD // ROW - lowest + 1
        rows = weights(ROW + lowest, count, device)
        bits = (part.long() & ((1 << 8 * size) - 1)) << 8 * (place % _WORD)
        total += (bits * columns[word % ROW] * rows[word // ROW - lowest]).sum()
    return total
