"""Keeps a step whole, from its first optimizer to the end of its commit, where another thread interrupts training.

A module of its own, because two threads meet here and nowhere else in a step.
"""

from __future__ import annotations

import threading

from lowdiff.errors import RankLost


class StepGate:
    """Through which a step goes before an optimizer changes anything; for any thread."""

    def __init__(self) -> None:
        self._changing = threading.Condition()
        self._is_closed = self._is_within = False

    def enter(self) -> None:
        """Go through before an optimizer's step; once within, further optimizers of the step may follow.

        Raises:
            RankLost: If it is closed.
        """
        with self._changing:
            if self._is_closed and not self._is_within:
                raise RankLost(
                    "training begins anew, and this rank heard of it before its optimizer's step"
                )
            self._is_within = True

    def leave(self) -> None:
        """Go out once the step is committed, or has failed; idempotent."""
        with self._changing:
            self._is_within = False
            self._changing.notify_all()

    def close(self, timeout_seconds: float) -> bool:
        """Let no step begin any more, and wait for the one that did; return whether it is over."""
        with self._changing:
            self._is_closed = True
            return self._changing.wait_for(lambda: not self._is_within, timeout_seconds)
