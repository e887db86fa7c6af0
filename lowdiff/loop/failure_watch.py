"""Notice that ranks failed, in a thread that no collective blocks, and save the state (strategy survivors).

Three signs: an exception ends the training (`Checkpointer` calls `save` then); SIGTERM, which a launcher
sends to the ranks that live; a hang, in which every rank of the node waits for others and no step ends.
"""

from __future__ import annotations

import atexit
import logging
import os
import signal
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType

from lowdiff.commit.survivor import Survivor
from lowdiff.core.events import Code, warn

_logger = logging.getLogger(__name__)

_LOOK_SECONDS = 0.25
#: After SIGTERM the main thread has so long to reach a commit or an end of its own.
_GRACE_SECONDS = 2.0
_LEAST_HANG_SECONDS, _HANG_STEPS = 60.0, 20
_NUM_STEPS = 50
#: Where the main thread waits for other ranks: innermost Python frames of collectives and backward passes.
_WAITING_IN = (
    os.path.join("torch", "distributed") + os.sep,
    os.path.join("torch", "nn", "parallel", "distributed.py"),
    os.path.join("torch", "autograd", "graph.py"),
    os.path.join("lowdiff", "commit", "news.py"),
    os.path.join("lowdiff", "model", "ranks.py"),
    os.path.join("compressors", "collectives.py"),
)


class FailureWatch:
    """Watches one rank's training until it is closed; made in the main thread.

    Args:
        survivor: Saves.
        step: Tells the last step.
        hang_seconds: See `Settings`.
        on_hang: See `Settings`.
        is_on_host: Whether the model is on the CPU. On an accelerator a hang shows wherever the host
            waits for it.
        ends_by_signal: Tells whether SIGTERM would end the process if lowdiff had no handler.
    """

    def __init__(
        self,
        survivor: Survivor,
        step: Callable[[], int],
        *,
        hang_seconds: float | None,
        on_hang: str,
        is_on_host: bool,
        ends_by_signal: Callable[[], bool],
    ) -> None:
        self._survivor = survivor
        self._step = step
        self._hang_seconds = hang_seconds
        self._on_hang = on_hang
        self._is_on_host = is_on_host
        self._ends_by_signal = ends_by_signal
        self._main = threading.main_thread().ident
        self._place: tuple[int, int] | None = None
        self._num_pauses = 0
        self._told_at: float | None = None
        self._seconds: deque[float] = deque(maxlen=_NUM_STEPS)
        self._seen_step, self._seen_at = step(), time.monotonic()
        self._hung_step = -1
        self._is_over = threading.Event()
        self._previous_hook = sys.excepthook
        sys.excepthook = self._excepthook
        atexit.register(self._at_exit)
        self._thread = threading.Thread(target=self._run, name="lowdiff-survivor", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop watching; any thread; idempotent."""
        self._is_over.set()
        atexit.unregister(self._at_exit)
        # Compared by equality: a bound method is made anew at each look.
        if sys.excepthook == self._excepthook:
            sys.excepthook = self._previous_hook
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=2 * _LOOK_SECONDS)

    def told_to_stop(self) -> None:
        """Hear of SIGTERM; for any thread."""
        self._told_at = time.monotonic()

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Take no time in the body for a hang."""
        self._num_pauses += 1
        try:
            yield
        finally:
            self._num_pauses -= 1
            self._seen_at = time.monotonic()

    def save(self, why: str) -> None:
        """Save the state after a failure; for any thread."""
        self._survivor.save(why)

    def _excepthook(
        self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        self._previous_hook(kind, error, traceback)
        self.save(f"{kind.__name__} ended the training")

    def _at_exit(self) -> None:
        self.save("the process ends without close()")

    def _run(self) -> None:
        while not self._is_over.wait(_LOOK_SECONDS):
            now, is_waiting = time.monotonic(), self._is_waiting()
            try:
                self._survivor.look(is_waiting=is_waiting)
                self._count(now)
                if self._told_at is not None and is_waiting:
                    self._after_signal(now)
                elif is_waiting and self._hangs(now):
                    self._after_hang(now)
            except Exception as error:  # noqa: BLE001 -- the thread must go on looking
                text = f"the state could not be saved: {type(error).__name__}: {error}"
                warn(_logger, Code.NOT_SAVED_AFTER_FAILURE, text, exc_info=True)

    def _count(self, now: float) -> None:
        step = self._step()
        if step > self._seen_step:
            self._seconds.append((now - self._seen_at) / (step - self._seen_step))
            self._seen_step, self._seen_at = step, now
            self._told_at = None if self._told_at is None else now

    def _after_signal(self, now: float) -> None:
        """Save if the main thread is stuck; it does not come to a commit any more."""
        assert self._told_at is not None
        if now - self._told_at < _GRACE_SECONDS:
            return
        self.save("SIGTERM came while the main thread waits for other ranks")
        if self._ends_by_signal():
            _leave(128 + signal.SIGTERM)

    def _hangs(self, now: float) -> bool:
        if self._num_pauses or not self._seconds or self._hung_step == self._seen_step:
            return False
        limit = self._hang_seconds
        if limit is None:
            limit = max(_LEAST_HANG_SECONDS, _HANG_STEPS * statistics.median(self._seconds))
        # One rank may evaluate while the others wait for it.
        return now - self._seen_at > limit and self._survivor.all_wait()

    def _after_hang(self, now: float) -> None:
        self._hung_step = self._seen_step
        seconds = now - self._seen_at
        text = f"no step has ended for {seconds:.0f} s, and every rank here waits for others"
        warn(_logger, Code.HANG_SEEN, text, step=self._seen_step, seconds=seconds)
        self.save("the ranks hang")
        if self._on_hang == "exit":
            _leave(1)

    def _is_waiting(self) -> bool:
        """Whether the main thread waits for other ranks now."""
        frame: FrameType | None = sys._current_frames().get(self._main or 0)
        if frame is None:
            return False
        before, self._place = self._place, (id(frame.f_code), frame.f_lasti)
        if any(part in frame.f_code.co_filename for part in _WAITING_IN):
            return True
        return not self._is_on_host and before == self._place


def _leave(status: int) -> None:
    """End the process, whatever its main thread waits for."""
    logging.shutdown()
    os._exit(status)
