"""Small file systems of memory, for tests of what runs full."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

_NEW_MOUNTS = 0x20000  # CLONE_NEWNS of linux/sched.h


class CannotMount(Exception):
    """This machine lets nobody mount a tmpfs; the message says why."""


@contextmanager
def tmpfs(folder: Path, mebibytes: int) -> Iterator[Path]:
    """Mount a tmpfs on ``folder``, which is made if it is not there.

    Raises:
        CannotMount: Where that is not possible.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if shutil.which("mount") is None:
        raise CannotMount("there is no mount command")
    command = ["mount", "-t", "tmpfs", "-o", f"size={mebibytes}m,mode=700", "tmpfs", str(folder)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise CannotMount(f"no tmpfs can be mounted: {result.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@contextmanager
def tmpfs_or_skip(folder: Path, mebibytes: int) -> Iterator[Path]:
    """The same for a fixture: its tests are skipped where nothing can be mounted."""
    with ExitStack() as stack:
        try:
            place = stack.enter_context(tmpfs(folder, mebibytes))
        except CannotMount as error:
            pytest.skip(str(error))
        yield place


def take_small_shm(mebibytes: int) -> None:
    """Let this process, and those that it starts from here on, see a /dev/shm of their own.

    Raises:
        CannotMount: Where that is not possible.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_NEW_MOUNTS):
        raise CannotMount(f"no mounts of its own: {os.strerror(ctypes.get_errno())}")
    size = f"size={mebibytes}m"
    for command in (["--make-rprivate", "/"], ["-t", "tmpfs", "-o", size, "tmpfs", "/dev/shm"]):
        result = subprocess.run(["mount", *command], capture_output=True, text=True, check=False)
        if result.returncode:
            raise CannotMount(f"no tmpfs can be mounted: {result.stderr.strip()}")


def fill(folder: Path, spare_bytes: int = 0) -> Path:
    """Take all but ``spare_bytes`` of a file system, as another process would; the file that has it."""
    filler = folder / "filler"
    with filler.open("wb", buffering=0) as file:
        with suppress(OSError):  # not a size known before: a writer's log may take a page meanwhile
            while True:
                file.write(bytes(1 << 16))
        file.truncate(file.tell() - spare_bytes)
    return filler


def remount(folder: Path, mode: str) -> None:
    """Mount it anew as ``"ro"``, ``"rw"``, or with other options."""
    subprocess.run(["mount", "-o", f"remount,{mode}", str(folder)], check=True)
