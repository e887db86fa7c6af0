"""Refuse staging folders that other users of the machine could have made or written.

``/dev/shm`` accepts everybody's files. Another user may make a user's staging root first, or put a
symbolic link in its place, and fill it with folders of the right names. A staging root, and every
folder used below it, must therefore be a real folder of this user that others cannot write to. A
tmpfs is open to all when it is mounted; a new folder in it is not. In a folder that others cannot
write to, or only with the sticky bit, nobody can replace a folder that was checked.

Attaching closes the default root to others, and makes the folders below any root with mode 0700. A
root that the user chose keeps its mode, because most folders can be read by others.
"""

from __future__ import annotations

import os
import pwd
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from lowdiff.core.events import Code
from lowdiff.errors import UntrustedStaging

_PRIVATE = 0o700
#: A root below which no folder can be made.
_NOWHERE = Path("/proc/no-staging")
_OTHERS_WRITE = 0o022


def shared_staging_root() -> Path:
    """Return ``/dev/shm/lowdiff-UID``, the default staging root of all runs."""
    return Path("/dev/shm") / f"lowdiff-{os.geteuid()}"


def check_folder(path: Path) -> bool:
    """Check that a staging folder can be trusted, if it exists.

    Returns:
        Whether the folder exists.

    Raises:
        UntrustedStaging: If the folder cannot be trusted.
    """
    try:
        found = path.lstat()
    except (FileNotFoundError, NotADirectoryError):  # also for a path below a file
        return False
    if stat.S_ISREG(found.st_mode):
        return False
    why = _distrust(found)
    if why is None and not os.access(path, os.R_OK | os.X_OK):
        why = "cannot be opened by its owner"
    if why is not None:
        raise UntrustedStaging(path, why, _way_out(path, found))
    return True


def readable_root(root: Path) -> Path:
    """Return the root, or an empty one with a warning if the root cannot be trusted."""
    try:
        check_folder(root)
    except UntrustedStaging as error:
        Code.STAGING_UNTRUSTED.warn(f"only the disk is read, and nothing that is staged: {error}")
        return _NOWHERE
    return root


def trusted_folders(root: Path, run_id: str) -> Iterator[Path]:
    """Yield the folders of one run below a root, except those that cannot be trusted."""
    try:
        is_there = check_folder(root) and check_folder(root / run_id)
    except UntrustedStaging as error:
        Code.STAGING_UNTRUSTED.warn(f"what is staged in {root} is not read: {error}")
        return
    with suppress(FileNotFoundError):  # the run's last folder may be removed meanwhile
        for path in sorted((root / run_id).iterdir()) if is_there else []:
            with suppress(FileNotFoundError):  # the folder may be adopted and removed meanwhile
                why = _distrust(path.lstat())
                if why is None:
                    yield path
                else:
                    Code.STAGING_UNTRUSTED.warn(f"{path} is not read: it {why}")


def make_folder(root: Path, run_id: str, name: str) -> None:
    """Make the folder of one rank below a root, which may exist; new folders get mode 0700.

    Raises:
        FileExistsError: If the folder exists.
        UntrustedStaging: If a folder above it cannot be trusted.
    """
    root.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        root.mkdir(mode=_PRIVATE)
    check_folder(root)
    if root == shared_staging_root():
        root.chmod(_PRIVATE)
    while True:  # the last rank of an earlier incarnation may remove the run's folder
        with suppress(FileExistsError):
            (root / run_id).mkdir(_PRIVATE)
        if check_folder(root / run_id):
            with suppress(FileNotFoundError):
                (root / run_id / name).mkdir(_PRIVATE)
                return


def _distrust(found: os.stat_result) -> str | None:
    """Return why a folder is not trusted, as text after its name; None if it is trusted."""
    if stat.S_ISLNK(found.st_mode):
        return f"is a symbolic link, made by {_user(found.st_uid)}"
    if not stat.S_ISDIR(found.st_mode):
        return "is no folder"
    if found.st_uid != os.geteuid():
        return f"belongs to {_user(found.st_uid)}, and this process is {_user(os.geteuid())}"
    if found.st_mode & _OTHERS_WRITE:
        return f"has mode {stat.S_IMODE(found.st_mode):04o}, so that other users can write to it"
    return None


def _way_out(path: Path, found: os.stat_result) -> str:
    if stat.S_ISLNK(found.st_mode):
        return "give the folder that the link leads to, if the link is yours"
    if found.st_uid == os.geteuid():
        # A folder mounted into a container belongs to its user but is open to all. A new one in it
        # is not.
        return f"`chmod go-rwx` it, give a new folder in it ({path / 'lowdiff'})"
    if found.st_mode & stat.S_ISVTX:  # such as /dev/shm itself: a mounted tmpfs belongs to root
        return f"give a new folder in it ({path / 'lowdiff'})"
    return "have its owner or root remove it"


def _user(uid: int) -> str:
    try:
        return f"user {pwd.getpwuid(uid).pw_name} ({uid})"
    except KeyError:
        return f"user {uid}"
