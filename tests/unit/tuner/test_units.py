from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from lowdiff.errors import ConfigError
from lowdiff.tuner import units


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("4h", 14400),
        ("90 min", 5400),
        ("1.5d", 129600),
        ("30s", 30),
        ("20ms", 0.02),
        ("1e3 s", 1e3),
    ],
)
def test_a_duration_is_read_with_its_unit(text: str, seconds: float) -> None:
    assert units.seconds(text) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("80GB", 80e9),
        ("64 GiB", 64 * 2**30),
        ("500kb", 5e5),
        ("12B", 12),
        ("80000000000", 80e9),
        (" 7e9 ", 7e9),
    ],
)
def test_a_size_is_read_with_its_unit_or_as_bytes(text: str, size: float) -> None:
    assert units.num_bytes(text) == size


def test_a_rate_is_a_size_per_time() -> None:
    assert units.bytes_per_second("2GB/s") == 2e9
    assert units.bytes_per_second("120 MB / min") == 2e6


@pytest.mark.parametrize(
    ("text", "number"), [("7e9", 7e9), ("7B", 7e9), ("350M", 350e6), ("12", 12)]
)
def test_a_count_is_read_as_people_write_model_sizes(text: str, number: float) -> None:
    assert units.count(text) == number


@pytest.mark.parametrize(
    "text", ["4 parsecs", "4", "", "h", "-4h", "0s", "nan s", "inf h", "1.2.3s"]
)
def test_nonsense_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ConfigError, match="write it as 30s"):
        units.seconds(text)


def test_an_unknown_unit_is_named() -> None:
    with pytest.raises(ConfigError, match="'parsecs' is no unit"):
        units.seconds("4 parsecs")


@pytest.mark.parametrize("text", ["2GB", "2GB/parsec", "2/s", "/s", "1e400 GB/s"])
def test_what_is_no_rate_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        units.bytes_per_second(text)


@pytest.mark.parametrize(
    ("read", "text", "what"),
    [
        (units.seconds, "1e300d", "duration"),
        (units.seconds, "1e-300s", "duration"),
        (units.num_bytes, "1e300", "size"),
        (units.num_bytes, "0.5B", "size"),
        (units.bytes_per_second, "1e300B/s", "rate"),
        (units.bytes_per_second, "1e-300 GB/s", "rate"),
        (units.count, "1e300", "number"),
        (units.count, "0.1", "number"),
    ],
)
def test_what_nobody_can_mean_is_refused(
    read: Callable[[str], float], text: str, what: str
) -> None:
    with pytest.raises(ConfigError, match=f"{text}' is no plausible {what}; give one from 1"):
        read(text)


def test_what_somebody_may_just_mean_is_read() -> None:
    assert units.seconds("1ms") == 1e-3
    assert units.seconds("365000d") == 365_000 * 86400
    assert units.bytes_per_second("1B/s") == units.num_bytes("1B") == 1
    assert units.bytes_per_second("0.5B/ms") == 500


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 s"),
        (2e-6, "2 us"),
        (0.05, "50 ms"),
        (90.0, "90 s"),
        (600.0, "10 min"),
        (5400.0, "1.5 h"),
        (4.0 * 86400, "4 d"),
        (math.inf, "never"),
    ],
)
def test_durations_are_shown_in_their_natural_unit(seconds: float, text: str) -> None:
    assert units.readable_seconds(seconds) == text


def test_sizes_are_shown_in_their_natural_unit() -> None:
    assert [units.readable_bytes(x) for x in (12, 4.3e6, 1.25e12)] == ["12 B", "4.3 MB", "1.25 TB"]
