"""A lease on a run folder: who trains this run, also where flock does not reach (design rule R13).

On many network file systems ``flock`` holds on one machine only. So whoever trains a run also renews
a line in a file. A holder on this machine is judged by its flock, which ends with its process; one
elsewhere by whether its line changes while we look, because clocks of two machines may disagree.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
import time
from pathlib import Path

_logger = logging.getLogger(__name__)

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_POLL_SECONDS = 0.1
_LINE_BYTES = 256


def this_machine() -> str:
    """Names the running kernel: what flock reaches, whatever containers share it."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return socket.gethostname()


class Lease:
    """A line that its holder renews every fifth of ``seconds``.

    Renewal writes through the descriptor of the file that the holder made. Who takes over puts
    another file in its place, so that a holder that was only asleep cannot write over it, but finds
    out.

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
        self._beats = 0
        self._descriptor = -1
        self._renewed = 0.0
        self._lost = False
        self._end = threading.Event()
        self._thread: threading.Thread | None = None

    def acquire(self, description: str, *, timeout_seconds: float) -> bool:
        """Take the lease, waiting at most so long; False if somebody elsewhere goes on renewing it.

        Args:
            description: Who takes it, for others to read.
            timeout_seconds: Less than `seconds` never takes over from a holder elsewhere.
        """
        self._description = description
        deadline = time.monotonic() + timeout_seconds
        seen, since = self._line(), time.monotonic()
        while True:
            if seen is None or _field(seen, 1) == self._machine:
                taken = self._take(seen)
            elif time.monotonic() - since >= self.seconds:
                _logger.warning("%s has not been renewed; taking over", self.holder())
                taken = self._take(seen)
            else:
                taken = False
            if taken:
                break
            if time.monotonic() >= deadline:
                return False
            time.sleep(_POLL_SECONDS)
            line = self._line()
            if line != seen:
                seen, since = line, time.monotonic()
        self._thread = threading.Thread(target=self._renew, name="lowdiff-lease", daemon=True)
        self._thread.start()
        return True

    def holder(self) -> str:
        """Who wrote the line."""
        return _field(self._line(), 3) or "an unknown process"

    @property
    def is_lost(self) -> bool:
        """Whether somebody took over. Looks itself if renewal is late: this process was asleep."""
        if not self._lost and time.monotonic() - self._renewed > self.seconds:
            self._beat()
        return self._lost

    def release(self) -> None:
        """Give the lease back; does nothing when not held."""
        self._end.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._descriptor >= 0:
            if self._is_ours():
                self.path.unlink(missing_ok=True)
            os.close(self._descriptor)
            self._descriptor = -1

    def _take(self, seen: bytes | None) -> bool:
        """Put our line where that of ``seen`` is; False if somebody else was faster."""
        partial = self.path.with_name(f"{self.path.name}.{self._token}.partial")
        descriptor = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        self._descriptor = descriptor
        try:
            self._write()
            if self._line() == seen:
                partial.replace(self.path)
                # Two may have seen the same: the one whose file stays has it.
                time.sleep(2 * _POLL_SECONDS)
                if self._is_ours():
                    self._renewed = time.monotonic()
                    return True
        except BaseException:
            self._forget(descriptor)
            raise
        finally:
            partial.unlink(missing_ok=True)
        self._forget(descriptor)
        return False

    def _forget(self, descriptor: int) -> None:
        os.close(descriptor)
        self._descriptor = -1

    def _renew(self) -> None:
        while not self._end.wait(self.seconds / 5) and not self._lost:
            self._beat()

    def _beat(self) -> None:
        try:
            if self._is_ours():
                self._write()
                self._renewed = time.monotonic()
            else:
                self._lost = True
        except OSError as error:
            _logger.warning("the lease %s cannot be renewed now: %s", self.path, error)

    def _write(self) -> None:
        self._beats += 1
        line = f"{self._token}\t{self._machine}\t{self._beats}\t{self._description}"
        os.pwrite(self._descriptor, line.encode()[:_LINE_BYTES].ljust(_LINE_BYTES) + b"\n", 0)
        os.fsync(self._descriptor)  # other machines see what is on the server

    def _is_ours(self) -> bool:
        return _field(self._line(), 0) == self._token

    def _line(self) -> bytes | None:
        try:
            with self.path.open("rb") as file:
                return file.read(2 * _LINE_BYTES)
        except FileNotFoundError:
            return None


def _field(line: bytes | None, index: int) -> str:
    fields = (line or b"").decode(errors="replace").strip().split("\t")
    return fields[index] if index < len(fields) else ""
