"""A file system that cannot delete what is open: it gives it another name, as NFS does."""

from __future__ import annotations

import errno
import os
from collections.abc import Collection
from contextlib import nullcontext, suppress
from itertools import count
from pathlib import Path

import pytest


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

    def unlinked(path: Path, missing_ok: bool = False) -> None:
        with suppress(FileNotFoundError) if missing_ok else nullcontext():
            renames(path)

    patch.setattr(os, "unlink", renames)
    patch.setattr(Path, "unlink", unlinked)
