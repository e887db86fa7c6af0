"""When residuals are sent: in the spans of a step in which training leaves the network idle."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from lowdiff.errors import ConfigError

#: A message up to this size takes as long as its start.
_SMALL_BYTES = 64 << 10
#: Messages that a link is measured by.
_MEASURED = 32
#: Of a link that has carried nothing large yet.
_UNKNOWN_BYTES_PER_SECOND = 1e9


@dataclass(frozen=True, slots=True)
class Link:
    """What sending costs: ``startup_seconds + size / bytes_per_second``.

    Raises:
        ConfigError: If the bandwidth is not positive, or the start-up time is negative.
    """

    bytes_per_second: float
    startup_seconds: float

    def __post_init__(self) -> None:
        if not 0 < self.bytes_per_second < math.inf:
            raise ConfigError(f"bytes_per_second is positive, got {self.bytes_per_second}")
        if not 0 <= self.startup_seconds < math.inf:
            raise ConfigError(f"startup_seconds is 0 or more, got {self.startup_seconds}")

    def seconds(self, num_bytes: int) -> float:
        """Return how long one chunk takes."""
        return self.startup_seconds + num_bytes / self.bytes_per_second


class LinkMeter:
    """Estimate a link from what it carried: its start from small messages, its bandwidth from large ones."""

    def __init__(self) -> None:
        self._small: deque[float] = deque(maxlen=_MEASURED)
        self._large: deque[tuple[int, float]] = deque(maxlen=_MEASURED)

    def add(self, num_bytes: int, seconds: float) -> None:
        """Note one message."""
        if num_bytes <= _SMALL_BYTES:
            self._small.append(seconds)
        else:
            self._large.append((num_bytes, seconds))

    def link(self) -> Link:
        """Return the estimate."""
        startup = median(self._small) if self._small else 0.0
        if not self._large:
            return Link(_UNKNOWN_BYTES_PER_SECOND, startup)
        # A start that was measured while the machine was loaded may be longer than a whole chunk took.
        seconds = sum(max(taken - startup, taken / 2) for _, taken in self._large)
        return Link(sum(size for size, _ in self._large) / max(seconds, 1e-9), startup)


@dataclass(frozen=True, slots=True)
class Chunk:
    """One transfer.

    Attributes:
        span: Index of the idle span in which it starts; the number of spans for what fits into none.
        copy: Which copy it belongs to, from 0.
        bytes: Size, at least 1.
    """

    span: int
    copy: int
    bytes: int


def schedule(
    idle_seconds: Sequence[float],
    *,
    copies: int,
    copy_bytes: int,
    buffer_bytes: int,
    parts: int,
    link: Link,
    safety: float,
) -> tuple[Chunk, ...]:
    """Divide what a step must send into chunks, and these over the idle spans of a step.

    Every span is filled up to ``safety`` times its length, with chunks of one part of the buffer and a
    last one of what still fits. What fits into no span follows after all of them, as if in a span
    without end: then a step sends for longer than it is idle, and copies should be made less often.

    Reference: Wang et al., "GEMINI: Fast Failure Recovery in Distributed Training with In-Memory
    Checkpoints", SOSP 2023, section 5 (partition of checkpoints). We round sizes down to bytes.

    Args:
        idle_seconds: Length of each span, in the order of the step.
        copies: How many copies are sent: one less than on how many nodes a step lies.
        copy_bytes: Size of each.
        buffer_bytes: Receive buffer, which bounds what is under way.
        parts: How many chunks lie in the buffer at a time.
        link: What sending costs.
        safety: Share of a span that is used, in (0, 1].

    Raises:
        ConfigError: If a value cannot work.
    """
    _check(idle_seconds, copies, copy_bytes, safety)
    if parts < 1 or buffer_bytes < parts:
        raise ConfigError(
            f"a buffer of {buffer_bytes} bytes cannot have {parts} parts of a byte or more"
        )
    part = buffer_bytes // parts
    chunks: list[Chunk] = []
    copy, remaining = (0, copy_bytes) if copy_bytes else (copies, 0)
    for span, seconds in enumerate([*idle_seconds, math.inf]):
        left = safety * seconds
        while left > 0 and copy < copies:
            size = min(_fitting(left, part, link), remaining)
            if size == 0:
                break
            chunks.append(Chunk(span, copy, size))
            left -= link.seconds(size)
            remaining -= size
            if remaining == 0:
                copy, remaining = copy + 1, copy_bytes
    return tuple(chunks)


def _fitting(left: float, part: int, link: Link) -> int:
    """Return how many bytes a chunk may have that starts with ``left`` seconds to go."""
    if left >= link.seconds(part):
        return part
    return max(0, int((left - link.startup_seconds) * link.bytes_per_second))


def _check(idle_seconds: Sequence[float], copies: int, copy_bytes: int, safety: float) -> None:
    if copies < 0 or copy_bytes < 0:
        raise ConfigError(f"nothing can send {copies} copies of {copy_bytes} bytes")
    if not 0 < safety <= 1:
        raise ConfigError(f"safety is the share of a span that is used, in (0, 1], got {safety}")
    for seconds in idle_seconds:
        if not 0 <= seconds < math.inf:
            raise ConfigError(f"an idle span lasts 0 seconds or more, got {seconds}")
