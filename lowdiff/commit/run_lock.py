"""This rank's hold on a run folder."""

from __future__ import annotations

import logging
import os
import socket

from lowdiff.errors import RunInUse
from lowdiff.persistence.files.durable import make_directory
from lowdiff.persistence.files.lease import Lease
from lowdiff.persistence.files.locks import FileLock
from lowdiff.settings import Settings

_logger = logging.getLogger(__name__)


class RunLock:
    """A flock per rank, and on rank 0 the lease that other machines see."""

    def __init__(self, settings: Settings, rank: int) -> None:
        self._settings = settings
        self._description = f"process {os.getpid()} on {socket.gethostname()} (rank {rank})"
        self._lock = FileLock(settings.folder.lock(rank))
        self._lease = Lease(settings.folder.lease) if rank == 0 else None

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

    def _take(self, lock: FileLock | Lease, hint: str = "") -> None:
        seconds = self._settings.lock_seconds
        if not lock.acquire(self._description, timeout_seconds=0.0):
            _logger.warning("waiting up to %.0f s for %s%s", seconds, lock.holder(), hint)
            if not lock.acquire(self._description, timeout_seconds=seconds):
                raise RunInUse(self._settings.run, lock.holder(), seconds)

    def check(self) -> None:
        """Look whether another machine took over while this one was suspended.

        Raises:
            RunInUse: Then.
        """
        if self.is_lost(look=True):
            raise self.taken_over()

    def is_lost(self, *, look: bool = False) -> bool:
        """Whether another machine took over, as far as rank 0 knows."""
        return self._lease is not None and self._lease.is_lost(look=look)

    def taken_over(self) -> RunInUse:
        """What to raise then: what this trainer would commit from now on is void."""
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
