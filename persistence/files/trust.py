"""Staging that other users of the machine could have made or written is not trusted.

``/dev/shm`` takes everybody's files: somebody else may make a user's staging root first, or put a
symbolic link in its place, and fill it with folders of the right names. Therefore a staging root, and
every folder below it that is used, is a real folder of this user which others cannot write to. A tmpfs
is open to all when it is mounted: a new folder in it is not. In a folder that others cannot write to, or
only with the sticky bit, nobody can put another folder in the place of one that was checked.

Attaching closes the default root to others, and makes the folders below any root with mode 0700. A
root given by hand keeps its mode: most folders can be read by others.
"""

from __future__ import annotations

import logging
import os
import pwd
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from lowdiff.core.events import Code, warn
from lowdiff.errors import UntrustedStaging

_logger = logging.getLogger(__name__)

_PRIVATE = 0o700
#: A root below which nobody can make anything.
_NOWHERE = Path("/proc/no-staging")
_OTHERS_WRITE = 0o022


def shared_staging_root() -> Path:
    """``/dev/shm/lowdiff-UID``, where staging of all runs lies unless told otherwise."""
    return Path("/dev/shm") / f"lowdiff-{os.geteuid()}"


def check_folder(path: Path) -> bool:
    """See that a folder of staging can be trusted, if it is there.

    Returns:
        Whether it is there.

    Raises:
        UntrustedStaging: If it cannot be trusted.
    """
    try:
        found = path.lstat()
    except (FileNotFoundError, NotADirectoryError):  # also below a file
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
    """The root itself, or one without anything if it cannot be trusted, which is said once."""
    try:
        check_folder(root)
    except UntrustedStaging as error:
        warn(
            _logger,
            Code.STAGING_UNTRUSTED,
            "only the disk is read, and nothing that is staged: %s",
            error,
        )
        return _NOWHERE
    return root


def trusted_folders(root: Path, run_id: str) -> Iterator[Path]:
    """The folders of one run below a root, but for those that cannot be trusted."""
    try:
        is_there = check_folder(root) and check_folder(root / run_id)
    except UntrustedStaging as error:
        warn(_logger, Code.STAGING_UNTRUSTED, "what is staged in %s is not read: %s", root, error)
        return
    with suppress(FileNotFoundError):  # the run's last folder is removed while we look
        for path in sorted((root / run_id).iterdir()) if is_there else []:
            with suppress(FileNotFoundError):  # adopted and removed while we look
                why = _distrust(path.lstat())
                if why is None:
                    yield path
                else:
                    warn(_logger, Code.STAGING_UNTRUSTED, "%s is not read: it %s", path, why)


def make_folder(root: Path, run_id: str, name: str) -> None:
    """Make the folder of one rank below a root, which may be there; each part with mode 0700.

    Raises:
        FileExistsError: If it is there.
        UntrustedStaging: If a folder above it cannot be trusted.
    """
    root.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        root.mkdir(mode=_PRIVATE)
    check_folder(root)
    if root == shared_staging_root():
        root.chmod(_PRIVATE)
    while True:  # the last rank of an earlier life may remove the run's folder
        with suppress(FileExistsError):
            (root / run_id).mkdir(_PRIVATE)
        if check_folder(root / run_id):
            with suppress(FileNotFoundError):
                (root / run_id / name).mkdir(_PRIVATE)
                return


def _distrust(found: os.stat_result) -> str | None:
    """Why a folder is not trusted, as what follows its name; None if it is."""
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
        # What a container mounts belongs to its user and is open to all: a folder in it is not.
        return f"`chmod go-rwx` it, give a new folder in it ({path / 'lowdiff'})"
    if found.st_mode & stat.S_ISVTX:  # as /dev/shm itself: a mounted tmpfs is root's
        return f"give a new folder in it ({path / 'lowdiff'})"
    return "have its owner or root remove it"


def _user(uid: int) -> str:
    try:
        return f"user {pwd.getpwuid(uid).pw_name} ({uid})"
    except KeyError:
        return f"user {uid}"
