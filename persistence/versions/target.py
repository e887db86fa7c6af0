"""Where versions lie: a folder, or a place in an object store."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from lowdiff.errors import DamagedFile, StorageError, StoreError
from lowdiff.persistence.files.durable import make_directory, replaced, unwritable
from lowdiff.persistence.files.paths import entries_of, user_path
from lowdiff.persistence.store.client import ObjectStore, is_url


class Target(Protocol):
    """A flat place for files, each written as a whole or not at all.

    Attributes:
        name: Folder or URL, for errors.
    """

    name: str

    def sizes(self) -> dict[str, int]:
        """Return the bytes of each file; nothing where there is no such place yet.

        Raises:
            StorageError: If it cannot be listed.
        """
        ...

    def read(self, name: str) -> bytearray:
        """Return a file's bytes.

        Raises:
            DamagedFile: If it is not there any more, or no plain file.
            StorageError: If it cannot be read now.
        """
        ...

    def create(self, name: str, pieces: Sequence[bytes | memoryview]) -> bool:
        """Write a file, durably, unless there is one of that name; return whether it was written.

        Raises:
            StorageError: If it cannot be written.
        """
        ...

    def remove(self, names: Iterable[str]) -> None:
        """Remove files; what is gone counts as removed.

        Raises:
            StorageError: If they cannot be removed.
        """
        ...


def target_of(place: str | Path) -> Target:
    """Open a target.

    Args:
        place: A folder, or a URL such as ``s3://bucket/weights``.

    Raises:
        ConfigError: If it names neither, or the store's client is not installed.
    """
    if is_url(place):
        return StoreTarget(str(place))
    return FolderTarget(user_path("target", place).absolute())


class FolderTarget:
    """A folder; made when the first file is."""

    def __init__(self, folder: Path) -> None:
        self.name = str(folder)
        self.folder = folder

    def sizes(self) -> dict[str, int]:
        """See `Target`."""
        found: dict[str, int] = {}
        try:
            for path in entries_of(self.folder):
                with suppress(FileNotFoundError):
                    found[path.name] = path.lstat().st_size
        except OSError as error:
            raise StorageError(f"{self.folder} cannot be listed: {error}") from error
        return found

    def read(self, name: str) -> bytearray:
        """See `Target`."""
        path = self.folder / name
        try:
            # A link or a pipe of a stranger's is not followed.
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            with open(descriptor, "rb", buffering=0) as file:
                status = os.fstat(descriptor)
                if not stat.S_ISREG(status.st_mode):
                    raise DamagedFile(path, "it is no plain file")
                data = bytearray(status.st_size)
                view = memoryview(data)
                while view and (count := file.readinto(view)):
                    view = view[count:]
        except FileNotFoundError as error:
            raise DamagedFile(path, "it is not there") from error
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.EISDIR):
                raise DamagedFile(path, "it is no plain file") from None
            raise DamagedFile(path, f"it cannot be read ({error})") from error
        if view:
            raise DamagedFile(path, "it became shorter while it was read")
        return data

    def create(self, name: str, pieces: Sequence[bytes | memoryview]) -> bool:
        """See `Target`."""
        path = self.folder / name
        try:
            make_directory(self.folder)
            with replaced(path, exclusive=True) as file:
                for piece in pieces:
                    file.write(piece)
        except FileExistsError:
            return False
        except OSError as error:
            raise unwritable(path, error) from error
        return True

    def remove(self, names: Iterable[str]) -> None:
        """See `Target`."""
        for name in names:
            try:
                (self.folder / name).unlink(missing_ok=True)
            except OSError as error:
                raise StorageError(f"{self.folder / name} cannot be removed: {error}") from error


class StoreTarget:
    """A place in an object store."""

    def __init__(self, url: str) -> None:
        self.name = url
        self._store = ObjectStore(url, make=True)

    def sizes(self) -> dict[str, int]:
        """See `Target`."""
        return self._store.sizes()

    def read(self, name: str) -> bytearray:
        """See `Target`."""
        try:
            return bytearray(self._store.read(name))
        except StoreError as error:
            if error.is_missing:
                raise DamagedFile(f"{self.name}/{name}", "it is not there") from error
            raise

    def create(self, name: str, pieces: Sequence[bytes | memoryview]) -> bool:
        """See `Target`."""
        return self._store.create(name, b"".join(pieces))

    def remove(self, names: Iterable[str]) -> None:
        """See `Target`."""
        self._store.delete(list(names))
