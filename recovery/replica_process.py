"""The trainer's handle on its replica process."""

from __future__ import annotations

import logging
import subprocess
import time

from lowdiff.events import log_event
from lowdiff.persistence.detached import start_detached
from lowdiff.persistence.replica_status import (
    ReplicaPage,
    ReplicaReader,
    ReplicaSettings,
    ReplicaStatus,
)

_logger = logging.getLogger(__name__)

_CHECK_SECONDS = 0.5


class ReplicaProcess:
    """Starts the replica, restarts it when it dies, and reads its status. For one thread."""

    def __init__(self, settings: ReplicaSettings) -> None:
        self._settings = settings
        self.restarts = 0
        ReplicaPage(settings.staging.replica_status).update()
        self._status = ReplicaReader(settings.staging.replica_status)
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

    def status(self) -> ReplicaStatus:
        """What the replica has done; restarts it if it is no longer there."""
        now = time.monotonic()
        if not self.is_stopped and now - self._checked > _CHECK_SECONDS:
            self._checked = now
            if self._process.poll() is not None:
                log_event(
                    _logger,
                    logging.WARNING,
                    "replica_restarted",
                    f"the replica of rank {self._settings.rank} ended; starting another",
                    rank=self._settings.rank,
                    exit_code=self._process.returncode,
                    replica_log=str(self._settings.staging.replica_log),
                )
                self._close_pipe()
                self._process = self._start()
                self.restarts += 1
        return self._status.read()

    def stop(self) -> None:
        """End the replica at once: its files are whole at any moment, and its log is still there."""
        self.is_stopped = True
        self._process.kill()
        with self._process:  # closes its pipe and waits
            pass

    def _close_pipe(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()

    def _start(self) -> subprocess.Popen[bytes]:
        log = self._settings.staging.replica_log
        return start_detached("lowdiff.recovery.replica", self._settings, log)
