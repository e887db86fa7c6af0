"""Processes that outlive their trainer: how they are started, told, replaced and ended."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lowdiff.core.events import Code, printable
from lowdiff.persistence.files.paths import RunFolder, StagingFolder

_CHECK_SECONDS = 0.5
#: In place of settings: they come later, through stdin.
_TOLD_LATER = "-"
#: Number of deaths without progress in between after which an error is reported.
_DEATHS_UNTIL_ERROR = 3
#: Delay before a replacement after such a death: the first one, and the longest.
_BACKOFF_SECONDS, _LONGEST_BACKOFF_SECONDS = 1.0, 30.0
#: Most lines and characters that an error quotes from the end of a log.
_QUOTED_LINES, _QUOTED_CHARACTERS = 3, 500


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSettings:
    """Settings of a process, passed on its command line.

    Attributes:
        trainer_pid: Process id of the trainer; the process ends after this trainer.
        keeper: Rank of the trainer where the process works on a copy for another rank; else None.
    """

    run: str
    staging_root: str
    run_id: str
    incarnation: int
    rank: int
    world_size: int
    trainer_pid: int
    keeper: int | None = None

    @property
    def folder(self) -> RunFolder:
        """Return the run folder."""
        return RunFolder(Path(self.run))

    @property
    def staging(self) -> StagingFolder:
        """Return this incarnation's staging folder."""
        place = Path(self.staging_root), self.run_id, self.incarnation, self.rank
        if self.keeper is None:
            return StagingFolder.of(*place)
        return StagingFolder.copy_of(*place, self.keeper)

    def to_json(self) -> str:
        """Return the settings as a line of text."""
        return json.dumps(asdict(self))


_RESTARTED = {
    "writer": Code.WRITER_RESTARTED,
    "replica": Code.REPLICA_RESTARTED,
    "publisher": Code.PUBLISHER_RESTARTED,
}


class DetachedProcess(subprocess.Popen[bytes]):
    """A process that may outlive us: dropping its handle while it runs is allowed."""

    def __del__(self) -> None:
        # Popen would issue a warning, which is an error under `python -W error`. Without a process
        # id, the process could not be started.
        if self.returncode is None and self.pid and self.poll() is None:
            self.returncode = 0
        super().__del__()


def start_detached(
    module: str, settings: ProcessSettings, log: Path, **environment: str
) -> DetachedProcess:
    """Start a module with its settings, a pipe to its stdin, and its output appended to ``log``.

    Its environment is that of this process, plus ``environment``.
    """
    # A session of its own, so that a launcher's kill of our process group does not reach it.
    with log.open("ab") as output:
        return DetachedProcess(
            [sys.executable, "-m", module, settings.to_json()],
            stdin=subprocess.PIPE,
            bufsize=0,  # messages are sent at once
            stdout=output,
            stderr=output,
            start_new_session=True,
            cwd="/",  # `-m` searches there first, and no user module may shadow ours
            env={**os.environ, "PYTHONPATH": _import_path(), **environment},
        )


def start_waiting(module: str, **environment: str) -> DetachedProcess:
    """Start a module that loads what it needs, and has no settings yet; see `told_settings`."""
    with open(os.devnull, "ab") as output:
        return DetachedProcess(
            [sys.executable, "-m", module, _TOLD_LATER],
            stdin=subprocess.PIPE,
            bufsize=0,
            stdout=output,
            stderr=output,
            start_new_session=True,
            cwd="/",
            env={**os.environ, "PYTHONPATH": _import_path(), **environment},
        )


def tell_settings(process: DetachedProcess, settings: ProcessSettings, log: Path) -> bool:
    """Give a waiting process its settings and its log; whether it lives."""
    line = json.dumps([str(log), settings.to_json()])
    assert process.stdin is not None
    try:
        process.stdin.write(line.encode() + b"\n")
    except BrokenPipeError:
        process.stdin.close()
        return False
    return True


def told_settings(arguments: Sequence[str]) -> str | None:
    """In a process that was started: return its settings, as JSON, once its trainer tells them.

    Returns:
        None if the trainer ended without a word.
    """
    if arguments[0] != _TOLD_LATER:
        return arguments[0]
    line, trainer = b"", os.getppid()
    # Byte by byte, because orders follow. Forked processes may hold the pipe open after the trainer's death.
    while not line.endswith(b"\n"):
        while not select.select([0], [], [], _CHECK_SECONDS)[0]:
            if os.getppid() != trainer:
                return None
        byte = os.read(0, 1)
        if not byte:
            return None
        line += byte
    log, settings = json.loads(line)
    with open(log, "ab") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    return str(settings)


def _import_path() -> str:
    """Return a path that finds this very lowdiff before any other of the environment."""
    here = Path(str(sys.modules["lowdiff"].__file__)).parents[1]
    others = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p]
    return os.pathsep.join([str(here), *map(os.path.abspath, others)])


