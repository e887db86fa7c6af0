"""Writing so that a final name means complete bytes, also after a power failure."""

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
    """Create ``path`` and its parents, each durably named in its parent."""
    if path.is_dir():
        return
    make_directory(path.parent)
    path.mkdir(exist_ok=True)
    fsync_directory(path.parent)


def write_at(descriptor: int, offset: int, data: bytes) -> None:
    """Put all of data into a file, from an offset on."""
    written = 0
    while written < len(data):
        written += os.pwrite(descriptor, data[written:], offset + written)


def remove_folder(path: Path) -> None:
    """Delete a folder and all that is in it, whoever has it open.

    Network file systems and FUSE keep a file that somebody has open, under another name in its folder,
    until it is closed. There an almost empty folder stays, and nothing is wrong.

    Raises:
        OSError: If something stays for any other reason.
    """
    shutil.rmtree(path, ignore_errors=True)
    with suppress(FileNotFoundError):
        left = [entry.name.startswith((".nfs", ".fuse_hidden")) for entry in path.iterdir()]
        if not left or not all(left):
            shutil.rmtree(path)  # says why


@contextmanager
def replaced(path: Path, *, exclusive: bool = False) -> Iterator[IO[bytes]]:
    """A file to write to, which then takes the place of ``path``, atomically and durably.

    Raises:
        FileExistsError: If it must be ``exclusive``, the first of its name, and is not.
        StorageError: If it must be, and its file system has no hard links.
    """
    # Random, because ranks in containers on a shared folder may have the same process id.
    partial = path.with_name(f"{path.name}.{secrets.token_hex(4)}.partial")
    try:
        with partial.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        if exclusive:
            _link(partial, path)
            os.remove(partial)
        else:
            partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    fsync_directory(path.parent)


def _link(partial: Path, path: Path) -> None:
    """Give a complete file its name, unless there is one: nothing else does both at once."""
    try:
        os.link(partial, path)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        raise StorageError(
            f"{path} could not be written: {error.strerror}; its file system has no hard links, "
            "which keep two trainers from beginning at once. Choose a run folder on another one"
        ) from error


def unwritable(path: Path, why: object) -> StorageError:
    """The error for something a user asked for by name."""
    return StorageError(
        f"{path} could not be written: {why}; free space there, correct its permissions, or give "
        "another path"
    )


def write_file(path: Path, data: bytes, *, exclusive: bool = False) -> None:
    """Replace ``path`` atomically and durably; see `replaced`."""
    with replaced(path, exclusive=exclusive) as file:
        file.write(data)
