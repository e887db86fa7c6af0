"""Checks of compressors' settings, with messages that say what would work."""

from __future__ import annotations

import math

import torch

from lowdiff.core.layout import dtype_name
from lowdiff.errors import ConfigError, UnsupportedModel
from lowdiff.types import Layout

_HALVES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def checked_density(density: float) -> None:
    """Raises ConfigError unless ``0 < density <= 1``."""
    if not 0 < density <= 1:
        raise ConfigError(
            f"density must be in (0, 1], got {density}; 0.01 keeps 1 % of the entries"
        )


def checked_size(name: str, unit: str, value: int) -> None:
    """Raises ConfigError if a count is negative, or not an int."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ConfigError(f"{name} counts {unit}, got {value}")


def half_width(name: str, dtype: torch.dtype | str) -> torch.dtype:
    """A setting as torch.bfloat16 or torch.float16.

    Raises:
        ConfigError: If it is neither.
    """
    key = dtype_name(dtype) if isinstance(dtype, torch.dtype) else dtype
    if key not in _HALVES:
        raise ConfigError(f"{name} is torch.bfloat16 or torch.float16, got {dtype!r}")
    return _HALVES[key]


def refuse_other_half(layout: Layout, dtype: torch.dtype, what: str) -> None:
    """Raises UnsupportedModel if a parameter has the half-width dtype that is not ``dtype``."""
    other = next(name for name, half in _HALVES.items() if half != dtype)
    strange = [spec.name for spec in layout.parameters if spec.dtype == other]
    if strange:
        raise UnsupportedModel(
            f"parameter {strange[0]!r} is {other}, whose values {what} cannot hold; choose "
            f"torch.{other} instead"
        )


def kept_of(numel: int, density: float, dense_below: int) -> int:
    """How many entries of a parameter are kept: at least the density, small ones whole."""
    if numel < dense_below:
        return numel
    return min(numel, max(1, math.ceil(density * numel)))
