"""The trainer's handle on its replica process."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from lowdiff.persistence.files.detached_process import DetachedProcess, start_detached
from lowdiff.persistence.staging.settings import ReplicaSettings
from lowdiff.persistence.staging.status import ReplicaStatus, StatusPage, StatusReader, read_status
from lowdiff.persistence.writer.handle import Deaths

_logger = logging.getLogger(__name__)

_CHECK_SECONDS = 0.5


class ReplicaProcess:
    """Starts the replica, restarts it when it dies, and reads its status. For one thread."""

    def __init__(self, settings: ReplicaSettings) -> None:
        self._settings = settings
        self.restarts = 0
        self.begin_anew()

    def begin_anew(self) -> None:
        """Start a replica that knows nothing; one before, if there was any, was stopped."""
        settings = self._settings
        self._deaths = Deaths("the replica", settings.staging.replica_log, settings.rank, _logger)
        page = settings.staging.replica_status
        StatusPage(page, read_status(page, ReplicaStatus))
        self._status = StatusReader(page, ReplicaStatus)
        self._process = self._start()
        self.is_stopped = False
        self._checked = time.monotonic()

    @property
    def pid(self) -> int:
        """Process id of the replica."""
        return self._process.pid

    def read_status(self) -> ReplicaStatus:
        """What the replica has done; for any thread."""
        return self._status.read()

    @property
    def error(self) -> str:
        """What is wrong with a replica that keeps dying; empty if none does. For any thread."""
        return self._deaths.error

    def status(self) -> ReplicaStatus:
        """What the replica has done; restarts it if it is no longer there."""
        status = self._status.read()
        self._deaths.note_done(_done(status))
        if not self.is_stopped and time.monotonic() - self._checked > _CHECK_SECONDS:
            self._checked = time.monotonic()
            if self._process.poll() is not None:
                self._replace(_done(status))
        return status

    def _replace(self, done: Sequence[int]) -> None:
        """Start another one in the place of one that died having got so far, at its time."""
        self._close_pipe()
        process = self._deaths.successor(self._process.returncode, done, self._start)
        if process is not None:
            self._process = process
            self.restarts += 1

    def orphan(self) -> None:
        """Let the replica see what it sees when its trainer dies: the end of its pipe."""
        self.is_stopped = True
        self._close_pipe()

    def stop(self) -> None:
        """End the replica at once: its files are whole at any moment, and its log is still there."""
        self.is_stopped = True
        self._process.kill()
        with self._process:  # closes its pipe and waits
            pass

    def _close_pipe(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()

    def _start(self) -> DetachedProcess:
        log = self._settings.staging.replica_log
        return start_detached("lowdiff.recovery.replica.main", self._settings, log)


def _done(status: ReplicaStatus) -> list[int]:
    """What grows with whatever a replica is there for."""
    return [status.step, status.consumed_step, status.image_step]
