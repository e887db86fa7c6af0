"""Deleting folders of files that somebody may have open yet.

Network file systems and FUSE cannot do that: they keep such a file under another name, in the same
folder, until it is closed. So the folder stays as well, and nothing is wrong.
"""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

_PREFIXES = (".nfs", ".fuse_hidden")


def is_still_open(path: Path) -> bool:
    """Whether a name is that of a deleted file, which its file system removes once it is closed."""
    return path.name.startswith(_PREFIXES)


def remove_folder(path: Path) -> None:
    """Delete a folder and all that is in it, whoever has it open; that may leave an almost empty one.

    Raises:
        OSError: If something stays for any other reason.
    """
    shutil.rmtree(path, ignore_errors=True)
    if not _is_removed(path):
        shutil.rmtree(path)  # says why


def remove_empty_folder(path: Path) -> None:
    """Delete a folder whose files were deleted.

    Raises:
        OSError: If it holds more than deleted files that are still open.
    """
    try:
        path.rmdir()
    except OSError:
        if not _is_removed(path):
            raise


def _is_removed(path: Path) -> bool:
    with contextlib.suppress(FileNotFoundError):
        left = list(path.iterdir())
        return bool(left) and all(map(is_still_open, left))
    return True
