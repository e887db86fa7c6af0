"""What a campaign reports."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

#: At most so many lost steps are described one by one.
_DESCRIBED = 20


@dataclass
class Outcome:
    """One row of the soak table.

    Attributes:
        tried: In words: what was done to the run.
        seed: Of everything random.
        rounds: How often.
        found: Verdict -> how often it was reached.
        lost: What must not happen, one line each: a committed step that did not come back, wrong
            numbers, an error without a name, a training that ended.
        not_run: Why a part was left out on this machine; empty if nothing was.
        seconds: How long it took.
    """

    tried: str
    seed: int
    rounds: int = 0
    found: Counter[str] = field(default_factory=Counter)
    lost: list[str] = field(default_factory=list)
    not_run: str = ""
    seconds: float = 0.0

    def lose(self, what: str) -> None:
        """Note a failure; the count is exact even where the words are cut."""
        self.lost.append(what if len(self.lost) < _DESCRIBED else "and more of the same")

    @contextmanager
    def timed(self) -> Iterator[Outcome]:
        """Measure how long the block takes."""
        started = time.perf_counter()
        try:
            yield self
        finally:
            self.seconds += time.perf_counter() - started
