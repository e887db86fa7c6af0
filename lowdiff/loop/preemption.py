"""Notice SIGTERM and SIGUSR1 at once, also while a collective blocks the main thread.

Python runs signal handlers in the main thread, between two of its instructions; during a
collective this may be seconds later. But the C part of the interpreter writes each signal's number
to the *wakeup file descriptor* at once, and a thread reads it here.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from lowdiff.core.events import Code
from lowdiff.errors import UsageError

#: Signals before a kill: Kubernetes and torchrun send SIGTERM, Slurm either of them.
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)

#: A byte that is no signal's number.
_STOP = 0


class SignalWatch:
    """Calls back once, from its own thread, when a signal announces the process's end.

    The process is not ended: the caller decides what follows. Earlier handlers written in Python
    are still called. Forked children get the earlier handlers back.
    """

    def __init__(self, notice: Callable[[], None]) -> None:
        """Begin to watch; outside the main thread, warn and do nothing.

        Args:
            notice: Function to call, from a thread other than the main thread.

        Raises:
            UsageError: See `refuse_foreign_descriptor`.
        """
        self.notice: Callable[[], None] | None = notice
        if not _is_main_thread():
            Code.SIGNALS_NOT_SEEN.warn(
                "attach() was not called from the main thread, where alone Python allows signal "
                "handlers: SIGTERM and SIGUSR1 do not set checkpointer.preempted",
            )
            return
        if not _installed:
            refuse_foreign_descriptor()
            _installed.append(_Handlers())
        _installed[0].watches.append(self)

    def close(self) -> None:
        """Stop watching; any thread; idempotent.

        The process's last watch restores the handlers from before its first watch. Python allows
        this only in the main thread; elsewhere, the handlers stay and only call the earlier ones.
        """
        for handlers in tuple(_installed):
            with handlers.noticing:
                if self in handlers.watches:
                    handlers.watches.remove(self)
            if not handlers.watches and _is_main_thread():
                handlers.end()
                _installed.clear()


def ends_by_sigterm() -> bool:
    """Whether SIGTERM would end the process if lowdiff did not handle it."""
    return any(h.ends_by(signal.SIGTERM) for h in _installed)


class _Handlers:
    """Handlers, wakeup descriptor and thread that serve all watches of the process."""

    def __init__(self) -> None:
        self.watches: list[SignalWatch] = []
        self.noticing = threading.Lock()
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self._thread = threading.Thread(target=self._read, name="lowdiff-signals", daemon=True)
        self._thread.start()
        signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        self._previous: dict[int, Any] = {number: signal.getsignal(number) for number in SIGNALS}
        for number, previous in self._previous.items():
            # None means a handler not installed by Python, which could be neither called nor
            # restored.
            if previous is not None:
                signal.signal(number, self._handle)

    def end(self) -> None:
        """Restore the earlier handlers, and end the thread; in the main thread only."""
        os.set_blocking(self._writer, True)
        os.write(self._writer, bytes([_STOP]))
        self._thread.join()
        self.put_back()

    def ends_by(self, number: int) -> bool:
        """Whether a signal had no handler before."""
        return bool(self._previous[number] == signal.SIG_DFL)

    def put_back(self) -> None:
        """Restore the earlier handlers, except where another handler was installed since."""
        for number, previous in self._previous.items():
            if signal.getsignal(number) == self._handle:
                signal.signal(number, previous)
        current = signal.set_wakeup_fd(-1)
        if current != self._writer:
            signal.set_wakeup_fd(current, warn_on_full_buffer=False)
        os.close(self._reader)
        os.close(self._writer)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal in the main thread. A later handler of other code may keep calling this."""
        previous = self._previous[number]
        if self.watches:
            # The interpreter has written the number, unless another descriptor was set since.
            with contextlib.suppress(BlockingIOError):
                os.write(self._writer, bytes([number]))
        elif previous == signal.SIG_DFL:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        if callable(previous):
            previous(number, frame)

    def _read(self) -> None:
        """Read signal numbers; runs on the thread."""
        while True:
            for number in os.read(self._reader, 64):
                if number == _STOP:
                    return
                if number in SIGNALS:
                    self._notice(signal.Signals(number).name)

    def _notice(self, name: str) -> None:
        with self.noticing:  # a closed watch must not be called any more
            for watch in self.watches:
                notice, watch.notice = watch.notice, None
                if notice is not None:
                    notice()
                    Code.PREEMPTED.warn(
                        f"{name}: what there is becomes durable now; leave the loop when checkpointer.preempted is "
                        "true, and close",
                        signal=name,
                    )


# Signals and forks belong to the process, not to an object. There is at most one entry.
_installed: list[_Handlers] = []
_masks = threading.local()


def refuse_foreign_descriptor() -> None:
    """Check that no other code uses the interpreter's wakeup descriptor; in any thread.

    Raises:
        UsageError: If other code uses it.
    """
    if _installed or not _is_main_thread():
        return
    found = signal.set_wakeup_fd(-1)
    if found == -1:
        return
    with contextlib.suppress(OSError, ValueError):  # a closed descriptor has no user
        signal.set_wakeup_fd(found)
        raise UsageError(
            f"signals of this process are written to file descriptor {found} already "
            "(signal.set_wakeup_fd), most likely by asyncio's loop.add_signal_handler, trio or uvloop, "
            "and Python has room for one; call attach() before they set theirs, or train in a "
            "process of its own"
        )


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _before_fork() -> None:
    """Block the signals, because one that a child receives too early would look like ours."""
    _masks.before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS if _installed else ())


def _after_fork_in_parent() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _masks.before)


def _after_fork_in_child() -> None:
    """Reset a child: it does not train, must die of SIGTERM, and shares the pipe with its parent."""
    for handlers in _installed:
        handlers.watches.clear()
        handlers.put_back()
    _installed.clear()
    signal.pthread_sigmask(signal.SIG_SETMASK, _masks.before)


os.register_at_fork(
    before=_before_fork,
    after_in_parent=_after_fork_in_parent,
    after_in_child=_after_fork_in_child,
)
