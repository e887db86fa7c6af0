"""Locks that end with the process that holds them."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
import weakref
from pathlib import Path

from lowdiff.core.events import printable
from lowdiff.errors import StorageError

_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL)


class FileLock:
    """An exclusive ``flock`` with the holder's description inside the file.

    The descriptor is closed in forked children, because a DataLoader worker that outlives its
    killed trainer would go on holding the lock.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor: int | None = None

    def acquire(
        self, description: str, *, timeout_seconds: float = 0.0, shared: bool = False
    ) -> bool:
        """Take the lock, waiting at most so long; False if somebody else holds it.

        Args:
            description: Who takes it, for others to read; not written by those who share it.
            timeout_seconds: How long to wait.
            shared: Let others share it, and keep out only those who want it alone.

        Raises:
            StorageError: If its file system has no locks.
        """
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        deadline = time.monotonic() + timeout_seconds
        try:
            while not _try_lock(descriptor, fcntl.LOCK_SH if shared else fcntl.LOCK_EX):
                if time.monotonic() >= deadline:
                    os.close(descriptor)
                    return False
                time.sleep(0.02)
        except OSError as error:
            os.close(descriptor)
            if error.errno not in _NO_LOCKS:
                raise
            raise StorageError(
                f"{self.path} cannot be locked: {error.strerror}; mount it with flock (Lustre: -o "
                "flock), or choose a folder on another file system"
            ) from error
        self._descriptor = descriptor
        with contextlib.suppress(OSError):  # a full disk keeps nobody from locking
            if not shared:
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, description.encode(), 0)
        _held.add(self)
        return True

    def holder(self) -> str:
        """Who wrote its description last."""
        try:
            return printable(self.path.read_text(errors="replace")[:200]) or "an unknown process"
        except OSError:
            return "an unknown process"

    def release(self) -> None:
        """Give the lock back; does nothing when not held."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
            _held.discard(self)


def _try_lock(descriptor: int, how: int) -> bool:
    try:
        fcntl.flock(descriptor, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


# What a process registers for its forks cannot be taken back, so it is one function for all locks.
_held: weakref.WeakSet[FileLock] = weakref.WeakSet()


def _release_all() -> None:
    for lock in list(_held):
        lock.release()


os.register_at_fork(after_in_child=_release_all)
