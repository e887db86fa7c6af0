"""The trainer's handle on its writer process."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from dataclasses import replace
from pathlib import Path

from lowdiff.core.events import Code
from lowdiff.errors import WriterFailed
from lowdiff.persistence.files.detached_process import (
    DetachedProcess,
    ProcessHandle,
    how_it_ended,
    start_detached,
    start_waiting,
    tell_settings,
)
from lowdiff.persistence.staging.settings import WriterSettings
from lowdiff.persistence.staging.status import StatusReader, WriterStatus
from lowdiff.persistence.writer.orders import END, WRITE_THROUGH, batch_size_word

_MODULE = "lowdiff.persistence.writer.main"
#: The writer multiplies no matrices, but NumPy would start a thread per core for them.
_ENVIRONMENT = {"OPENBLAS_NUM_THREADS": "1"}
_START_SECONDS = 30.0
#: How long after one began its work the next is started: the first steps have the cores.
_PREPARE_SECONDS = 2.0
#: How many writers may die while they finish.
_FINISH_TRIES = 3


class WaitingWriter:
    """A writer that was started before anybody needs one, because that takes a third of a second of a core.

    For any thread. The process ends with its trainer.
    """

    def __init__(self) -> None:
        self._process: DetachedProcess | None = None
        self._changing = threading.Lock()
        self._is_over = False

    @property
    def pid(self) -> int | None:
        """The process that waits; None if there is none."""
        return None if self._process is None else self._process.pid

    def prepare(self) -> None:
        """Have one wait, if none does."""
        with self._changing:
            if not self._is_over and (self._process is None or self._process.poll() is not None):
                self._process = start_waiting(_MODULE, **_ENVIRONMENT)

    def take(self, settings: WriterSettings, log: Path) -> DetachedProcess | None:
        """Return the one that waits, now at work; None if there is none.

        Another is prepared once training is under way.
        """
        with self._changing:
            process, self._process = self._process, None
        later = threading.Timer(_PREPARE_SECONDS, self.prepare)
        later.daemon = True
        later.start()
        return process if process is not None and tell_settings(process, settings, log) else None

    def close(self) -> None:
        """End it; idempotent."""
        with self._changing:
            self._is_over = True
            if self._process is not None:
                self._process.kill()
                with self._process:  # closes the pipe and waits
                    pass
            self._process = None


class WriterProcess(ProcessHandle):
    """Starts the writer, restarts it when it dies, and reads its status.

    Args:
        settings: Of the writer.
        waiting: Has the first one, perhaps.
    """

    def __init__(self, settings: WriterSettings, waiting: WaitingWriter | None = None) -> None:
        self._waiting = waiting
        self._settings = replace(
            settings,
            run=os.path.abspath(settings.run),
            staging_root=os.path.abspath(settings.staging_root),
            trainer_pid=os.getpid(),
        )
        super().__init__("the writer", self._settings.staging.writer_log, settings.rank)
        self._write_through = False
        self.begin_anew()

    def begin_anew(self) -> None:
        """Start the first writer; a previous one, if any, was stopped.

        Raises:
            WriterFailed: If the writer does not start.
        """
        self.is_stopped = False
        self._begin()
        self._status = self._wait_for_status()

    def read_status(self) -> WriterStatus:
        """Return the writer's progress, with an error if it keeps dying; for any thread."""
        status, error = self._status.read(), self._deaths.error
        return status.with_errors(error) if error else status

    def write_through(self) -> None:
        """Make each step durable as soon as it is staged, from now on; for any thread.

        Staged steps that wait for their batch to fill are written at once. Steps that are staged
        while the disk is busy still share a batch.
        """
        with self._pipe:
            self._write_through = True
            self._tell(WRITE_THROUGH)

    @property
    def batch_size(self) -> int:
        """Differentials per durable write, as the writer was told last."""
        return self._settings.batch_size

    def set_batch_size(self, batch_size: int) -> None:
        """Set the number of differentials per durable write, a power of two, from now on."""
        with self._pipe:
            self._settings = replace(self._settings, batch_size=batch_size)
            self._tell(batch_size_word(batch_size))

    def _done(self) -> list[int]:
        """Return numbers that grow with the writer's work."""
        status = self._status.read()
        return [
            status.durable_step,
            status.durable_snapshot,
            status.batches,
            status.adopted,
            status.remote_step,
            status.remote_bytes,
        ]

    def finish(self, timeout_seconds: float) -> WriterStatus:
        """Tell the writer that nothing more comes, and wait until all is durable; idempotent.

        A writer that dies meanwhile is replaced. The wait includes uploads; a warning names what
        the store lacks when the time is over.

        Raises:
            WriterFailed: If the writer does not finish in time; staged steps stay in staging.
        """
        deadline = time.monotonic() + timeout_seconds
        for _ in range(_FINISH_TRIES):
            # A writer that died unnoticed needs a successor to drain the log.
            self._replace_if_dead(at_once=True)
            with self._pipe:
                # Send a byte, because forked DataLoader workers may hold the pipe open.
                self._tell(END)
                self._close_pipe()
            try:
                self._process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                break
            if self._status.read().closed:
                break
        self.is_stopped = True
        is_running = self._process.poll() is None  # read before the writer's last status
        status = self.read_status()
        if not status.closed:
            staging = self._settings.staging
            raise WriterFailed(
                f"the writer of rank {self._settings.rank} "
                + (
                    f"did not finish within {timeout_seconds:.0f} s "
                    f"({status.error or 'no error reported'}), and goes on"
                    if is_running
                    else f"died {_FINISH_TRIES} times while it finished; {staging.writer_log} "
                    "says why"
                )
                + f"; nothing is lost: the next attach adopts {staging.root}"
            )
        lacks = store_lacks(self._settings, status, self.pid if is_running else None)
        if lacks:
            Code.STORE_BEHIND.warn(lacks, rank=self._settings.rank)
        elif is_running:
            Code.WRITER_STILL_BUSY.warn("the writer is still busy", rank=self._settings.rank)
        return status

    def _tell(self, word: bytes) -> None:
        """Write to the process while `_pipe` is held; a process that has ended is ignored."""
        pipe = self._process.stdin
        assert pipe is not None
        if not pipe.closed:
            try:
                pipe.write(word)
            except BrokenPipeError:
                Code.WRITER_ENDED_BEFORE.warn(
                    "the writer had ended before", rank=self._settings.rank
                )

    def _start(self) -> DetachedProcess:
        waiting, self._waiting = self._waiting, None
        taken = None if waiting is None else waiting.take(self._settings, self._log)
        return taken or start_detached(_MODULE, self._settings, self._log, **_ENVIRONMENT)

    def _greet(self) -> None:
        if self._write_through:
            self._tell(WRITE_THROUGH)

    def _wait_for_status(self) -> StatusReader[WriterStatus]:
        path = self._settings.staging.status
        deadline = time.monotonic() + _START_SECONDS
        while time.monotonic() < deadline:
            # The file gets its size before its content, and its content before the first status.
            if path.exists() and path.stat().st_size:
                reader = StatusReader(path, WriterStatus)
                if reader.read().durable_step >= 0:
                    return reader
            if self._process.poll() is not None:
                break
            time.sleep(0.01)
        self._close_pipe()  # if the writer starts after all, it ends at once
        exit_code = self._process.poll()
        how = f"said nothing for {_START_SECONDS:.0f} s"
        if exit_code is not None:
            how = f"ended with {how_it_ended(exit_code)}"
        log = self._log.read_text(errors="replace")[-2000:].strip()
        raise WriterFailed(
            f"the writer process did not start: it {how}; its log, {self._log}, "
            + (f"says:\n{log}\n" if log else "is empty. ")
            + "Correct this and attach again"
        )


def store_lacks(settings: WriterSettings, status: WriterStatus, uploading: int | None) -> str:
    """Return what a store lacks at the end of an incarnation; empty if nothing, or without a store.

    Args:
        settings: Settings of the writer.
        status: Last status of the writer.
        uploading: Process id of the writer, if it still runs.
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
        # The end of a container would end the writer, and the end of a node would lose the run
        # folder.
        return (
            f"{settings.store} lacks {what}{error}; the writer (process {uploading}) still uploads "
            f"from {settings.run}: keep this machine until it ends, or attach again here, which "
            f"uploads the rest"
        )
    # Without an error, the writer may only not have checked yet whether all is there.
    return (
        f"{settings.store} {'lacks' if error else 'may lack'} {what}{error}; it is in "
        f"{settings.run}, and the next attach here uploads it: keep that folder until then"
    )
