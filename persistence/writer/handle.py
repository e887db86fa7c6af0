"""The trainer's handle on its writer process."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from lowdiff.core.events import log_event, printable
from lowdiff.errors import WriterFailed
from lowdiff.persistence.files.detached_process import DetachedProcess, start_detached
from lowdiff.persistence.staging.settings import WriterSettings
from lowdiff.persistence.staging.status import StatusReader, WriterStatus
from lowdiff.persistence.writer.orders import END, WRITE_THROUGH, batch_size_word

_logger = logging.getLogger(__name__)

_START_SECONDS = 30.0
_CHECK_SECONDS = 0.5
#: How many writers may die while they finish.
_FINISH_ATTEMPTS = 3
#: So many deaths, with nothing done in between, are no accident.
_DEATHS_IN_TROUBLE = 3
#: How long after such a death another process is started, at first and at most.
_BACKOFF_SECONDS, _LONGEST_BACKOFF_SECONDS = 1.0, 30.0
#: How much of the end of a log an error quotes.
_QUOTED_LINES, _QUOTED_CHARACTERS = 3, 500


class Deaths:
    """How a process that is started again and again has died since it last got anything done.

    Attributes:
        error: What is wrong, and what its log says of it; empty while it may be an accident.
    """

    def __init__(self, name: str, log: Path, rank: int, logger: logging.Logger) -> None:
        self._name, self._log, self._rank, self._logger = name, log, rank, logger
        self._is_dead = False
        self._num = 0
        self._done: Sequence[int] = ()
        self._start_at = 0.0
        self.error = ""

    def note_done(self, done: Sequence[int]) -> None:
        """Take in how far the process is: numbers that grow with what it gets done."""
        if self._num and any(new > old for new, old in zip(done, self._done, strict=True)):
            self._num, self.error = 0, ""

    def note(self, how: str, done: Sequence[int]) -> float:
        """It died, having got this far; or it could not be started, which is no better.

        Returns:
            Seconds until another one is to be started: ever more once it is no accident.
        """
        self.note_done(done)
        # A successor that has not found out yet how far it is gets nothing done by that.
        self._done = [max(pair) for pair in zip(done, self._done or done, strict=True)]
        self._num += 1
        delay, vain = 0.0, self._num - _DEATHS_IN_TROUBLE
        if vain >= 0:
            delay = min(_BACKOFF_SECONDS * 2.0 ** min(vain, 10), _LONGEST_BACKOFF_SECONDS)
            end = _end_of(self._log)
            self.error = f"{self._name} keeps dying ({how}); {self._log} ends: {end or 'empty'}"
        self._start_at = time.monotonic() + delay
        return delay

    def successor(
        self,
        exit_code: int,
        done: Sequence[int],
        start: Callable[[], DetachedProcess],
        *,
        at_once: bool = False,
    ) -> DetachedProcess | None:
        """Start another process in the place of one that ended, which is noted and said once.

        Returns:
            The new process; None if it is not time to start one, or none can be started now.
        """
        if not self._is_dead:
            self._is_dead = True
            delay = self.note(how_it_ended(exit_code), done)
            when = f" in {delay:.0f} s" if delay else ""
            kind = self._name.removeprefix("the ")
            text = f"{self._name} of rank {self._rank} ended; starting another{when}"
            facts = {"rank": self._rank, "exit_code": exit_code, f"{kind}_log": str(self._log)}
            log_event(self._logger, logging.WARNING, f"{kind}_restarted", text, **facts)
        if not at_once and time.monotonic() < self._start_at:
            return None
        try:
            process = start()
        except OSError as error:  # no memory or no process is to be had: perhaps later
            self.note(f"it cannot be started: {error}", done)
            text = "%s of rank %d cannot be started again now: %s"
            self._logger.warning(text, self._name, self._rank, error)
            return None
        self._is_dead = False
        return process


def how_it_ended(exit_code: int) -> str:
    """Why a process is no longer there, in words."""
    if exit_code >= 0:
        return f"exit code {exit_code}"
    name = signal.strsignal(-exit_code) or "unknown"
    hint = ", out of memory?" if -exit_code == signal.SIGKILL else ""
    return f"signal {-exit_code}: {name}{hint}"


def _end_of(log: Path) -> str:
    """The last lines of a log, as one."""
    try:
        with log.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - 8 * _QUOTED_CHARACTERS))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError as error:
        return str(error)
    said = [line.strip() for line in lines if line.strip()][-_QUOTED_LINES:]
    return printable(" | ".join(said)[-_QUOTED_CHARACTERS:])


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
        self.begin_anew()

    def begin_anew(self) -> None:
        """Start a writer that nobody has seen die; one before, if there was any, was stopped.

        Raises:
            WriterFailed: If it does not start.
        """
        with self._pipe:
            self._deaths = Deaths(
                "the writer", self._settings.staging.writer_log, self._settings.rank, _logger
            )
            self._process = self._start()
            self._finishing = False
            self._checked = time.monotonic()
            if self._write_through:
                self._tell(WRITE_THROUGH)
        self._status = self._wait_for_status()

    @property
    def pid(self) -> int:
        """Process id of the writer."""
        return self._process.pid

    def read_status(self) -> WriterStatus:
        """What the writer has done; for any thread. One that keeps dying is in trouble."""
        return self._status.read().with_errors(self._deaths.error)

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
        self._deaths.note_done(self._done())
        if time.monotonic() - self._checked > _CHECK_SECONDS:
            self._look()
        return self.read_status()

    def _done(self) -> list[int]:
        """What grows with whatever a writer is there for."""
        status = self._status.read()
        return [
            status.durable_step,
            status.durable_snapshot,
            status.batches,
            status.adopted,
            status.remote_step,
            status.remote_bytes,
        ]

    def _look(self, *, at_once: bool = False) -> None:
        """Replace a writer that died; after several such deaths not always ``at_once``."""
        self._checked = time.monotonic()
        if self._finishing or self._process.poll() is None:
            return
        with self._pipe:
            self._close_pipe()
            process = self._deaths.successor(
                self._process.returncode, self._done(), self._start, at_once=at_once
            )
            if process is not None:
                self._process = process
                self.restarts += 1
                if self._write_through:
                    self._tell(WRITE_THROUGH)

    def finish(self, timeout_seconds: float) -> WriterStatus:
        """Tell the writer that nothing more comes, and wait until all is durable; idempotent.

        One that dies on the way is replaced. It is also waited for while it uploads; what the
        store lacks when the time is over is said in a warning.

        Raises:
            WriterFailed: If it does not get there in time; what is staged stays in staging.
        """
        deadline = time.monotonic() + timeout_seconds
        for _ in range(_FINISH_ATTEMPTS):
            self._look(at_once=True)  # a writer that died unnoticed has a successor, which drains
            with self._pipe:
                # A byte, not only the pipe's end: forked DataLoader workers may hold it open.
                self._tell(END)
                self._close_pipe()
            try:
                self._process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                break
            if self._status.read().closed:
                break
        self._finishing = True
        is_running = self._process.poll() is None  # before its last word is read
        status = self.read_status()
        if not status.closed:
            staging = self._settings.staging
            raise WriterFailed(
                f"the writer of rank {self._settings.rank} "
                + (
                    f"did not finish within {timeout_seconds:.0f} s "
                    f"({status.error or 'no error reported'}), and goes on"
                    if is_running
                    else f"died {_FINISH_ATTEMPTS} times while it finished; {staging.writer_log} "
                    "says why"
                )
                + f"; nothing is lost: the next attach adopts {staging.root}"
            )
        lacks = store_lacks(self._settings, status, self.pid if is_running else None)
        if lacks:
            _logger.warning("rank %d: %s", self._settings.rank, lacks)
        elif is_running:
            _logger.warning("rank %d: the writer is still busy", self._settings.rank)
        return status

    def orphan(self) -> None:
        """Let the writer see what it sees when its trainer dies: the end of its pipe."""
        self._finishing = True
        with self._pipe, suppress(BrokenPipeError):
            self._close_pipe()

    def stop(self) -> None:
        """End the writer at once, as its trainer's death would not."""
        self._finishing = True
        self._process.kill()
        with self._process:  # closes its pipe and waits
            pass

    def _close_pipe(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()

    def _tell(self, word: bytes) -> None:
        """Write to the process; `_pipe` is held. One that has ended has nothing to be told."""
        pipe = self._process.stdin
        assert pipe is not None
        if not pipe.closed:
            try:
                pipe.write(word)
            except BrokenPipeError:
                _logger.warning("the writer of rank %d had ended before", self._settings.rank)

    def _start(self) -> DetachedProcess:
        log, module = self._settings.staging.writer_log, "lowdiff.persistence.writer.main"
        # It multiplies no matrices, for which NumPy would start a thread for each core.
        return start_detached(module, self._settings, log, OPENBLAS_NUM_THREADS="1")

    def _wait_for_status(self) -> StatusReader[WriterStatus]:
        path = self._settings.staging.status
        deadline = time.monotonic() + _START_SECONDS
        while time.monotonic() < deadline:
            # The file gets its size before its content, and content before its first status.
            if path.exists() and path.stat().st_size:
                reader = StatusReader(path, WriterStatus)
                if reader.read().durable_step >= 0:
                    return reader
            if self._process.poll() is not None:
                break
            time.sleep(0.01)
        self._close_pipe()  # should it come up after all, it ends at once
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
