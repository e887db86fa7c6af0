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
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

from lowdiff.commit.session import Session
from lowdiff.core.events import Code
from lowdiff.core.waiting import waits_for_ranks
from lowdiff.protect.survivors.survivor import Survivor

_LOOK_SECONDS = 0.25
#: After SIGTERM the main thread has so long to reach a commit or an end of its own: where another rank died, and
#: where the machine may only be wanted back. torchrun kills after 30 s.
_GRACE_SECONDS, _LONG_GRACE_SECONDS = 2.0, 20.0
_LEAST_HANG_SECONDS, _HANG_STEPS = 60.0, 20
_NUM_STEPS = 50
#: How long a save that is under way may take to end.
_CLOSE_SECONDS = 25.0
#: Where PyTorch waits for other ranks: innermost Python frames of its collectives and backward passes.
_WAITING_IN = (
    os.path.join("torch", "distributed") + os.sep,
    os.path.join("torch", "nn", "parallel", "distributed.py"),
    os.path.join("torch", "autograd", "graph.py"),
)


class Pace:
    """How fast steps end, and whether none has ended for too long.

    Args:
        hang_seconds: See `Settings`.
        step: The last step.
    """

    def __init__(self, hang_seconds: float | None, step: int) -> None:
        self.step, self._since = step, time.monotonic()
        self._hang_seconds = hang_seconds
        self._seconds: deque[float] = deque(maxlen=_NUM_STEPS)
        self._num_pauses = 0

    def count(self, step: int) -> bool:
        """Look at the last step; whether it is a new one."""
        is_new, now = step > self.step, time.monotonic()
        if is_new:
            self._seconds.append((now - self._since) / (step - self.step))
            self.step, self._since = step, now
        return is_new

    @property
    def seconds(self) -> float:
        """Since the last step ended, or a pause."""
        return time.monotonic() - self._since

    @property
    def is_over(self) -> bool:
        """Whether ranks that wait for each other hang. The first step of a life may take for ever."""
        if self._num_pauses or not self._seconds:
            return False
        usual = max(_LEAST_HANG_SECONDS, _HANG_STEPS * statistics.median(self._seconds))
        return self.seconds > (usual if self._hang_seconds is None else self._hang_seconds)

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Count no time while the body runs."""
        self._num_pauses += 1
        try:
            yield
        finally:
            self._num_pauses -= 1
            self._since = time.monotonic()


class FailureWatch:
    """Watches one rank's training until it is closed; made in the main thread.

    Args:
        survivor: Saves.
        session: The training's.
        hang_seconds: See `Settings`.
        on_hang: See `Settings`.
        ends_by_signal: Whether SIGTERM would end the process if lowdiff had no handler.

    Attributes:
        pace: Of the training.
    """

    def __init__(
        self,
        survivor: Survivor,
        session: Session,
        *,
        hang_seconds: float | None,
        on_hang: str,
        ends_by_signal: bool,
    ) -> None:
        self.pace = Pace(hang_seconds, session.step)
        self._survivor = survivor
        self._session = session
        self._on_hang = on_hang
        self._ends_by_signal = ends_by_signal
        self._main = _MainThread(is_on_host=session.is_on_host)
        self._told_at: float | None = None
        self._hung_step = -1
        self._is_over = threading.Event()
        self._process = os.getpid()
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
            self._thread.join(timeout=_CLOSE_SECONDS)

    def save(self, why: str) -> bool:
        """Save the state after a failure; for any thread. An error of the save hides none of the user's.

        Returns:
            Whether the state is saved. A forked process has nothing to save.
        """
        if os.getpid() != self._process or self._is_over.is_set():
            return False
        try:
            return self._survivor.save(why) is not None
        except Exception as error:  # noqa: BLE001 -- said, and the failure before goes on
            text = f"the state could not be saved: {type(error).__name__}: {error}"
            Code.NOT_SAVED_AFTER_FAILURE.warn(text, exc_info=True)
            return False

    def _excepthook(
        self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        self._previous_hook(kind, error, traceback)
        self.save(f"{kind.__name__} ended the training")

    def _at_exit(self) -> None:
        self.save("the process ends without close()")

    def _run(self) -> None:
        while not self._is_over.wait(_LOOK_SECONDS):
            self._look()

    def _look(self) -> None:
        is_waiting = self._main.waits_for_ranks()
        self._survivor.look(is_waiting=is_waiting)
        is_new = self.pace.count(self._session.step)
        if self._session.agreement.was_told_to_stop and (is_new or self._told_at is None):
            self._told_at = time.monotonic()
        if not is_waiting:
            return
        if self._told_at is not None:
            seconds = time.monotonic() - self._told_at
            is_over = seconds > _GRACE_SECONDS and self._survivor.has_lost_peer()
            if is_over or seconds > _LONG_GRACE_SECONDS:
                self._after_signal()
        # One rank may evaluate while the others wait for it.
        elif self.pace.is_over and self._hung_step != self.pace.step and self._survivor.all_wait():
            self._after_hang()

    def _after_signal(self) -> None:
        """Save: the main thread is stuck, and does not come to a commit any more."""
        is_saved = self.save("SIGTERM came while the main thread waits for other ranks")
        # Where all live, they may yet end together, and the launcher ends those that do not.
        if is_saved and self._ends_by_signal and self._survivor.has_lost_peer():
            self._leave(128 + signal.SIGTERM)

    def _after_hang(self) -> None:
        step, seconds = self.pace.step, self.pace.seconds
        self._hung_step = step
        text = f"no step has ended for {seconds:.0f} s, and every rank here waits for others"
        Code.HANG_SEEN.warn(text, step=step, seconds=seconds)
        self.save("the ranks hang")
        if self._on_hang == "exit":  # also where nothing can be saved: else nobody starts anew
            self._leave(1)

    def _leave(self, status: int) -> None:
        """End the process, whatever its main thread waits for."""
        if not self._is_over.is_set():
            logging.shutdown()
            os._exit(status)


class _MainThread:
    """Tells what the main thread does.

    Args:
        is_on_host: Whether the model is on the CPU. On an accelerator a hang shows wherever the host
            waits for it.
    """

    def __init__(self, *, is_on_host: bool) -> None:
        self._is_on_host = is_on_host
        self._identity = threading.main_thread().ident or 0
        self._place: tuple[int, int] | None = None

    def waits_for_ranks(self) -> bool:
        """Whether it is inside a collective or a backward pass, or an accelerator blocks it."""
        frame = sys._current_frames().get(self._identity)
        if frame is None:
            return False
        before, self._place = self._place, (id(frame.f_code), frame.f_lasti)
        in_torch = any(part in frame.f_code.co_filename for part in _WAITING_IN)
        if in_torch or waits_for_ranks(self._identity):
            return True
        return not self._is_on_host and before == self._place
