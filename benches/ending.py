"""Commands that leave nothing behind, however they end.

Benches and tests start ranks, writers and replicas, most of them in sessions of their own: whoever kills the
command (a time limit, `kill`, a closed terminal) would leave them running beside the next measurement. So a
process of its own waits for the end of the command, and kills all that carry its mark, which is inherited with the
environment.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

#: In the environment of everything that commands start: their marks, the outermost first.
_MARKS = "LOWDIFF_STARTED_BY"
#: How long killed processes may take to be gone.
_SECONDS = 10.0
_is_watched = False


def run(main: Callable[[], object]) -> None:
    """Run a command's ``main``; SIGTERM ends it as an exception does, with its temporary folders."""
    leave_nothing()
    signal.signal(signal.SIGTERM, _end)
    main()


def _end(*_: object) -> None:
    signal.signal(signal.SIGTERM, lambda *_: None)  # a second one would end the clearing up
    sys.exit(128 + signal.SIGTERM)


def leave_nothing() -> None:
    """Have all processes that this one starts from now on end once it has ended.

    What it forks without ``exec`` carries the marks of outer commands only.
    """
    global _is_watched
    if _is_watched:
        return
    _is_watched = True
    mark = f"{os.getpid()}-{time.time_ns()}"
    command = [sys.executable, "-S", "-E", __file__, str(os.getpid()), mark]
    # Started without the mark; in a session of its own, so that Ctrl-C and a closed terminal spare it.
    nowhere = subprocess.DEVNULL
    subprocess.run(
        command, stdin=nowhere, stdout=nowhere, stderr=nowhere, start_new_session=True, check=True
    )
    os.environ[_MARKS] = ",".join([*filter(None, [os.environ.get(_MARKS)]), mark])


def _clear_away(pid: int, mark: str) -> None:
    """Wait until a process has ended; then kill what carries its mark until none is left."""
    with suppress(ProcessLookupError):  # it has ended
        select.select([os.pidfd_open(pid)], [], [])
    deadline = time.monotonic() + _SECONDS
    while (left := marked(_MARKS, mark)) and time.monotonic() < deadline:
        for process in left:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        time.sleep(0.05)


def marked(variable: str, mark: str) -> list[int]:
    """Return the ids of all processes in whose environment a variable holds a mark, alone or between commas."""
    begin, found = f"{variable}=".encode(), []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or belongs to another user
            entries = (folder / "environ").read_bytes().split(b"\0")
            values = [entry[len(begin) :] for entry in entries if entry.startswith(begin)]
            if any(mark.encode() in value.split(b",") for value in values):
                found.append(int(folder.name))
    return found


if __name__ == "__main__" and os.fork() == 0:
    _clear_away(int(sys.argv[1]), sys.argv[2])
