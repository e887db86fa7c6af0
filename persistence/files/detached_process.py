"""Processes that outlive their trainer: how each is told, started, replaced and ended."""

from __future__ import annotations

import json
import logging
import os
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

from lowdiff.core.events import Code, printable, warn
from lowdiff.persistence.files.paths import RunFolder, StagingFolder

_CHECK_SECONDS = 0.5
#: So many deaths, with nothing done in between, are no accident.
_DEATHS_IN_TROUBLE = 3
#: How long after such a death another process is started, at first and at most.
_BACKOFF_SECONDS, _LONGEST_BACKOFF_SECONDS = 1.0, 30.0
#: How much of the end of a log an error quotes.
_QUOTED_LINES, _QUOTED_CHARACTERS = 3, 500


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSettings:
    """Whom a process serves, as it travels on its command line.

    Attributes:
        trainer_pid: The process whose end it watches for.
    """

    run: str
    staging_root: str
    run_id: str
    incarnation: int
    rank: int
    world_size: int
    trainer_pid: int

    @property
    def folder(self) -> RunFolder:
        """The run folder."""
        return RunFolder(Path(self.run))

    @property
    def staging(self) -> StagingFolder:
        """This incarnation's staging folder."""
        return StagingFolder.of(Path(self.staging_root), self.run_id, self.incarnation, self.rank)

    def to_json(self) -> str:
        """For the command line."""
        return json.dumps(asdict(self))


class DetachedProcess(subprocess.Popen[bytes]):
    """A process that is meant to outlive us: to drop its handle while it runs is no mistake."""

    def __del__(self) -> None:
        # Popen would warn of it, which is an error under `python -W error`. No process id: it
        # could not be started.
        if self.returncode is None and self.pid and self.poll() is None:
            self.returncode = 0
        super().__del__()


def start_detached(
    module: str, settings: ProcessSettings, log: Path, **environment: str
) -> DetachedProcess:
    """Start a module with its settings, a pipe to its stdin, and its output appended to ``log``.

    Its environment is ours and ``environment``.
    """
    # In its own session, so that a launcher's kill of our process group does not reach it.
    with log.open("ab") as output:
        return DetachedProcess(
            [sys.executable, "-m", module, settings.to_json()],
            stdin=subprocess.PIPE,
            bufsize=0,  # what it is told goes out at once
            stdout=output,
            stderr=output,
            start_new_session=True,
            cwd="/",  # `-m` looks there first: no module of the user's may shadow ours
            env={**os.environ, "PYTHONPATH": _import_path(), **environment},
        )


def _import_path() -> str:
    """Where this very lowdiff is found, ahead of whatever the environment says."""
    here = Path(str(sys.modules["lowdiff"].__file__)).parents[1]
    others = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p]
    return os.pathsep.join([str(here), *map(os.path.abspath, others)])


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

    @property
    def are_counted(self) -> bool:
        """Whether it died since it got something done."""
        return self._num > 0

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
            code = Code.REPLICA_RESTARTED if kind == "replica" else Code.WRITER_RESTARTED
            log: dict[str, Any] = {f"{kind}_log": str(self._log)}
            warn(self._logger, code, text, rank=self._rank, exit_code=exit_code, **log)
        if not at_once and time.monotonic() < self._start_at:
            return None
        try:
            process = start()
        except OSError as error:  # no memory or no process is to be had: perhaps later
            self.note(f"it cannot be started: {error}", done)
            text = "%s of rank %d cannot be started again now: %s"
            warn(self._logger, Code.RESTART_FAILED, text, self._name, self._rank, error)
            return None
        self._is_dead = False
        return process


def how_it_ended(exit_code: int) -> str:
    """Why a process is no longer there, in words."""
    if exit_code >= 0:
        return f"exit code {exit_code}"
    name = signal.strsignal(-exit_code) or "unknown"
    hint = ", mostly the out-of-memory killer" if -exit_code == signal.SIGKILL else ""
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


class ProcessHandle(ABC):
    """A trainer's handle on a process that serves it: started, replaced when it dies, and ended.

    Attributes:
        restarts: How often it was replaced.
        is_stopped: Whether it is to end, and so is not replaced any more.
    """

    def __init__(self, name: str, log: Path, rank: int, logger: logging.Logger) -> None:
        self._name, self._log, self._rank, self._logger = name, log, rank, logger
        self._pipe = threading.Lock()  # of whoever starts, tells or ends the process
        self.restarts = 0

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def orphan(self) -> None:
        """Let the process see what it sees when its trainer dies: the end of its pipe."""
        self.is_stopped = True
        with self._pipe, suppress(BrokenPipeError):
            self._close_pipe()

    def stop(self) -> None:
        """End the process at once, as its trainer's death would not."""
        self.is_stopped = True
        self._process.kill()
        with self._process:  # closes its pipe and waits
            pass

    @abstractmethod
    def _start(self) -> DetachedProcess:
        """Start one."""

    @abstractmethod
    def _done(self) -> Sequence[int]:
        """Numbers that grow with whatever the process is there for."""

    def _greet(self) -> None:  # noqa: B027
        """Tell one that was just started what it has to know; `_pipe` is held."""

    def _begin(self) -> None:
        """Start one that nobody has seen die."""
        with self._pipe:
            self._deaths = Deaths(self._name, self._log, self._rank, self._logger)
            self._process = self._start()
            self.is_stopped = False
            self._checked = time.monotonic()
            self._greet()

    def _look_after(self) -> None:
        """Take in how far it is, and now and then whether it is still there. For one thread."""
        if self._deaths.are_counted:
            self._deaths.note_done(self._done())
        if time.monotonic() - self._checked > _CHECK_SECONDS:
            self._replace_if_dead()

    def _replace_if_dead(self, *, at_once: bool = False) -> None:
        """Start another one for one that died; after several such deaths not always ``at_once``."""
        self._checked = time.monotonic()
        if self.is_stopped or self._process.poll() is None:
            return
        with self._pipe:
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
