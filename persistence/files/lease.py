"""A lease on a run folder: who trains this run, also where flock does not reach.

On many network file systems ``flock`` holds on one machine only. So whoever trains a run also renews
a line in a file. A holder on this machine is judged by its flock, which ends with its process; one
elsewhere by whether its line changes while we look, because clocks of two machines may disagree.

The file system may be slow, full, or gone for a while, and training goes on: that a line cannot be
read or renewed says nothing. Only somebody else's line says that the lease is lost.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from pathlib import Path

from lowdiff.core.events import Code, printable, warn

_logger = logging.getLogger(__name__)

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NOBODY = "-"
_POLL_SECONDS = 0.1
_LINE_BYTES = 256
#: How long the training thread waits for a look at a file system that may not answer.
_LOOK_SECONDS = 1.0
#: Goes on while the machine sleeps, where there is such a clock.
_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def this_machine() -> str:
    """Names the running kernel: what flock reaches, whatever containers share it."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return secrets.token_hex(8)  # any other machine, which is watched for some seconds longer


class Lease:
    """A line that a thread of its holder renews every fifth of ``seconds``.

    Who takes over puts another file in the place of the holder's, so that a holder that was only
    asleep cannot write over it, but finds out.

    Args:
        path: Where the line is kept.
        seconds: After so long without renewal somebody elsewhere may take over.
        machine: Only a holder elsewhere is watched: one here has lost its flock to the caller.
    """

    def __init__(self, path: Path, *, seconds: float = 15.0, machine: str = "") -> None:
        self.path = path
        self.seconds = seconds
        self._machine = machine or this_machine()
        self._token = secrets.token_hex(8)
        self._description = ""
        self._beats = 0
        self._trouble = ""
        self._lost = False
        self._looked = 0.0
        self._asked = self._answered = 0  # looks that the thread was asked for
        self._has_ended = False
        self._news = threading.Condition()  # of the three above
        self._thread: threading.Thread | None = None

    def acquire(self, description: str, *, timeout_seconds: float) -> bool:
        """Take the lease, waiting at most so long; False if somebody elsewhere goes on renewing it.

        Args:
            description: Who takes it, for others to read.
            timeout_seconds: Less than `seconds` never takes over from a holder elsewhere.
        """
        self._description = description
        began = since = _now()
        seen = self._line()
        while True:
            is_free = seen is None or _field(seen, 1) in (_NOBODY, self._machine)
            if not is_free and _now() - since >= self.seconds:
                warn(
                    _logger,
                    Code.LEASE_TAKEN_OVER,
                    "%s has not renewed its lease; taking over",
                    printable(_field(seen, 3)),
                )
                is_free = True
            if is_free and self._take(seen):
                break
            if _now() - began >= timeout_seconds:
                return False
            time.sleep(_POLL_SECONDS)
            line = self._line()
            if line != seen:
                seen, since = line, _now()
        self._looked = _now()
        self._thread = threading.Thread(target=self._renew, name="lowdiff-lease", daemon=True)
        self._thread.start()
        return True

    def holder(self) -> str:
        """Who wrote the line."""
        try:
            return printable(_field(self._line(), 3)) or "an unknown process"
        except OSError:
            return "an unknown process"

    def is_lost(self, *, look: bool = False) -> bool:
        """Whether somebody took over, as far as is known.

        Args:
            look: Look again, but no longer than a second; so it does by itself if the last look is
                old, because then this process was asleep.
        """
        if not self._lost and (look or _now() - self._looked > self.seconds):
            with self._news:
                self._asked = mine = self._asked + 1
                self._news.notify_all()
                # Not by a look that had begun before.
                self._news.wait_for(lambda: self._answered >= mine, _LOOK_SECONDS)
            self._looked = _now()  # a file system that does not answer is not asked at each step
        return self._lost

    def release(self) -> None:
        """Give the lease back; does nothing when not held."""
        with self._news:
            self._has_ended = True
            self._news.notify_all()
        if self._thread is not None:
            self._thread.join(_LOOK_SECONDS)
            self._thread = None

    def _take(self, seen: bytes | None) -> bool:
        """Put our line where that of ``seen`` is; False if somebody else was faster."""
        if self._line() != seen:
            return False
        self._put()
        # Two may have seen the same: the one whose file stays has it. Where one of them stops
        # here for longer than this, the run's fences decide, of which there is one per life.
        time.sleep(2 * _POLL_SECONDS)
        return self._is_ours(self._line())

    def _put(self) -> None:
        """Put a file of ours in the place of whatever is there."""
        partial = self.path.with_name(f"{self.path.name}.{self._token}.partial")
        try:
            with partial.open("wb", buffering=0) as file:
                self._write(file.fileno())
            partial.replace(self.path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise

    def _renew(self) -> None:
        """What the thread does."""
        while not self._has_ended and not self._lost:
            with self._news:
                self._news.wait_for(
                    lambda: self._has_ended or self._asked > self._answered, self.seconds / 5
                )
                asked = self._asked
            if not self._has_ended:
                self._beat()
                self._looked = _now()
                with self._news:
                    self._answered = asked
                    self._news.notify_all()
        try:
            if not self._lost:
                self._renew_line(_NOBODY)
        except OSError as error:
            warn(
                _logger,
                Code.LEASE_NOT_RETURNED,
                "the lease %s could not be given back: %s",
                self.path,
                error,
            )

    def _beat(self) -> None:
        try:
            line = self._renew_line(self._machine)
            if not line:
                self._put()  # the folder was away, and is back, or is being copied back
            self._lost = bool(line) and not self._is_ours(line)
            self._trouble = ""
        except OSError as error:
            if str(error) != self._trouble:
                warn(
                    _logger,
                    Code.LEASE_NOT_RENEWED,
                    "the lease %s cannot be renewed now: %s",
                    self.path,
                    error,
                )
            self._trouble = str(error)

    def _renew_line(self, machine: str) -> bytes | None:
        """Write our line again if it is there; return what was there, None without a file."""
        try:
            # Who takes over meanwhile puts another file there, which this one does not write to.
            with self.path.open("r+b", buffering=0) as file:
                line = file.read(2 * _LINE_BYTES)
                if self._is_ours(line):
                    self._write(file.fileno(), machine)
                return line
        except FileNotFoundError:
            return None

    def _write(self, descriptor: int, machine: str = "") -> None:
        self._beats += 1
        line = f"{self._token}\t{machine or self._machine}\t{self._beats}\t{self._description}"
        os.pwrite(descriptor, line.encode()[:_LINE_BYTES].ljust(_LINE_BYTES) + b"\n", 0)
        os.fsync(descriptor)  # other machines see what is on the server

    def _is_ours(self, line: bytes | None) -> bool:
        return _field(line, 0) == self._token

    def _line(self) -> bytes | None:
        try:
            with self.path.open("rb") as file:
                return file.read(2 * _LINE_BYTES)
        except FileNotFoundError:
            return None


def _now() -> float:
    return time.clock_gettime(_CLOCK)


def _field(line: bytes | None, index: int) -> str:
    fields = (line or b"").decode(errors="replace").strip().split("\t")
    return fields[index] if index < len(fields) else ""
