"""A disk that remembers what was fsynced: any moment of a recorded program, after a power failure.

Data counts once its file was fsynced, a name once its directory was; everything else may be there,
not at all or in part. That is what POSIX promises, and less than what most file systems keep.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

#: What may be left of what was not fsynced.
VARIANTS = ("dropped", "names only", "zeros", "in part")


@dataclass
class _Inode:
    data: bytearray = field(default_factory=bytearray)
    synced: bytes = b""
    pending: list[tuple[int, bytes]] = field(default_factory=list)

    def write(self, offset: int, data: bytes) -> None:
        end = offset + len(data)
        if len(self.data) < end:
            self.data.extend(bytes(end - len(self.data)))
        self.data[offset:end] = data
        self.pending.append((offset, data))

    def resize(self, length: int) -> None:
        self.data = bytearray(self.data[:length].ljust(length, b"\0"))
        self.pending.append((length, b""))

    def sync(self) -> None:
        self.synced = bytes(self.data)
        self.pending.clear()

    def left(self, variant: str, chance: random.Random) -> bytes:
        """What a power failure leaves of it."""
        if variant in ("dropped", "names only") or not self.pending:
            return self.synced
        if variant == "zeros":
            # Of a file that grew, blocks that were never written. What was in its place before is not
            # that: of a block that is overwritten a power failure leaves the old content or the new.
            kept = bytearray(self.data)
            for offset, data in self.pending:
                end = min(offset + len(data), len(kept))
                kept[offset:end] = self.synced[offset:end].ljust(end - offset, b"\0")
            return bytes(kept)
        kept = bytearray(self.synced)
        for offset, data in self.pending:
            some = data[: chance.randint(0, len(data))]
            if chance.random() < 0.5:
                kept = kept.ljust(offset, b"\0")
                kept[offset : offset + len(some)] = some
        return bytes(kept)


_Names = dict[PurePosixPath, "_Inode | None"]


class Disk:
    """Files and folders under one root. A folder is a name without an inode."""

    def __init__(self) -> None:
        self._now: _Names = {}
        self._synced: _Names = {}

    def open(self, path: PurePosixPath, *, create: bool, truncate: bool) -> None:
        """Make or empty a file, as its flags say."""
        if create and path not in self._now:
            self._now[path] = _Inode()
        elif truncate and self._file(path).data:
            self._file(path).resize(0)

    def write(self, path: PurePosixPath, offset: int, data: bytes) -> None:
        """Write to a file."""
        self._file(path).write(offset, data)

    def resize(self, path: PurePosixPath, length: int) -> None:
        """Set a file's length."""
        if len(self._file(path).data) != length:
            self._file(path).resize(length)

    def make_folder(self, path: PurePosixPath) -> None:
        """Make a folder."""
        self._now[path] = None

    def rename(self, old: PurePosixPath, new: PurePosixPath) -> None:
        """Give a file another name."""
        self._now[new] = self._now.pop(old)

    def link(self, old: PurePosixPath, new: PurePosixPath) -> None:
        """Give a file a second name."""
        self._now[new] = self._now[old]

    def remove(self, path: PurePosixPath) -> None:
        """Remove a file, or a folder that is empty."""
        del self._now[path]

    def sync(self, path: PurePosixPath) -> None:
        """Fsync a file, or a folder: the names in it."""
        inode = self._now.get(path)
        if inode is not None:
            inode.sync()
            return
        for name in [name for name in self._synced if name.parent == path]:
            del self._synced[name]
        self._synced |= {name: node for name, node in self._now.items() if name.parent == path}

    def after_power_failure(self, target: Path, variant: str, chance: random.Random) -> None:
        """Write what is left into an empty folder."""
        choose: Callable[[PurePosixPath], _Names] = {
            "dropped": lambda _: self._synced,
            "in part": lambda _: self._now if chance.random() < 0.5 else self._synced,
        }.get(variant, lambda _: self._now)
        for name in sorted({*self._now, *self._synced}):
            names, path = choose(name), target / name
            # Without its folder's name a file is nowhere.
            if name not in names or not path.parent.is_dir():
                continue
            inode = names[name]
            if inode is None:
                path.mkdir(exist_ok=True)
            else:
                path.write_bytes(inode.left(variant, chance))

    def _file(self, path: PurePosixPath) -> _Inode:
        inode = self._now[path]
        assert inode is not None, f"{path} is a folder"
        return inode
