"""Durable writing: a file with its final name is complete, also after a power failure."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from lowdiff.errors import StorageError

_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS)


def fsync_directory(path: Path) -> None:
    """Make renames and creations inside ``path`` durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_directory(path: Path) -> None:
    """Create ``path`` and its parents, and fsync each new name."""
    if path.is_dir():
        return
    make_directory(path.parent)
    path.mkdir(exist_ok=True)
    fsync_directory(path.parent)


def write_at(descriptor: int, offset: int, data: bytes) -> None:
    """Write all of ``data`` into a file, beginning at an offset."""
    written = 0
    while written < len(data):
        written += os.pwrite(descriptor, data[written:], offset + written)


def remove_folder(path: Path) -> None:
    """Delete a folder with its content, even while other processes have files in it open.

    Network file systems and FUSE keep an open file under another name in its folder until it is
    closed. There, an almost empty folder stays, which is not an error.

    Raises:
        OSError: If anything stays for another reason.
    """
    shutil.rmtree(path, ignore_errors=True)
    with suppress(FileNotFoundError):
        left = [entry.name.startswith((".nfs", ".fuse_hidden")) for entry in path.iterdir()]
        if not left or not all(left):
            shutil.rmtree(path)  # raises the reason


@contextmanager
def replaced(
    path: Path, *, exclusive: bool = False, durable: bool = True
) -> Iterator[IO[bytes]]:
    """Open a temporary file that then replaces ``path`` atomically and, unless told otherwise, durably.

    Raises:
        FileExistsError: If ``exclusive`` is set and ``path`` exists.
        StorageError: If ``exclusive`` is set and the file system has no hard links.
    """
    # A random name, because ranks in containers on a shared folder may have equal process ids.
    partial = path.with_name(f"{path.name}.{secrets.token_hex(4)}.partial")
    try:
        with partial.open("wb") as file:
            yield file
            file.flush()
            if durable:
                os.fsync(file.fileno())
        if exclusive:
            _link(partial, path)
            os.remove(partial)
        else:
            partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    if durable:
        fsync_directory(path.parent)


def _link(partial: Path, path: Path) -> None:
    """Give a complete file its name unless the name exists; only a hard link does both at once."""
    try:
        os.link(partial, path)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        raise StorageError(
            f"{path} could not be written: {error.strerror}; its file system has no hard links, which "
            "are needed to keep two trainers from beginning at once. Choose a run folder on another one"
        ) from error


def unwritable(path: Path, why: object) -> StorageError:
    """Return the error for a path that a user named and that cannot be written."""
    return StorageError(
        f"{path} could not be written: {why}; free space there, correct its permissions, or give "
        "another path"
    )


def write_file(path: Path, data: bytes, *, exclusive: bool = False) -> None:
    """Replace ``path`` atomically and durably; see `replaced`."""
    with replaced(path, exclusive=exclusive) as file:
        file.write(data)
