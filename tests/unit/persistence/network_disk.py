"""A file system that cannot delete what is open: it gives it another name, as NFS does."""

from __future__ import annotations

import errno
import os
from collections.abc import Collection
from itertools import count

import pytest

from tests.unlinked import by_os


def keep_open(patch: pytest.MonkeyPatch, names: Collection[str]) -> None:
    """From now on files of these names are open somewhere."""
    unlink, numbers = os.unlink, count()

    def renames(path: str | os.PathLike[str], *, dir_fd: int | None = None) -> None:
        folder, name = os.path.split(path)
        if name.startswith(".nfs"):
            raise OSError(errno.EBUSY, "Device or resource busy", str(path))
        if name not in names:
            return unlink(path, dir_fd=dir_fd)
        other = os.path.join(folder, f".nfs{next(numbers):012d}")
        os.rename(path, other, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)

    by_os(patch)
    patch.setattr(os, "unlink", renames)
