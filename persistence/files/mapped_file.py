"""Memory-mapped files on tmpfs, which outlive every process that maps them."""

from __future__ import annotations

import errno
import mmap
import os
from pathlib import Path

from lowdiff.errors import DamagedFile, StorageError


class MappedFile:
    """A file of fixed size, mapped for reading and writing.

    All pages are allocated when the file is created: a store into a hole of a full tmpfs would be
    a SIGBUS, which kills training.
    """

    def __init__(self, path: Path, size: int) -> None:
        """Open or create ``path`` with exactly ``size`` bytes.

        Raises:
            StorageError: If there is not enough memory.
        """
        self.path = path
        self.size = size
        try:
            self._map = _mapped(path, size)
        except OSError as error:
            raise StorageError(_refusal(path, size, error)) from error
        self.view = memoryview(self._map)

    def renamed(self, path: Path) -> None:
        """Rename the file; the mapping stays.

        Raises:
            StorageError: If the file does not exist any more.
        """
        try:
            self.path.rename(path)
        except OSError as error:
            raise StorageError(_refusal(path, self.size, error)) from error
        self.path = path


def _mapped(path: Path, size: int) -> mmap.mmap:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        # Allocate pages before the length is visible, so that other processes find no hole either.
        os.posix_fallocate(descriptor, 0, size)
        os.ftruncate(descriptor, size)
        # Populate now, so that the training thread takes no page fault at its first store.
        return mmap.mmap(descriptor, size, mmap.MAP_SHARED | mmap.MAP_POPULATE)
    finally:
        os.close(descriptor)


def _refusal(path: Path, size: int, error: OSError) -> str:
    """Return the error text for memory that staging does not get."""
    way_out = "pass Checkpointer(..., staging=OTHER_FOLDER)"
    if error.errno in (errno.ENOSPC, errno.ENOMEM):
        why = f"that file system is full; free it, enlarge it, or {way_out}"
    elif error.errno == errno.EDQUOT:
        why = f"your quota there is used up; free some, have it raised, or {way_out}"
    else:
        why = f"cannot have it ({error.strerror}); mend that, or {way_out}"
    return f"staging needs {size / 2**20:.1f} MiB at {path}, and {why}"


def read_view(path: Path) -> memoryview:
    """Map a whole file read-only; return an empty view for an empty file.

    Raises:
        FileNotFoundError: If the file does not exist.
        DamagedFile: If the file cannot be read.
    """
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size == 0:
                return memoryview(b"")
            return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    except FileNotFoundError:
        raise
    except OSError as error:
        raise DamagedFile(path, f"it cannot be read ({error})") from error
