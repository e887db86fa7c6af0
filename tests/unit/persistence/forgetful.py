"""A kernel that fails an fsync as Linux does: what was to be written is lost, and it is told once."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


class ForgetfulKernel:
    """What gets to the disk of files that are fsynced in this process.

    The pages of a failed fsync count as clean: they can be read, and the next fsync finds nothing to
    write, and succeeds. Only bytes that ``os.pwrite`` wrote again since then get to the disk.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.rewritten: list[tuple[int, int]] = []
        self._failing: list[str] = []
        self._disk: dict[str, bytes] = {}
        self._lost: dict[str, set[int]] = {}
        self._fsync, self._pwrite = os.fsync, os.pwrite
        patch.setattr(os, "fsync", self._synced)
        patch.setattr(os, "fdatasync", self._synced)
        patch.setattr(os, "pwrite", self._written)

    def fail_next(self, suffix: str) -> None:
        """Fail the next fsync of a file whose name ends so."""
        self._failing.append(suffix)

    @property
    def has_failed(self) -> bool:
        """Whether every failure that was asked for has come."""
        return not self._failing

    def on_disk(self, path: Path) -> bytes:
        """What a power failure would leave of a file; what was lost is zeros."""
        return self._disk.get(str(path), b"")

    def _synced(self, descriptor: int) -> None:
        name = os.readlink(f"/proc/self/fd/{descriptor}")
        if not os.path.isfile(name):
            return self._fsync(descriptor)
        data, lost = Path(name).read_bytes(), self._lost.setdefault(name, set())
        for suffix in self._failing:
            if name.endswith(suffix):
                self._failing.remove(suffix)
                lost.update(range(len(self.on_disk(Path(name))), len(data)))
                raise OSError(5, "Input/output error")
        self._fsync(descriptor)
        self._disk[name] = bytes(0 if n in lost else byte for n, byte in enumerate(data))
        return None

    def _written(self, descriptor: int, data: bytes, offset: int) -> int:
        written = self._pwrite(descriptor, data, offset)
        name = os.readlink(f"/proc/self/fd/{descriptor}")
        self._lost.setdefault(name, set()).difference_update(range(offset, offset + written))
        self.rewritten.append((offset, offset + written))
        return written
