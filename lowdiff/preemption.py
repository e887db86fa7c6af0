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
from collections.abc import Callable, Sequence
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
        self._notice: Callable[[], None] | None = None
        self._thread: threading.Thread | None = None
        self._is_closed = False
        self._previous: dict[signal.Signals, Any] = {}
        self._linked: set[signal.Signals] = set()
        if not _is_main_thread():
            _logger.warning(
                "attach() was not called from the main thread, where alone Python allows signal "
                "handlers: SIGTERM and SIGUSR1 do not set checkpointer.preempted"
            )
            return
        _unlink_closed()
        self._notice = notice
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self._forwarding = threading.Lock()
        self._earlier = -1
        self._thread = threading.Thread(target=self._read, name="lowdiff-signals", daemon=True)
        self._thread.start()
        self._earlier = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        self._handler = self._handle  # one object, to be recognised by
        for number in SIGNALS:
            # None is a handler that Python did not install: it could be neither called nor put back.
            if signal.getsignal(number) is not None:
                self._previous[number] = signal.signal(number, self._handler)
                self._linked.add(number)
        _installed.append(self)

    def close(self) -> None:
        """Notice nothing more, and put back what was there before; any thread; idempotent.

        Where a handler of others is in front since, or the caller is not the main thread, ours
        stays for the time being: it passes signals on to what was there before, which may be
        their default action.
        """
        self._notice = None
        thread, self._thread = self._thread, None
        if thread is None:
            return
        door = os.dup(self._writer)
        self._pass_by()
        os.set_blocking(door, True)
        os.write(door, bytes([_STOP]))
        thread.join()
        os.close(door)
        os.close(self._reader)
        self._let_pass(_installed[_installed.index(self) + 1 :])
        self._is_closed = True
        _unlink_closed()

    def unlink(self) -> bool:
        """Put back what was there before; in the main thread, once it is closed.

        Returns:
            Whether that was possible for all: a handler of others may have ours to call.
        """
        in_front = _installed[_installed.index(self) + 1 :]
        self._unlink_descriptor(in_front)
        self._let_pass(in_front)
        for number in sorted(self._linked):
            if signal.getsignal(number) is self._handler:
                signal.signal(number, self._previous[number])
                self._linked.discard(number)
        return not self._linked

    def _let_pass(self, in_front: Sequence[SignalWatch]) -> None:
        """Have the watch that would call us call what we would have called; any thread."""
        for number in sorted(self._linked):
            for watch in in_front:
                if watch._previous.get(number) is self._handler:
                    watch._previous[number] = self._previous[number]
                    self._linked.discard(number)

    def _unlink_descriptor(self, in_front: Sequence[SignalWatch]) -> None:
        if self._writer == -1:
            return
        behind = [w for w in in_front if w._writer != -1 and w._earlier == self._writer]
        for watch in behind:
            with watch._forwarding:  # or its thread might write to the number after it is closed
                watch._earlier = self._earlier
        if not behind:
            try:
                current = signal.set_wakeup_fd(self._earlier, warn_on_full_buffer=False)
            except (OSError, ValueError):  # closed since
                current = signal.set_wakeup_fd(-1)
            if current != self._writer:
                signal.set_wakeup_fd(current, warn_on_full_buffer=False)
        os.close(self._writer)
        self._writer = -1

    def _pass_by(self) -> None:
        """Send what comes to our descriptor where it went before, past the pipe.

        The number stays in use: only the main thread can tell the interpreter another.
        """
        nowhere = os.open(os.devnull, os.O_WRONLY | os.O_NONBLOCK)
        try:
            os.dup2(self._earlier, self._writer, inheritable=False)
        except OSError:  # there was none, or it is closed since
            os.dup2(nowhere, self._writer, inheritable=False)
        os.close(nowhere)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """The handler, in the main thread: for signals that another wakeup descriptor took."""
        _unlink_closed()
        previous = self._previous.get(signal.Signals(number))
        if not self._is_closed:
            with contextlib.suppress(BlockingIOError):
                os.write(self._writer, bytes([_FROM_HANDLER | number]))
        elif previous == signal.SIG_DFL:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        if callable(previous):
            previous(number, frame)

    def _read(self) -> None:
        """What the thread does."""
        while True:
            for byte in os.read(self._reader, 64):
                if byte == _STOP:
                    return
                if byte < _FROM_HANDLER:
                    # Without an earlier one this fails, as it would for the interpreter itself.
                    with self._forwarding, contextlib.suppress(OSError):
                        os.write(self._earlier, bytes([byte]))
                self._see(byte & ~_FROM_HANDLER)

    def _see(self, number: int) -> None:
        notice = self._notice
        if number in SIGNALS and notice is not None:
            self._notice = None
            notice()
            name = signal.Signals(number).name
            text = f"{name}: what is staged is made durable now, and each further step at once"
            log_event(_logger, logging.WARNING, "preempted", text, signal=name)

    def forked(self) -> None:
        """In a forked child: it does not train, must die of SIGTERM, and shares the pipe."""
        self._notice = None
        self._forwarding = threading.Lock()  # one that a thread holds which is not here
        if self._thread is not None:
            self._thread = None
            self._pass_by()
            os.close(self._reader)
        self._is_closed = True


# Signals and forks are the process's, not an object's. The newest is in front.
_installed: list[SignalWatch] = []
_unlinking = threading.Lock()
_masks = threading.local()


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _unlink_closed() -> None:
    """Let closed watches go, as far as the calling thread may and their chains allow it."""
    # It cannot be taken twice: a signal may come in the middle of this and call it again.
    if _is_main_thread() and _unlinking.acquire(blocking=False):
        try:
            _unlink_all_closed()
        finally:
            _unlinking.release()


def _unlink_all_closed() -> None:
    for watch in reversed(_installed.copy()):
        if watch._is_closed and watch.unlink():
            _installed.remove(watch)


def _before_fork() -> None:
    """Hold the signals back, or one that comes before the child let go would look like ours."""
    _masks.before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS if _installed else ())


def _after_fork_in_parent() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _masks.before)


def _after_fork_in_child() -> None:
    for watch in _installed:
        watch.forked()
    _unlink_all_closed()
    signal.pthread_sigmask(signal.SIG_SETMASK, _masks.before)


os.register_at_fork(
    before=_before_fork,
    after_in_parent=_after_fork_in_parent,
    after_in_child=_after_fork_in_child,
)
