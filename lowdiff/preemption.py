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

from lowdiff.events import log_event

_logger = logging.getLogger(__name__)

#: What schedulers send before they kill: Kubernetes and torchrun the first, Slurm either.
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)

# No signal has these numbers.
_FROM_HANDLER = 128
_STOP = 255


class SignalWatch:
    """Calls back once, from a thread of its own, when the process is told to end soon.

    The process is not ended: who catches a signal decides what follows. Handlers written in Python
    that were there before are called as ever. A wakeup file descriptor that was there before
    (asyncio's) goes on receiving its bytes. Forked children get back what was there before.
    """

    def __init__(self, notice: Callable[[], None]) -> None:
        """Install the handlers; without effect, and said, outside the main thread.

        Args:
            notice: Called from another thread than the main one.
        """
        self._notice = notice
        self._seen = False
        self._previous: dict[signal.Signals, Any] = {}
        if threading.current_thread() is not threading.main_thread():
            _logger.warning(
                "attach() was not called from the main thread, where alone Python allows signal "
                "handlers: SIGTERM and SIGUSR1 do not set checkpointer.preempted"
            )
            return
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self._thread = threading.Thread(target=self._read, name="lowdiff-signals", daemon=True)
        self._thread.start()
        self._earlier = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        self._handler = self._handle  # one object, to be recognised by
        for number in SIGNALS:
            # None is a handler that Python did not install: it could be neither called nor put back.
            if signal.getsignal(number) is not None:
                self._previous[number] = signal.signal(number, self._handler)
        _installed.append(self)

    def close(self) -> None:
        """Put back what was there before; idempotent.

        Where others have put themselves in front since, or the caller is not the main thread,
        the handlers stay and only pass signals on.
        """
        self._seen = True
        if self._restore():
            _installed.remove(self)
            os.write(self._writer, bytes([_STOP]))
            self._thread.join()
            os.close(self._reader)
            os.close(self._writer)

    def _restore(self) -> bool:
        """Put handlers and wakeup file descriptor back; False if that must not be done."""
        in_front = [signal.getsignal(number) is self._handler for number in self._previous]
        is_main = threading.current_thread() is threading.main_thread()
        if not (self._previous and all(in_front) and is_main):
            return False
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}
        try:
            current = signal.set_wakeup_fd(self._earlier, warn_on_full_buffer=False)
        except (OSError, ValueError):  # closed since
            current = signal.set_wakeup_fd(-1)
        if current != self._writer:
            signal.set_wakeup_fd(current, warn_on_full_buffer=False)
        return True

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """The handler, in the main thread: for signals that another wakeup descriptor took."""
        with contextlib.suppress(BlockingIOError):
            os.write(self._writer, bytes([_FROM_HANDLER | number]))
        previous = self._previous.get(signal.Signals(number))
        if callable(previous):
            previous(number, frame)

    def _read(self) -> None:
        """What the thread does."""
        while True:
            for byte in os.read(self._reader, 64):
                if byte == _STOP:
                    return
                if byte < _FROM_HANDLER and self._earlier != -1:
                    with contextlib.suppress(OSError):  # as the interpreter itself would
                        os.write(self._earlier, bytes([byte]))
                self._see(byte & ~_FROM_HANDLER)

    def _see(self, number: int) -> None:
        if number in SIGNALS and not self._seen:
            self._seen = True
            self._notice()
            name = signal.Signals(number).name
            text = f"{name}: what is staged is made durable now, and each further step at once"
            log_event(_logger, logging.WARNING, "preempted", text, signal=name)

    def forked(self) -> None:
        """In a forked child: it does not train, must die of SIGTERM, and shares the pipe."""
        if self._restore():
            os.close(self._reader)
            os.close(self._writer)
        else:
            nowhere = os.open(os.devnull, os.O_WRONLY | os.O_NONBLOCK)
            os.dup2(nowhere, self._writer, inheritable=False)
            os.close(nowhere)


# Signals and forks are the process's, not an object's.
_installed: list[SignalWatch] = []
_masks = threading.local()


def _before_fork() -> None:
    """Hold the signals back, or one that comes before the child let go would look like ours."""
    _masks.before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS if _installed else ())


def _after_fork_in_parent() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _masks.before)


def _after_fork_in_child() -> None:
    for watch in reversed(_installed):  # the newest is in front
        watch.forked()
    _installed.clear()
    signal.pthread_sigmask(signal.SIG_SETMASK, _masks.before)


os.register_at_fork(
    before=_before_fork,
    after_in_parent=_after_fork_in_parent,
    after_in_child=_after_fork_in_child,
)
