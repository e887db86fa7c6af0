"""Seeing SIGTERM and SIGUSR1 at once, also while a collective blocks the main thread.

Python runs signal handlers in the main thread, and only between two of its instructions: during a
collective that may be seconds later. The C part of the interpreter, however, writes each signal's
number to the *wakeup file descriptor* at once, and here a thread reads it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from lowdiff.core.events import Code, warn
from lowdiff.errors import UsageError

_logger = logging.getLogger(__name__)

#: What schedulers send before they kill: Kubernetes and torchrun the first, Slurm either.
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)

#: No signal has this number.
_STOP = 0


class SignalWatch:
    """Calls back once, from a thread of its own, when the process is told to end soon.

    The process is not ended: who catches a signal decides what follows. Handlers written in Python
    that were there before are called as ever. Forked children get back what was there before.
    """

    def __init__(self, notice: Callable[[], None]) -> None:
        """Watch from now on; without effect, and said, outside the main thread.

        Args:
            notice: Called from another thread than the main one.

        Raises:
            UsageError: See `refuse_foreign_descriptor`.
        """
        self.notice: Callable[[], None] | None = notice
        if not _is_main_thread():
            warn(
                _logger,
                Code.SIGNALS_NOT_SEEN,
                "attach() was not called from the main thread, where alone Python allows signal "
                "handlers: SIGTERM and SIGUSR1 do not set checkpointer.preempted",
            )
            return
        if not _installed:
            refuse_foreign_descriptor()
            _installed.append(_Handlers())
        _installed[0].watches.append(self)

    def close(self) -> None:
        """Notice nothing more; any thread; idempotent.

        The last watch of the process puts back what was there before its first one. Outside the main
        thread Python allows that to nobody: the handlers stay, and do what was done before.
        """
        for handlers in tuple(_installed):
            with handlers.noticing:
                if self in handlers.watches:
                    handlers.watches.remove(self)
            if not handlers.watches and _is_main_thread():
                handlers.end()
                _installed.clear()


class _Handlers:
    """The handlers, the wakeup descriptor and the thread that serve all watches of the process."""

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
            # None is a handler that Python did not install: it could be neither called nor put back.
            if previous is not None:
                signal.signal(number, self._handle)

    def end(self) -> None:
        """Put back what was there before, and end the thread; in the main thread."""
        os.set_blocking(self._writer, True)
        os.write(self._writer, bytes([_STOP]))
        self._thread.join()
        self.put_back()

    def put_back(self) -> None:
        """Put back what was there before, but for what others have put in front of it since."""
        for number, previous in self._previous.items():
            if signal.getsignal(number) == self._handle:
                signal.signal(number, previous)
        current = signal.set_wakeup_fd(-1)
        if current != self._writer:
            signal.set_wakeup_fd(current, warn_on_full_buffer=False)
        os.close(self._reader)
        os.close(self._writer)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """The handler, in the main thread. A later handler of others may call it for ever."""
        previous = self._previous[number]
        if self.watches:
            # The interpreter did so at once, unless somebody has set another descriptor since.
            with contextlib.suppress(BlockingIOError):
                os.write(self._writer, bytes([number]))
        elif previous == signal.SIG_DFL:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        if callable(previous):
            previous(number, frame)

    def _read(self) -> None:
        """What the thread does."""
        while True:
            for number in os.read(self._reader, 64):
                if number == _STOP:
                    return
                if number in SIGNALS:
                    self._notice(signal.Signals(number).name)

    def _notice(self, name: str) -> None:
        with self.noticing:  # a watch is called by nobody once it is closed
            for watch in self.watches:
                notice, watch.notice = watch.notice, None
                if notice is not None:
                    notice()
                    text = (
                        f"{name}: what is staged is made durable now, and each further step at once"
                    )
                    warn(_logger, Code.PREEMPTED, text, signal=name)


# Signals and forks are the process's, not an object's. There is at most one.
_installed: list[_Handlers] = []
_masks = threading.local()


def refuse_foreign_descriptor() -> None:
    """Make sure that nobody else is told of signals by the interpreter; in any thread.

    Raises:
        UsageError: If somebody is.
    """
    if _installed or not _is_main_thread():
        return
    found = signal.set_wakeup_fd(-1)
    if found == -1:
        return
    with contextlib.suppress(OSError, ValueError):  # it was closed, so nobody misses it
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
    """Hold the signals back, or one that comes before the child let go would look like ours."""
    _masks.before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS if _installed else ())


def _after_fork_in_parent() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _masks.before)


def _after_fork_in_child() -> None:
    """A child does not train, must die of SIGTERM, and shares the pipe with its parent."""
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
