"""One rank's staging folder in one incarnation, and the lock that tells others of its trainer."""

from __future__ import annotations

import os

from lowdiff.errors import RunInUse, StorageError
from lowdiff.persistence.files.locks import FileLock
from lowdiff.persistence.files.paths import RunFolder, StagingFolder
from lowdiff.persistence.files.trust import make_folder
from lowdiff.persistence.run.owner import claim


class StagingArea:
    """A staging folder that this process made and holds.

    Args:
        folder: Where; nothing is there yet.
        run: The run folder that the memory is for.
        life: Names the incarnation, as in its fences.

    Raises:
        RunInUse: If somebody else makes it at this very moment.
        UntrustedStaging: If others can write to a folder above it.
    """

    def __init__(self, folder: StagingFolder, run: RunFolder, life: str) -> None:
        self.folder = folder
        self._run, self._life = run, life
        self._lock = FileLock(folder.trainer_lock)
        self._make()

    def make_anew(self) -> None:
        """Make the folder again after somebody removed it, or files of it.

        Raises:
            StorageError: If it cannot be made.
        """
        self._lock.release()
        try:
            self.folder.remove()
            self._make()
        except (OSError, RunInUse) as error:
            raise StorageError(
                f"{self.folder.root} was removed while training used it, and cannot be made again: "
                f"{error}; what is durable is safe: mend that, and attach again"
            ) from error

    def release(self) -> None:
        """Give the lock back."""
        self._lock.release()

    def _make(self) -> None:
        folder, root = self.folder, self.folder.root
        try:
            make_folder(root.parents[1], folder.run_id, root.name)
        except FileExistsError as error:  # a copy of the run folder attaches at this very moment
            raise RunInUse(root, "a trainer of a copy of the run folder", 0.0) from error
        self._lock.acquire(f"process {os.getpid()}")
        try:
            claim(folder, self._run, self._life)
        except BaseException:
            self._lock.release()
            raise
