"""Steps on their way from an accelerator to staging, and how far they have come."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lowdiff.errors import StorageError

#: Steps that may be on their way.
MOST_LATE = 2
_END_SECONDS = 1.0


class Reach:
    """How far the steps of one rank are staged; read by any thread.

    Args:
        lock: Held while a step is staged.
        needs_all: Whether a step is recovered only from what all ranks have staged of it.

    Attributes:
        step: The step that was staged last.
    """

    def __init__(self, lock: threading.Condition, *, needs_all: bool) -> None:
        self.step = -1
        self._lock = lock
        self._needs_all = needs_all
        self._gaps: frozenset[int] = frozenset()
        self._has_news = False

    @property
    def sure_step(self) -> int:
        """The newest step that recovery reaches: none up to it waits for a snapshot."""
        return min((self.step, *(gap - 1 for gap in self._gaps)))

    @property
    def last_gap(self) -> int:
        """The newest staged step that waits for a snapshot which makes it recoverable; -1 where none does."""
        return max(self._gaps, default=-1)

    def staged(self, step: int, *, rebases: bool) -> None:
        """Note a step, and whether only a snapshot of it, or of a later one, makes it recoverable."""
        with self._lock:
            self._has_news |= rebases
            if rebases and self._needs_all:
                self._gaps |= {step}
            self.step = step  # last: any thread may look

    def close(self, step: int) -> None:
        """Note that a snapshot of a step is durable on all ranks: what waited for one, up to it, does not any more."""
        with self._lock:
            self._gaps = frozenset(gap for gap in self._gaps if gap > step)

    def forget_news(self, step: int) -> None:
        """Note that this rank takes the snapshot of a step for which news up to it ask."""
        with self._lock:
            self._has_news &= step < self.step

    def take_news(self) -> bool:
        """Whether a step was staged, since the last call, that waits for a snapshot."""
        with self._lock:
            has_news, self._has_news = self._has_news, False
            return has_news


@dataclass(slots=True, eq=False)
class _Job:
    """One piece of work.

    Attributes:
        arrive: Waits for what is on its way, and returns it; without the lock.
        take: Takes what has arrived, under the lock.
        arrived: What has arrived, in a tuple; None before.
    """

    arrive: Callable[[], Any]
    take: Callable[[Any], None]
    arrived: tuple[Any] | None = None


class Pending:
    """Does work in its order: a thread of its own waits for each piece, and then does it under a lock.

    Work that fails stays the first. What it raised is raised where training waits next, and then it is tried again: so
    nothing that comes behind it is done before.

    Args:
        lock: Held while work is done, and notified then; a thread that holds it and waits here lets go of it meanwhile.
        name: Of the thread.
    """

    def __init__(self, lock: threading.Condition, name: str) -> None:
        self._turn = lock
        self._name = name
        self._jobs: deque[_Job] = deque()
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._is_over = False

    def __bool__(self) -> bool:
        """Whether anything is left to do; for any thread."""
        return bool(self._jobs)

    def put(self, arrive: Callable[[], Any], take: Callable[[Any], None]) -> None:
        """Do something once what it takes is here.

        Args:
            arrive: Waits for it, and returns it. Called in the thread, once unless it fails.
            take: Called with that, under the lock.

        Raises:
            StorageError: If no thread is to be had.
        """
        with self._turn:
            if self._thread is None:
                thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                try:
                    thread.start()
                except RuntimeError as error:
                    raise StorageError(
                        f"a step that leaves an accelerator is staged by a thread, and none is to be had ({error}); "
                        "raise the limit of processes (ulimit -u, or the container's pids limit)"
                    ) from error
                self._thread = thread
            self._jobs.append(_Job(arrive, take))
            self._turn.notify_all()

    def wait_until(
        self, is_enough: Callable[[], bool], timeout_seconds: float | None = None
    ) -> None:
        """Wait until enough is done, or work fails: which is raised where `finish` is called next."""
        with self._turn:
            self._turn.wait_for(lambda: self._error is not None or is_enough(), timeout_seconds)

    def finish(
        self,
        is_enough: Callable[[], bool] | None = None,
        timeout_seconds: float | None = None,
    ) -> bool:
        """Wait until nothing is left to do; what failed before is raised, and tried again.

        Args:
            is_enough: Whether enough is done; None: all of it.
            timeout_seconds: How long at most; None: a device that hangs is waited for as a training waits for it.

        Returns:
            Whether enough is done.
        """
        is_enough = is_enough or (lambda: not self._jobs)
        with self._turn:
            self.wait_until(is_enough, timeout_seconds)
            error, self._error = self._error, None
            if error is not None:
                self._turn.notify_all()
                raise error
            return is_enough()

    def drop(self) -> None:
        """Do nothing more, as after the end of the process; a device that takes long is not waited for."""
        with self._turn:
            self._is_over = True
            self._jobs.clear()
            self._turn.notify_all()
        if self._thread is not None:
            self._thread.join(_END_SECONDS)

    def _run(self) -> None:
        while (job := self._next()) is not None:
            try:
                if job.arrived is None:
                    job.arrived = (job.arrive(),)
                with self._turn:
                    if self._is_over:
                        return
                    job.take(*job.arrived)
                    if self._is_over:  # meanwhile, while it waited
                        return
                    self._jobs.popleft()
                    self._turn.notify_all()
            except BaseException as error:  # noqa: BLE001  raised where training waits
                with self._turn:
                    self._error = error
                    self._turn.notify_all()
            del job  # with all that it took

    def _next(self) -> _Job | None:
        """Wait for work, or for the end, where there is none."""
        with self._turn:
            self._turn.wait_for(lambda: self._is_over or (self._jobs and self._error is None))
            return None if self._is_over else self._jobs[0]
