"""Changes of a gradient between its exchange and the optimizer: the exact factors, if there are any.

A scaler's ``unscale_`` and clipping multiply every entry by one number. A compressor whose payload
is not the consumed values themselves (narrow, quantised, low rank) must store this number exactly,
so that the product has the same bits. `find_factors` finds it from the entries: each entry allows
an interval of factors that round to it, and the intersection of all intervals rarely holds more
than a few numbers. Every candidate is tried on all entries, and bits are compared.
 Noise, manual weight decay, centralising and the like leave entries that no rank exchanged, or
values that no factor explains. Such a gradient is stored whole for this step: every rank stores its
range (`lane.share`) under the sections ``whole/parameters`` and ``whole/DTYPE``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeAlias

import numpy as np
import torch

from lowdiff.core import devices
from lowdiff.core.events import Code
from lowdiff.core.layout import INT_OF_BYTES
from lowdiff.core.memory import array_of
from lowdiff.types import Layout

#: Factors in the order in which they were applied; empty if the gradient is unchanged.
Factors = tuple[float, ...]
#: Factors that are known beforehand; some as tensors ``[]`` on an accelerator, which the host has not read.
Known: TypeAlias = "tuple[float | torch.Tensor, ...]"

#: Entries that the search examines; afterwards all entries are checked.
_SAMPLES = 1 << 12
_MAX_TRIES = 16
_NUM_SIGNIFICANT_BITS = {
    torch.float64: 53,
    torch.float32: 24,
    torch.float16: 11,
    torch.bfloat16: 8,
}


def multiply(values: torch.Tensor, factors: Sequence[float]) -> torch.Tensor:
    """Multiply in place, one factor after the other, each product rounded to the dtype."""
    for factor in factors:
        # A zero-dimensional factor keeps its own precision next to half-width values.
        dtype = torch.float64 if values.dtype == torch.float64 else torch.float32
        values.mul_(torch.tensor(factor, dtype=dtype, device=values.device))
    return values


def find_factors(
    before: torch.Tensor, after: torch.Tensor, known: Sequence[Factors] = ()
) -> Factors | None:
    """Find the factors that turn one tensor into another, bit for bit.

    Args:
        before: Flat tensor, finite.
        after: The same shape and dtype, finite.
        known: Factors to try first; each is also tried with one unknown factor after it.

    Returns:
        The factors, or None if no product gives these bits.
    """
    if equal_bits(before, after):
        return ()
    for factors in known:
        if factors and equal_bits(multiply(before.clone(), factors), after):
            return factors
    for factors in dict.fromkeys([(), *known]):
        scaled = multiply(before.clone(), factors)
        for factor in _candidates(scaled, after):
            if equal_bits(multiply(scaled.clone(), (factor,)), after):
                return (*factors, factor)
    return None


def read(known: Known) -> Factors:
    """Return factors as numbers; waits, once, for those that are on an accelerator."""
    there = [factor.reshape(1) for factor in known if isinstance(factor, torch.Tensor)]
    arrived = iter(devices.fetched(there))
    return tuple(
        float(next(arrived)) if isinstance(factor, torch.Tensor) else factor for factor in known
    )


def equal_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Return whether two flat tensors of one dtype have the same bits: 0.0 is not -0.0."""
    integer = INT_OF_BYTES[left.element_size()]
    return torch.equal(left.view(integer), right.view(integer))


