"""This rank's hold on a run folder, and on a staging folder of its own."""

from __future__ import annotations

import os
import socket

from lowdiff.core.events import Code
from lowdiff.errors import RunInUse, StorageError
from lowdiff.persistence.files.durable import make_directory
from lowdiff.persistence.files.lease import Lease
from lowdiff.persistence.files.locks import FileLock
from lowdiff.persistence.files.paths import RunFolder, StagingFolder
from lowdiff.persistence.files.trust import make_folder
from lowdiff.persistence.run.owner import claim
from lowdiff.settings import Settings
from lowdiff.types import Reached

#: How long another's look at the lock of a staging folder may take.
_LOOK_SECONDS = 1.0


class RunLock:
    """A flock per rank, and on rank 0 the lease that other machines see, with how far the run has come.

    Attributes:
        reached: How far the trainer before this one had come, as far as rank 0 knows; read by `acquire`.
    """

    def __init__(self, settings: Settings, rank: int) -> None:
        self._settings = settings
        self._description = f"process {os.getpid()} on {socket.gethostname()} (rank {rank})"
        self._lock = FileLock(settings.folder.lock(rank))
        self._lease = Lease(settings.folder.lease) if rank == 0 else None
        self.reached: Reached | None = None

    def acquire(self) -> None:
        """Take both, waiting for whoever lets go of them.

        Raises:
            RunInUse: If nobody does.
        """
        make_directory(self._lock.path.parent)
        self._take(self._lock)
        if self._lease is not None:
            seconds = f"{self._lease.seconds:.0f} s are enough"
            self._take(self._lease, f", on another machine, which may be dead: then {seconds}")
            self.reached = Reached.of(self._lease.remark)

    def _take(self, lock: FileLock | Lease, hint: str = "") -> None:
        seconds = self._settings.lock_seconds
        if not lock.acquire(self._description, timeout_seconds=0.0):
            Code.WAITING_FOR_RUN.warn(f"waiting up to {seconds:.0f} s for {lock.holder()}{hint}")
            if not lock.acquire(self._description, timeout_seconds=seconds):
                raise RunInUse(self._settings.run, lock.holder(), seconds)

    def tell(self, incarnation: int, step: int) -> None:
        """Have the lease say, from its next renewal on, that an incarnation has committed a step."""
        if self._lease is not None:
            self._lease.remark = str(Reached(incarnation, step))

    def is_lost(self, *, look: bool = False) -> bool:
        """Whether another machine took over, as far as rank 0 knows."""
        return self._lease is not None and self._lease.is_lost(look=look)

    def taken_over(self) -> RunInUse:
        """Return the error of a lost run: all that this trainer would commit from now on is void."""
        by = "another trainer" if self._lease is None else self._lease.holder()
        holder = f"{by}, which took over while this trainer was suspended"
        return RunInUse(self._settings.run, holder, 0.0)

    def release(self) -> None:
        """Give both back; does nothing when not held."""
        try:
            if self._lease is not None:
                self._lease.release()
        finally:
            self._lock.release()


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
        # Whoever looks at the lock holds it for an instant.
        if not self._lock.acquire(f"process {os.getpid()}", timeout_seconds=_LOOK_SECONDS):
            raise RunInUse(root, self._lock.holder(), _LOOK_SECONDS)
        try:
            claim(folder, self._run, self._life)
        except BaseException:
            self._lock.release()
            folder.remove()
            raise
