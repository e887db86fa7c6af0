"""The trainer's handle on its replica process."""

from __future__ import annotations

from lowdiff.persistence.files.detached_process import (
    Deaths,
    DetachedProcess,
    ProcessHandle,
    start_detached,
)
from lowdiff.persistence.staging.settings import ReplicaSettings
from lowdiff.persistence.staging.status import (
    ReplicaStatus,
    StatusPage,
    StatusReader,
    read_status,
)


class ReplicaProcess(ProcessHandle):
    """Starts the replica, restarts it when it dies, and reads its status. For one thread.

    The replica is started with the first step's gradients: until then it has nothing to apply, and its
    start would take cores from recovery and from the first backward pass. To stop it loses nothing: its files are whole at any moment, and its log is still there.
    """

    def __init__(self, settings: ReplicaSettings) -> None:
        super().__init__("the replica", settings.staging.replica_log, settings.rank)
        self._settings = settings
        self.begin_anew()

    def begin_anew(self) -> None:
        """Make the page of a replica that knows nothing; one before, if there was any, was stopped."""
        page = self._settings.staging.replica_status
        StatusPage(page, read_status(page, ReplicaStatus))
        self._status = StatusReader(page, ReplicaStatus)
        self._deaths = Deaths(self._name, self._log, self._rank)
        self.has_begun = self.is_stopped = self._is_needed = False

    def read_status(self) -> ReplicaStatus:
        """Return what the replica has done; for any thread."""
        return self._status.read()

    @property
    def error(self) -> str:
        """Error of a replica that keeps dying; empty if none does. For any thread."""
        return self._deaths.error

    def begin(self) -> None:
        """Start it, unless it is there; from now on `tend` starts it as well."""
        self._is_needed = True
        self.tend()

    def tend(self) -> None:
        """See `ProcessHandle`: a replica that has not begun is started once it is needed."""
        if self.has_begun:
            super().tend()
        elif self._is_needed:
            with self._pipe:  # another thread may stop it just now
                if not self.is_stopped:
                    process = self._deaths.started(self._done(), self._start)
                    if process is not None:
                        self._run(process)

    def _done(self) -> list[int]:
        status = self._status.read()
        return [status.step, status.consumed_step, status.image_step]

    def _start(self) -> DetachedProcess:
        return start_detached("lowdiff.recovery.replica.main", self._settings, self._log)