def _candidates(before: torch.Tensor, after: torch.Tensor) -> Iterator[float]:
    """Yield numbers whose product with a sample of ``before`` rounds to ``after``, likeliest first."""
    # Use a sample, because positions of all entries would take twice the tensor's memory.
    stride = max(1, before.numel() // _SAMPLES)
    told = torch.nonzero(before[::stride]).flatten() * stride
    if told.numel() == 0:
        told = torch.nonzero(before).flatten()[:_SAMPLES]
    if told.numel() == 0:
        yield 0.0
        return
    # Extended precision keeps the intervals of float64 entries correct as well.
    x = array_of(before[told].double().cpu()).astype(np.longdouble)
    y = array_of(after[told].double().cpu()).astype(np.longdouble)
    mantissa, exponent = np.frexp(y)
    significant = _NUM_SIGNIFICANT_BITS[after.dtype]
    least = np.longdouble(torch.finfo(after.dtype).smallest_normal) * np.ldexp(0.5, 1 - significant)
    half_ulp = np.ldexp(np.longdouble(1), exponent - significant - 1)
    half_ulp = np.where(y == 0, least, np.maximum(half_ulp, least))
    # Below a power of two, numbers lie twice as close.
    inner = np.where((np.abs(mantissa) == 0.5) & (half_ulp > least), half_ulp / 2, half_ulp)
    away = np.where(y < 0, -1, 1)
    ends = np.sort(np.stack([(y - away * inner) / x, (y + away * half_ulp) / x]), axis=0)
    low, high = ends[0].max(), ends[1].min()
    if low > high:
        return
    kind = np.float64 if after.dtype == torch.float64 else np.float32
    middle = kind((low + high) / 2)
    below = above = middle
    yield float(middle)
    for _ in range(_MAX_TRIES // 2):
        below, above = np.nextafter(below, kind(-np.inf)), np.nextafter(above, kind(np.inf))
        yield from (float(f) for f in (below, above) if low <= f <= high)


def likeliest_factor(before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    """Return the likeliest of the numbers whose product with ``before`` rounds to ``after``, without waiting.

    Args:
        before: Flat sample of entries.
        after: Likewise, of the same dtype.

    Returns:
        float32 ``[]``; 1.0 where there is no such number, or nothing tells.
    """
    x, y = before.double(), after.double()
    mantissa, exponent = torch.frexp(y)
    significant = _NUM_SIGNIFICANT_BITS[after.dtype]
    least = torch.finfo(after.dtype).smallest_normal * 2.0**-significant
    half_ulp = torch.ldexp(torch.ones_like(y), exponent - significant - 1).clamp_(min=least)
    half_ulp = torch.where(y == 0, least, half_ulp)
    # As in `_candidates`: below a power of two, numbers lie twice as close.
    is_edge = (mantissa.abs() == 0.5) & (half_ulp > least)
    away = torch.where(y < 0, -1.0, 1.0)
    inner = y - away * torch.where(is_edge, half_ulp / 2, half_ulp)
    ends = torch.stack([inner / x, (y + away * half_ulp) / x])
    is_told = (x != 0) & y.isfinite()
    low = torch.where(is_told, ends.amin(0), -torch.inf).amax()
    high = torch.where(is_told, ends.amax(0), torch.inf).amin()
    middle = (low + high) / 2
    return torch.where(middle.isfinite() & (low <= high), middle, 1.0).float()


def has_foreign_entries(gradient: torch.Tensor, exchanged: Sequence[torch.Tensor]) -> bool:
    """Return whether a gradient has an entry other than +0.0 at a place that no rank exchanged.

    Args:
        gradient: Flat, on the CPU; unchanged on return.
        exchanged: Positions in the gradient; they may overlap.
    """
    patterns = gradient.view(INT_OF_BYTES[gradient.element_size()])
    places = [where.long() for where in exchanged if where.numel()]
    kept = [(where, patterns.index_select(0, where)) for where in places]
    # Zero the exchanged places for a moment: this needs no memory of the gradient's size.
    for where, _ in kept:
        patterns.index_fill_(0, where, 0)
    found = bool(patterns.count_nonzero())
    for where, values in kept:
        patterns.index_copy_(0, where, values)
    return found


class ChangeWarning:
    """Warns once per parameter that its gradient is changed, and names the cost."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._told: set[int] = set()

    def say(self, parameters: Sequence[int]) -> None:
        """Warn about those parameters (layout indices) that were not named before."""
        news = [i for i in parameters if i not in self._told]
        if not news:
            return
        self._told.update(news)
        specs = [self._layout.parameters[i] for i in news]
        more = f" and {len(news) - 1} more" if len(news) > 1 else ""
        Code.GRADIENT_CHANGED.warn(
            f"the gradient of {specs[0].name!r}{more} was changed between its exchange and "
            "optimizer.step() by more than a factor; each such step stores these gradients whole, "
            f"{sum(spec.nbytes for spec in specs):,} bytes over all ranks. Clip with "
            "checkpointer.clip_grad_norm_(...) and move other changes into the loss or the "
            "optimizer. This warning appears once per parameter",
        )
