"""Spans of a step in which no exchange of gradients runs, as the steps before had them."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable

#: Steps that are learnt from.
_LEARNT_STEPS = 20


class Spans:
    """Learn when training leaves the network idle; for all threads.

    A step lasts from one commit to the next. Its span 0 ends when the exchange of the first bucket begins. A
    further one begins whenever no exchange runs any more, and the last one ends at the commit.

    Args:
        clock: Returns seconds that never decrease.

    Attributes:
        changed: Notified when a span begins; its lock guards all else.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.changed = threading.Condition()
        self._clock = clock
        self._num_running = 0
        self._step = self._span = 0
        self._span_began = self._step_began = clock()
        self._lengths: list[float] = []
        #: Of each of the last steps: its idle spans, and how long it took.
        self._learnt: deque[tuple[tuple[float, ...], float]] = deque(maxlen=_LEARNT_STEPS)

    # By the thread that trains, or the one that ends an exchange.

    def began(self) -> None:
        """Note that an exchange begins; several may run at a time."""
        with self.changed:
            if not self._num_running:
                self._lengths.append(self._clock() - self._span_began)
            self._num_running += 1

    def ended(self) -> None:
        """Note that an exchange ended."""
        with self.changed:
            self._num_running = max(0, self._num_running - 1)
            if not self._num_running:
                self._begin_span(self._span + 1, self._clock())

    def committed(self) -> None:
        """Note that the step ends here. Exchanges of a pass that was broken off count no more."""
        with self.changed:
            now = self._clock()
            if not self._num_running:
                self._lengths.append(now - self._span_began)
            if self._step:  # the first one began in attach, and DDP makes other buckets after it
                self._learnt.append((tuple(self._lengths), now - self._step_began))
            self._step, self._step_began = self._step + 1, now
            self._num_running = 0
            self._lengths = []
            self._begin_span(0, now)

    def _begin_span(self, span: int, now: float) -> None:
        self._span, self._span_began = span, now
        self.changed.notify_all()

    # By the thread that sends.

    @property
    def position(self) -> tuple[int, int]:
        """The step under way, counted from 0, and the span of it that began last."""
        with self.changed:
            return self._step, self._span

    @property
    def idle_seconds(self) -> tuple[float, ...]:
        """Mean length of each span, over the steps with the most common number; none before 20 steps."""
        with self.changed:
            if len(self._learnt) < _LEARNT_STEPS:
                return ()
            steps = [lengths for lengths, _ in self._learnt]
        (count, _), *_ = Counter(map(len, steps)).most_common(1)
        usual = [lengths for lengths in steps if len(lengths) == count]
        return tuple(sum(of_span) / len(usual) for of_span in zip(*usual, strict=True))

    def is_open(self, position: tuple[int, int] | None) -> bool:
        """Whether no exchange runs now, and what is to be sent from a position on may be sent.

        Args:
            position: Step and span; None before there is a plan: then only span 0 is known to be idle.
        """
        with self.changed:
            if self._num_running:
                return False
            if position is None:
                is_reached = self._span == 0
            else:
                is_reached = (self._step, self._span) >= position
            return is_reached or self._is_pausing()

    def _is_pausing(self) -> bool:
        """Whether training stands: this span lasts longer than a whole step does."""
        if not self._learnt:
            return False
        usual = sum(seconds for _, seconds in self._learnt) / len(self._learnt)
        return self._clock() - self._span_began > usual