class Deaths:
    """Deaths of a process, and of its replacements, since it last made progress.

    Attributes:
        error: The problem, with the end of the process's log; empty while it may be an accident.
    """

    def __init__(self, name: str, log: Path, rank: int) -> None:
        self._name, self._log, self._rank = name, log, rank
        self._is_dead = False
        self._num = 0
        self._done: Sequence[int] = ()
        self._start_at = 0.0
        self.error = ""

    @property
    def are_counted(self) -> bool:
        """Whether the process died since it last made progress."""
        return self._num > 0

    def take_progress(self, done: Sequence[int]) -> None:
        """Take in the process's progress: numbers that grow with its work."""
        if self._num and any(new > old for new, old in zip(done, self._done, strict=True)):
            self._num, self.error = 0, ""

    def count(self, how: str, done: Sequence[int]) -> float:
        """Count a death, or a failed start, at this progress.

        Returns:
            Seconds until a replacement is to be started; they grow once deaths repeat.
        """
        self.take_progress(done)
        # A replacement may report less progress at first, because it has not caught up yet.
        self._done = [max(pair) for pair in zip(done, self._done or done, strict=True)]
        self._num += 1
        delay, vain = 0.0, self._num - _DEATHS_UNTIL_ERROR
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
        """Replace a process that ended; count its death and log it once.

        Returns:
            The new process; None if it is too early to start one, or if starting fails.
        """
        if not self._is_dead:
            self._is_dead = True
            delay = self.count(how_it_ended(exit_code), done)
            when = f" in {delay:.0f} s" if delay else ""
            kind = self._name.removeprefix("the ")
            facts: dict[str, Any] = {"exit_code": exit_code, f"{kind}_log": str(self._log)}
            _RESTARTED[kind].warn(
                f"{self._name} ended; starting another{when}", rank=self._rank, **facts
            )
        return self.started(done, start, at_once=at_once)

    def started(
        self,
        done: Sequence[int],
        start: Callable[[], DetachedProcess],
        *,
        at_once: bool = False,
    ) -> DetachedProcess | None:
        """Start a process; a failure counts as a death.

        Returns:
            The process; None if it is too early to start one, or if starting fails.
        """
        if not at_once and time.monotonic() < self._start_at:
            return None
        try:
            process = start()
        except OSError as error:  # no memory or process is available now; try again later
            self.count(f"it cannot be started: {error}", done)
            text = f"{self._name} cannot be started now: {error}"
            Code.RESTART_FAILED.warn(text, rank=self._rank)
            return None
        self._is_dead = False
        return process


def how_it_ended(exit_code: int) -> str:
    """Return in words why a process ended."""
    if exit_code >= 0:
        return f"exit code {exit_code}"
    name = signal.strsignal(-exit_code) or "unknown"
    hint = ", mostly the out-of-memory killer" if -exit_code == signal.SIGKILL else ""
    return f"signal {-exit_code}: {name}{hint}"


def _end_of(log: Path) -> str:
    """Return the last lines of a log as one line."""
    try:
        with log.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - 8 * _QUOTED_CHARACTERS))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError as error:
        return str(error)
    said = [line.strip() for line in lines if line.strip()][-_QUOTED_LINES:]
    return printable(" | ".join(said)[-_QUOTED_CHARACTERS:])


class ProcessHandle(ABC):
    """A trainer's handle on a process that serves it; starts, replaces and ends the process.

    Attributes:
        has_begun: Whether the first process was started.
        restarts: Number of replacements.
        is_stopped: Whether the process is to end and is not replaced any more.
    """

    def __init__(self, name: str, log: Path, rank: int) -> None:
        self._name, self._log, self._rank = name, log, rank
        # Held to start, tell or end the process; a signal handler of the thread that holds it may close all.
        self._pipe = threading.RLock()
        self.restarts = 0
        self.has_begun = self.is_stopped = False

    @property
    def pid(self) -> int:
        """Return the process id, once the first process was started."""
        return self._process.pid

    def orphan(self) -> None:
        """Close the pipe, as the trainer's death would."""
        self.is_stopped = True
        with self._pipe, suppress(BrokenPipeError):
            if self.has_begun:
                self._close_pipe()

    def stop(self) -> None:
        """End the process at once, which the trainer's death would not do."""
        self.is_stopped = True
        with self._pipe:
            if self.has_begun:
                self._process.kill()
                with self._process:  # closes the pipe and waits
                    pass

    @abstractmethod
    def _start(self) -> DetachedProcess:
        """Start a process."""

    @abstractmethod
    def _done(self) -> Sequence[int]:
        """Return numbers that grow with the process's work."""

    def _greet(self) -> None:  # noqa: B027
        """Send a new process its first messages; `_pipe` is held."""

    def _begin(self) -> None:
        """Start the first process."""
        with self._pipe:
            self._deaths = Deaths(self._name, self._log, self._rank)
            self._run(self._start())

    def _run(self, process: DetachedProcess) -> None:
        """Take a first process for the one that serves; `_pipe` is held."""
        self._process = process
        self.has_begun = True
        self._checked = time.monotonic()
        self._greet()

    def tend(self) -> None:
        """Read the progress, and from time to time start another process in place of a dead one. For one thread."""
        if self._deaths.are_counted:
            self._deaths.take_progress(self._done())
        if time.monotonic() - self._checked > _CHECK_SECONDS:
            self._replace_if_dead()

    def _replace_if_dead(self, *, at_once: bool = False) -> None:
        """Replace a dead process; after several deaths, delays apply even with ``at_once``."""
        self._checked = time.monotonic()
        with self._pipe:
            if self.is_stopped or self._process.poll() is None:
                return
            self._close_pipe()
            exit_code, done = self._process.returncode, self._done()
            process = self._deaths.successor(exit_code, done, self._start, at_once=at_once)
            if process is not None:
                self._process = process
                self.restarts += 1
                self._greet()

    def _close_pipe(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
