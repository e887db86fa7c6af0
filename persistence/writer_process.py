"""The trainer's handle on its writer process."""

from __future__ import annotations

import logging
import os
import subprocess
import threading
import time
from dataclasses import replace

from lowdiff.errors import WriterFailed
from lowdiff.events import log_event
from lowdiff.persistence.detached import start_detached
from lowdiff.persistence.status import StatusReader, WriterStatus
from lowdiff.persistence.writer_settings import (
    END,
    WRITE_THROUGH,
    WriterSettings,
    batch_size_word,
)

_logger = logging.getLogger(__name__)

_START_SECONDS = 30.0
_CHECK_SECONDS = 0.5
#: How many writers may die while they finish.
_FINISH_ATTEMPTS = 3


class WriterProcess:
    """Starts the writer, restarts it when it dies, and reads its status."""

    def __init__(self, settings: WriterSettings) -> None:
        self._settings = replace(
            settings,
            run=os.path.abspath(settings.run),
            staging_root=os.path.abspath(settings.staging_root),
            trainer_pid=os.getpid(),
        )
        self._pipe = threading.Lock()  # of whoever starts, tells or ends the process
        self._write_through = False
        self.restarts = 0
        self._process = self._start()
        self._finishing = False
        self._checked = time.monotonic()
        self._status = self._wait_for_status()

    @property
    def pid(self) -> int:
        """Process id of the writer."""
        return self._process.pid

    def read_status(self) -> WriterStatus:
        """What the writer has done; for any thread."""
        return self._status.read()

    def write_through(self) -> None:
        """Have each step made durable as soon as it is staged, from now on; for any thread.

        What is staged by now and waits for its batch to fill is written at once. Steps that are
        staged while the disk is busy still share a batch.
        """
        with self._pipe:
            self._write_through = True
            self._tell(WRITE_THROUGH)

    def set_batch_size(self, batch_size: int) -> None:
        """Have so many differentials, a power of two, go into each durable write from now on."""
        with self._pipe:
            self._settings = replace(self._settings, batch_size=batch_size)
            self._tell(batch_size_word(batch_size))

    def status(self) -> WriterStatus:
        """What the writer has done; restarts it if it is no longer there. For one thread."""
        now = time.monotonic()
        if not self._finishing and now - self._checked > _CHECK_SECONDS:
            self._checked = now
            if self._process.poll() is not None:
                log_event(
                    _logger,
                    logging.WARNING,
                    "writer_restarted",
                    f"the writer of rank {self._settings.rank} ended; starting another",
                    rank=self._settings.rank,
                    exit_code=self._process.returncode,
                    writer_log=str(self._settings.staging.writer_log),
                )
                self._restart()
        return self._status.read()

    def finish(self, timeout_seconds: float) -> WriterStatus:
        """Tell the writer that nothing more comes, and wait until all is durable; idempotent.

        One that dies on the way is replaced. It is also waited for while it uploads; what the
        store lacks when the time is over is said in a warning.

        Raises:
            WriterFailed: If it does not get there in time; what is staged stays in staging.
        """
        deadline = time.monotonic() + timeout_seconds
        for _ in range(_FINISH_ATTEMPTS):
            self._checked = 0.0
            self.status()  # a writer that died unnoticed has a successor, which drains
            with self._pipe:
                # A byte, not only the pipe's end: forked DataLoader workers may hold it open.
                self._tell(END)
                assert self._process.stdin is not None
                self._process.stdin.close()
            try:
                self._process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                break
            if self._status.read().closed:
                break
        self._finishing = True
        is_running = self._process.poll() is None  # before its last word is read
        status = self._status.read()
        if not status.closed and not is_running:
            raise WriterFailed(
                f"the writer of rank {self._settings.rank} died {_FINISH_ATTEMPTS} times while it "
                f"finished; nothing is lost: the next attach adopts {self._settings.staging.root}, "
                f"and {self._settings.staging.writer_log} says why"
            )
        if not status.closed:
            raise WriterFailed(
                f"the writer of rank {self._settings.rank} did not finish within "
                f"{timeout_seconds:.0f} s ({status.error or 'no error reported'}); nothing is "
                f"lost: it goes on, and the next attach adopts {self._settings.staging.root}"
            )
        lacks = store_lacks(self._settings, status, self.pid if is_running else None)
        if lacks:
            _logger.warning("rank %d: %s", self._settings.rank, lacks)
        elif is_running:
            _logger.warning("rank %d: the writer is still busy", self._settings.rank)
        return status

    def stop(self) -> None:
        """End the writer at once, as its trainer's death would not; for an attach that failed."""
        self._finishing = True
        self._process.kill()
        with self._process:  # closes its pipe and waits
            pass

    def _restart(self) -> None:
        with self._pipe:
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._process = self._start()
            self.restarts += 1
            if self._write_through:
                self._tell(WRITE_THROUGH)

    def _tell(self, word: bytes) -> None:
        """Write to the process; `_pipe` is held. One that has ended has nothing to be told."""
        pipe = self._process.stdin
        assert pipe is not None
        if not pipe.closed:
            try:
                pipe.write(word)
            except BrokenPipeError:
                _logger.warning("the writer of rank %d had ended before", self._settings.rank)

    def _start(self) -> subprocess.Popen[bytes]:
        log = self._settings.staging.writer_log
        return start_detached("lowdiff.persistence.writer", self._settings, log)

    def _wait_for_status(self) -> StatusReader:
        path = self._settings.staging.status
        deadline = time.monotonic() + _START_SECONDS
        while time.monotonic() < deadline:
            # The file gets its size before its content, and content before its first status.
            if path.exists() and path.stat().st_size:
                reader = StatusReader(path)
                if reader.read().durable_step >= 0:
                    return reader
            if self._process.poll() is not None:
                break
            time.sleep(0.01)
        assert self._process.stdin is not None
        self._process.stdin.close()  # should it come up after all, it ends at once
        log = self._settings.staging.writer_log.read_text(errors="replace")[-2000:]
        raise WriterFailed(
            f"the writer process did not start; its log says:\n{log}\nMend that, and attach again"
        )


def store_lacks(settings: WriterSettings, status: WriterStatus, uploading: int | None) -> str:
    """What a store lacks when a life ends, and what to do; empty if nothing, or without a store.

    Args:
        settings: The writer's.
        status: What it said last.
        uploading: Its process, if it is still there.
    """
    missing = []
    if status.remote_step < status.durable_step:
        missing.append(f"the steps after {status.remote_step}, up to {status.durable_step}")
    if status.remote_snapshot < status.durable_snapshot:
        missing.append(f"the snapshot of step {status.durable_snapshot}")
    if settings.store is None or not (missing or status.remote_error):
        return ""
    what = " and ".join(missing) or "some of what is durable"
    error = f": {status.remote_error}" if status.remote_error else ""
    if uploading is not None:
        # With a container the writer would end as well, and with a node the run folder go.
        return (
            f"{settings.store} lacks {what}{error}; the writer (process {uploading}) still uploads "
            f"from {settings.run}: keep this machine until it ends, or attach again here, which "
            f"uploads the rest"
        )
    # Without an error it may only not have come to look whether all is there.
    return (
        f"{settings.store} {'lacks' if error else 'may lack'} {what}{error}; it is in "
        f"{settings.run}, and the next attach here uploads it: keep that folder until then"
    )
