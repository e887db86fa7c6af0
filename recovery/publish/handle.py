"""The trainer's handle on the process that publishes weights."""

from __future__ import annotations

import subprocess

from lowdiff.core.events import Code
from lowdiff.persistence.files.detached_process import (
    DetachedProcess,
    ProcessHandle,
    start_detached,
)
from lowdiff.persistence.staging.settings import PublisherSettings
from lowdiff.persistence.staging.status import PublisherStatus, StatusPage, StatusReader


class PublisherProcess(ProcessHandle):
    """Starts the publisher, restarts it when it dies, and reads its status. For one thread."""

    def __init__(self, settings: PublisherSettings) -> None:
        super().__init__("the publisher", settings.staging.publisher_log, settings.rank)
        self._settings = settings
        page = settings.staging.publisher_status
        StatusPage(page, PublisherStatus())
        self._status = StatusReader(page, PublisherStatus)

    def read_status(self) -> PublisherStatus:
        """Return what the publisher has done; for any thread."""
        return self._status.read()

    @property
    def error(self) -> str:
        """Why nothing is published; empty if all is well. For any thread."""
        of_deaths = self._deaths.error if self.has_begun else ""
        return of_deaths or self.read_status().error

    def tend(self) -> None:
        """Start the publisher, or another one in place of one that died."""
        if self.has_begun:
            super().tend()
        elif not self.is_stopped:
            self._begin()

    def finish(self, seconds: float) -> None:
        """Let it publish what is committed, and wait for that so long at most; it goes on by itself after that.

        It is started if no step did so: what was committed before a kill may not be published yet.
        """
        if self.is_stopped:
            return
        self.tend()
        self.orphan()
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            Code.LAST_VERSION_LATE.warn(
                f"the last version is not published after {seconds:.0f} s; process {self.pid} goes on with it",
                rank=self._rank,
            )

    def figures(self) -> dict[str, object]:
        """Return what `Checkpointer.stats` says of it."""
        status = self.read_status()
        return {
            "published_version": status.version,
            "published_step": status.step,
            "published_versions": status.versions,
            "published_bytes": status.bytes,
            "publish_seconds": status.seconds,
            "publisher_error": self.error,
            "publisher_pid": self.pid if self.has_begun else None,
            "publisher_restarts": self.restarts,
        }

    def _done(self) -> list[int]:
        status = self.read_status()
        return [status.version]

    def _start(self) -> DetachedProcess:
        return start_detached("lowdiff.recovery.publish.main", self._settings, self._log)
