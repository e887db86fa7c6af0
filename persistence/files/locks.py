"""File locks that end with the process that holds them."""

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

#: Second line where a guest holds the lock; the first describes the holder. Owners write none, as ever, so that
#: earlier versions know them; and guests of earlier versions say after a comma what they do.
_GUEST = "guest"
_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL)


def is_locked(path: Path) -> bool | None:
    """Return whether a process of this machine holds a lock exclusively; None if that cannot be asked.

    Unlike `is_held` it needs no right to write. Whoever wants the lock at this very moment waits for an instant.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    except OSError:
        return None
    try:
        return not _try_lock(descriptor, fcntl.LOCK_SH)
    except OSError:
        return False  # a file system without locks, where no trainer attaches
    finally:
        os.close(descriptor)


class FileLock:
    """An exclusive ``flock`` with the holder's description inside the file.

    The descriptor is closed in forked children. Otherwise, a DataLoader worker that outlives its
    killed trainer would keep the lock.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor: int | None = None

    def acquire(
        self,
        description: str,
        *,
        timeout_seconds: float = 0.0,
        shared: bool = False,
        is_guest: bool = False,
    ) -> bool:
        """Take the lock; return False if another process holds it for the whole waiting time.

        Args:
            description: Description of the holder, for others to read; shared holders write none.
            timeout_seconds: How long to wait.
            shared: Whether to share the lock with others, and keep out only exclusive holders.
            is_guest: Whether the lock is taken to look at what it guards, or to clear that away.

        Raises:
            StorageError: If the file system has no locks.
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
        with contextlib.suppress(OSError):  # a full disk does not prevent locking
            if not shared:
                os.ftruncate(descriptor, 0)
                text = f"{description}\n{_GUEST}" if is_guest else description
                os.pwrite(descriptor, text.encode(), 0)
        _held.add(self)
        return True

    def holder(self) -> str:
        """Return the description that a holder wrote last."""
        return printable(self._lines()[0]) or "an unknown process"

    def has_guest(self) -> bool:
        """Return whether whoever took the lock last, alone, is a guest; until it has said who it is, it counts as one."""
        description, *remark = self._lines()
        return not description or remark == [_GUEST] or ", " in description

    def _lines(self) -> list[str]:
        try:
            return self.path.read_text(errors="replace")[:200].split("\n")
        except OSError:
            return [""]

    def release(self) -> None:
        """Release the lock; does nothing when not held."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
            _held.discard(self)


def is_held(path: Path) -> bool:
    """Return whether a process holds a lock exclusively; a look keeps no other look out."""
    lock = FileLock(path)
    try:
        return not lock.acquire(f"process {os.getpid()}, looking", shared=True)
    except FileNotFoundError:  # the folder is gone
        return False
    finally:
        lock.release()


def _try_lock(descriptor: int, how: int) -> bool:
    try:
        fcntl.flock(descriptor, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


# A fork handler cannot be removed again, so one function serves all locks.
_held: weakref.WeakSet[FileLock] = weakref.WeakSet()


def _release_all() -> None:
    for lock in list(_held):
        lock.release()


os.register_at_fork(after_in_child=_release_all)
