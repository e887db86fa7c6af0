"""A lease on a run folder: says who trains a run, also where flock does not reach.

On many network file systems ``flock`` works on one machine only. The trainer of a run therefore
also renews a line in a file. A holder on this machine is judged by its flock, which ends with its
process. A holder elsewhere is judged by whether its line changes while we watch, because clocks of
two machines may disagree.

The file system may be slow, full or unreachable for a while, and training goes on. A line that
cannot be read or renewed proves nothing; only another holder's line proves that the lease is lost.
"""

from __future__ import annotations

import os
import secrets
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from lowdiff.core.events import Code, printable

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NOBODY = "-"
_POLL_SECONDS = 0.1
#: Time without renewal after which a trainer elsewhere may take over.
LEASE_SECONDS = 15.0
_LINE_BYTES = 256
_DESCRIPTION = 120
#: How long the training thread waits for a file system that may not answer.
_LOOK_SECONDS = 1.0
#: Clock that advances while the machine sleeps, where there is such a clock.
_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def this_machine() -> str:
    """Return a name of the running kernel, which is the reach of flock, also across containers."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return secrets.token_hex(8)  # as if on another machine, so holders are watched for longer


@dataclass(frozen=True, slots=True)
class LeaseSeen:
    """A lease as one sees it who only looks.

    Attributes:
        holder: Description of who wrote the line.
        remark: What the line says besides.
        is_held: Whether it was not given back; whoever died with it did not.
        is_here: Whether its holder is or was on this machine.
        age_seconds: Time since it was written, by the clocks of this machine and of the file system.
    """

    holder: str
    remark: str
    is_held: bool
    is_here: bool
    age_seconds: float


def look_at_lease(path: Path) -> LeaseSeen | None:
    """Return what a lease says; None if there is none, or it cannot be read."""
    try:
        with path.open("rb") as file:
            line = file.read(2 * _LINE_BYTES)
            written = os.fstat(file.fileno()).st_mtime
    except OSError:
        return None
    return LeaseSeen(
        holder=printable(_field(line, 3)),
        remark=_field(line, 4),
        is_held=_field(line, 1) not in ("", _NOBODY),
        is_here=_field(line, 1) == this_machine(),
        age_seconds=max(0.0, time.time() - written),
    )


class Lease:
    """A line that a thread of its holder renews every fifth of ``seconds``.

    A new holder replaces the file, so a previous holder that was only asleep cannot overwrite the
    new line, but notices it. Large because its thread and its holder share all of this under one lock.

    Args:
        path: File of the line.
        seconds: Time without renewal after which a trainer elsewhere may take over.
        machine: Name of this machine. Only holders elsewhere are watched: the caller holds the
            flock, so a holder here has lost it.

    Attributes:
        remark: What the line says besides, from the next renewal on; at first, what the holder before said.
    """

    def __init__(self, path: Path, *, seconds: float = LEASE_SECONDS, machine: str = "") -> None:
        self.path = path
        self.seconds = seconds
        self._machine = machine or this_machine()
        self._token = secrets.token_hex(8)
        self._description = ""
        self.remark = ""
        self._beats = 0
        self._trouble = ""
        self._lost = False
        self._looked = 0.0
        self._asked = self._answered = 0  # looks requested from, and done by, the thread
        self._has_ended = False
        self._news = threading.Condition()  # guards the three fields above
        self._thread: threading.Thread | None = None

    def acquire(self, description: str, *, timeout_seconds: float) -> bool:
        """Take the lease; return False if a holder elsewhere keeps renewing it.

        Args:
            description: Description of the holder, for others to read.
            timeout_seconds: How long to wait; less than `seconds` never takes over from elsewhere.
        """
        self._description = description
        began = since = _now()
        seen = self._line()
        while True:
            is_free = seen is None or _field(seen, 1) in (_NOBODY, self._machine)
            if not is_free and _now() - since >= self.seconds:
                Code.LEASE_TAKEN_OVER.warn(
                    f"{_field(seen, 3)} has not renewed its lease; taking over"
                )
                is_free = True
            self.remark = _field(seen, 4)
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
        """Return the description in the line."""
        try:
            return printable(_field(self._line(), 3)) or "an unknown process"
        except OSError:
            return "an unknown process"

    def is_lost(self, *, look: bool = False) -> bool:
        """Return whether another trainer took over, as far as is known.

        Args:
            look: Whether to look again, for at most a second. The method also looks again if the
                last look is old, because then this process was asleep.
        """
        if not self._lost and (look or _now() - self._looked > self.seconds):
            with self._news:
                self._asked = mine = self._asked + 1
                self._news.notify_all()
                # A look that began before the request does not count.
                self._news.wait_for(lambda: self._answered >= mine, _LOOK_SECONDS)
            self._looked = _now()  # do not ask a file system that does not answer at every step
        return self._lost

    def release(self) -> None:
        """Give up the lease; does nothing when not held."""
        with self._news:
            self._has_ended = True
            self._news.notify_all()
        if self._thread is not None:
            self._thread.join(_LOOK_SECONDS)
            self._thread = None

    def _take(self, seen: bytes | None) -> bool:
        """Put our line in the place of ``seen``; False if another trainer was faster."""
        if self._line() != seen:
            return False
        self._put()
        # Two trainers may have seen the same line; the one whose file stays holds the lease. If one
        # of them stops here for longer, the run's fences decide, as each incarnation has only one.
        time.sleep(2 * _POLL_SECONDS)
        return self._is_ours(self._line())

    def _put(self) -> None:
        """Replace the file with ours."""
        partial = self.path.with_name(f"{self.path.name}.{self._token}.partial")
        try:
            with partial.open("wb", buffering=0) as file:
                self._write(file.fileno())
            partial.replace(self.path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise

    def _renew(self) -> None:
        """Renew the line until the lease is released; runs on the lease's thread."""
        while not self._has_ended and not self._lost:
            with self._news:
                self._news.wait_for(
                    lambda: self._has_ended or self._asked > self._answered, self.seconds / 5
                )
                asked = self._asked
            if not self._has_ended:
                self.beat()
                self._looked = _now()
                with self._news:
                    self._answered = asked
                    self._news.notify_all()
        try:
            if not self._lost:
                self._renew_line(_NOBODY)
        except OSError as error:
            Code.LEASE_NOT_RETURNED.warn(f"the lease {self.path} could not be released: {error}")

    def beat(self) -> None:
        """Renew the line once, and see whether it is still this holder's; on the lease's thread."""
        try:
            line = self._renew_line(self._machine)
            if not line:
                self._put()  # the folder was missing and is back, or is being copied back
            self._lost = bool(line) and not self._is_ours(line)
            self._trouble = ""
        except OSError as error:
            if str(error) != self._trouble:
                Code.LEASE_NOT_RENEWED.warn(f"the lease {self.path} cannot be renewed now: {error}")
            self._trouble = str(error)

    def _renew_line(self, machine: str) -> bytes | None:
        """Write our line again if the file has it; return the previous line, None without a file."""
        try:
            # A trainer that takes over meanwhile replaces the file, so this write does not reach
            # it.
            with self.path.open("r+b", buffering=0) as file:
                line = file.read(2 * _LINE_BYTES)
                if self._is_ours(line):
                    self._write(file.fileno(), machine)
                return line
        except FileNotFoundError:
            return None

    def _write(self, descriptor: int, machine: str = "") -> None:
        self._beats += 1
        description = self._description.encode()[:_DESCRIPTION].decode(errors="ignore")
        fields = (
            self._token,
            machine or self._machine,
            str(self._beats),
            description,
            self.remark,
        )
        line = "\t".join(fields).encode()
        os.pwrite(descriptor, line[:_LINE_BYTES].ljust(_LINE_BYTES) + b"\n", 0)
        os.fsync(descriptor)  # other machines see only what is on the server

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
