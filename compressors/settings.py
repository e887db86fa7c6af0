"""Common settings of compressors: checked values, and the form in which a run records them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from numbers import Real
from typing import Any

import torch

from lowdiff.compressors.feedback import residuals_of
from lowdiff.core.layout import dtype_name
from lowdiff.errors import ConfigError, UnsupportedModel
from lowdiff.types import Layout

_VALUE_BITS = (2, 4)
_HALVES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class Settings:
    """Methods of a `Compressor` that are the same for most compressors."""

    def settings(self) -> Mapping[str, Any]:
        """Return the constructor's arguments, dtypes by name."""
        return {
            name: dtype_name(value) if isinstance(value, torch.dtype) else value
            for name, value in asdict(self).items()
        }

    def residual_layout(self, layout: Layout) -> Layout:
        """Return a layout with one residual per parameter."""
        return residuals_of(layout)


@dataclass(frozen=True, slots=True)
class SparseSettings(Settings):
    """Settings of compressors that keep some entries.

    Attributes:
        density: Share of entries kept, in (0, 1].
        dense_below: Parameters with fewer elements are exchanged whole.
        value_bits: 2 or 4 sends and stores a value as its sign and one of 2 or 8 magnitude bins,
            and error feedback keeps the difference; see `compressors.binned`. None keeps the dtype.

    Raises:
        ConfigError: If a setting is out of range.
    """

    density: float
    dense_below: int = 1024
    value_bits: int | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        is_number = isinstance(self.density, Real) and not isinstance(self.density, bool)
        if not is_number or not 0 < self.density <= 1:
            raise ConfigError(
                f"density must be in (0, 1], got {self.density!r}; 0.01 keeps 1 % of the entries"
            )
        checked_size("dense_below", "elements", self.dense_below)
        if self.value_bits not in (None, *_VALUE_BITS) or isinstance(self.value_bits, float):
            raise ConfigError(
                f"value_bits is 2, 4 or None, got {self.value_bits!r}; None keeps the dtype of "
                "values, and Quantize(8) sends every entry in 8 bits"
            )

    def residual_layout(self, layout: Layout) -> Layout:
        """Return a layout with one residual per parameter.

        Raises:
            UnsupportedModel: If a parameter has more elements than 32 bits number.
        """
        for spec in layout.parameters:
            refuse_large(f"parameter {spec.name!r}", spec.numel)
        return residuals_of(layout)

    def density_at(self, step: int | None) -> float:
        """Return the density of a step, counted from 1; None stands for any step after a warm-up."""
        return self.density

    def kept(self, numel: int, step: int | None = None) -> int:
        """Return how many entries of a parameter are exchanged: all of a small parameter.

        It is the same on every rank, and a reducer must send exactly so many.
        """
        if numel < self.dense_below:
            return numel
        return min(numel, max(1, math.ceil(self.density_at(step) * numel)))


def refuse_large(what: str, numel: int) -> None:
    """Raise UnsupportedModel if positions of entries would not fit 32 bits, in which they travel."""
    if numel >= 1 << 31:
        raise UnsupportedModel(
            f"{what} has {numel:,} elements, and positions of entries have 31 bits: divide it, or take "
            "PowerSGD, Quantize or Cast, which send no positions"
        )


def checked_size(name: str, unit: str, value: int) -> None:
    """Raise ConfigError if a count is negative or not an int."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ConfigError(f"{name} counts {unit}, got {value!r}")


def checked_seed(seed: int, bits: int) -> None:
    """Raise ConfigError unless ``0 <= seed < 2 ** bits``."""
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 1 << bits:
        raise ConfigError(f"seed must be an int in 0 .. 2**{bits} - 1, got {seed!r}")


def half_width(name: str, dtype: torch.dtype | str) -> torch.dtype:
    """Return a setting as torch.bfloat16 or torch.float16.

    Raises:
        ConfigError: If the setting is another dtype.
    """
    key = dtype_name(dtype) if isinstance(dtype, torch.dtype) else dtype
    if key not in _HALVES:
        raise ConfigError(f"{name} is torch.bfloat16 or torch.float16, got {dtype!r}")
    return _HALVES[key]


def refuse_other_half(layout: Layout, dtype: torch.dtype, what: str) -> None:
    """Raise UnsupportedModel if a parameter has the half-width dtype other than ``dtype``."""
    other = next(name for name, half in _HALVES.items() if half != dtype)
    strange = [spec.name for spec in layout.parameters if spec.dtype == other]
    if strange:
        raise UnsupportedModel(
            f"parameter {strange[0]!r} is {other}, whose values {what} cannot hold; choose "
            f"torch.{other} instead"
        )
