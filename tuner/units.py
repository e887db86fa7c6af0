"""Parse durations, sizes and rates: ``4h``, ``90 min``, ``80GB``, ``2GB/s``, ``7e9``."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from lowdiff.errors import ConfigError

_SECONDS: Mapping[str, float] = {
    "us": 1e-6,
    "ms": 1e-3,
    "s": 1.0,
    "sec": 1.0,
    "m": 60.0,
    "min": 60.0,
    "h": 3600.0,
    "d": 86400.0,
    "w": 604800.0,
}
_BYTES: Mapping[str, float] = {
    "b": 1.0,
    **{f"{prefix}b": 1000.0**power for power, prefix in enumerate("kmgtp", 1)},
    **{f"{prefix}ib": 1024.0**power for power, prefix in enumerate("kmgtp", 1)},
}
#: Unit of a size -> bytes. A number without a unit counts bytes, as in JSON and Python.
_SIZES: Mapping[str, float] = {"": 1.0, **_BYTES}
_COUNTS: Mapping[str, float] = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
#: Plausible values. Beyond them, figures of a report would leave the range of numbers.
_DURATIONS = (1e-9, 1000 * 365.25 * 86400.0)
_AMOUNTS = (1.0, 1e21)
#: Unit, its seconds, and the number of this unit from which on it is used.
_READABLE = (
    ("d", 86400.0, 2),
    ("h", 3600.0, 1),
    ("min", 60.0, 2),
    ("s", 1.0, 1),
    ("ms", 1e-3, 1),
)
_QUANTITY = re.compile(r"\s*([-+]?[0-9.]+(?:e[-+]?[0-9]+)?)\s*([a-z]*)\s*", re.IGNORECASE)


def seconds(text: str) -> float:
    """Return the seconds of a duration such as ``4h``, ``90min`` or ``1.5 d``.

    Raises:
        ConfigError: If the text is no positive duration, has no unit, or is out of range.
    """
    value = _positive(text, _SECONDS, "a duration", "30s, 90min, 4h or 2d")
    return _plausible(text, value, _DURATIONS, "duration", "1 ns to 1000 years")


def num_bytes(text: str) -> float:
    """Return the bytes of a size such as ``80GB`` (1000s), ``64GiB`` (1024s) or ``80000000000``.

    Raises:
        ConfigError: If the text is no positive size, or is out of range.
    """
    value = _positive(text, _SIZES, "a size", "500MB, 80GB or 64GiB")
    return _plausible(text, value, _AMOUNTS, "size", "1 B to 1e21 B")


def bytes_per_second(text: str) -> float:
    """Return the bytes per second of a rate such as ``2GB/s``.

    Raises:
        ConfigError: If the text is no positive rate, has no unit, or is out of range.
    """
    size, slash, per = text.partition("/")
    if slash and per.strip().lower() in _SECONDS:
        value = _positive(size, _BYTES, "a size", "500MB, 80GB or 64GiB")
        value /= _SECONDS[per.strip().lower()]
        return _plausible(text, value, _AMOUNTS, "rate", "1 B/s to 1e21 B/s")
    raise ConfigError(f"{text!r} is not a rate; write it as 500MB/s or 2GB/s")


def count(text: str) -> float:
    """Return a number such as ``7e9``, ``7B`` or ``350M``.

    Raises:
        ConfigError: If the text is no positive number, or is out of range.
    """
    value = _positive(text, _COUNTS, "a number", "7e9, 7B or 350M")
    return _plausible(text, value, _AMOUNTS, "number", "1 to 1e21")


def _positive(text: str, units: Mapping[str, float], what: str, examples: str) -> float:
    match = _QUANTITY.fullmatch(text)
    factor = None if match is None else units.get(match[2].lower())
    try:
        value = math.nan if match is None or factor is None else float(match[1]) * factor
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        unit = f": {match[2]!r} is no unit of it" if match and factor is None and match[2] else ""
        raise ConfigError(f"{text!r} is not {what}{unit}; write it as {examples}")
    return value


def _plausible(
    text: str, value: float, bounds: tuple[float, float], what: str, readable: str
) -> float:
    low, high = bounds
    if not low <= value <= high:
        raise ConfigError(f"{text!r} is no plausible {what}; give one from {readable}")
    return value


def readable_seconds(value: float) -> str:
    """Format a duration in its natural unit with three digits."""
    if math.isinf(value):
        return "never"
    for unit, size, least in _READABLE:
        if value >= size * least:
            return f"{_short(value / size)} {unit}"
    return f"{_short(value / 1e-6)} us" if value else "0 s"


def readable_bytes(value: float) -> str:
    """Format a size in its natural unit of 1000s with three digits."""
    for unit, size in (("PB", 1e15), ("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= size:
            return f"{_short(value / size)} {unit}"
    return f"{_short(value)} B"


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
