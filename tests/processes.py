"""Other processes: whether they still run, and real ones that need not load torch anew."""

from __future__ import annotations

import os
import runpy
import signal
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.background import fork_processes, torch_loaded

ROOT = Path(__file__).parents[1]
PATIENCE_SECONDS = 100.0


def is_alive(pid: int) -> bool:
    """Whether the process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):  # the latter: it ended while it was read
        return False


def peak_bytes() -> int:
    """The most memory that this process has had so far."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) << 10


class Script:
    """A process that runs a function as a script: for itself, to be killed as any other.

    It is forked from one that has loaded torch, and its writer from it; to start Python and load
    torch costs either seconds of a core.

    Args:
        main: Importable by name; what it returns is the exit status.
        arguments: As the words of a command line are, they reach it as text.
        output: What it prints is appended here.
        cwd: Its folder.
        env: Its environment is this process's and these.
    """

    def __init__(
        self,
        main: Callable[..., int | None],
        *arguments: object,
        output: Path,
        cwd: Path = ROOT,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self._output = output
        words = [str(argument) for argument in arguments]
        environment = {**os.environ, **(env or {})}
        self._process = torch_loaded().Process(
            target=_run, args=(main, words, str(output), str(cwd), environment), daemon=True
        )
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def printed(self) -> str:
        """All that it has printed, to either stream."""
        return self._output.read_text() if self._output.exists() else ""

    def poll(self) -> int | None:
        """See ``subprocess.Popen.poll``."""
        return self._process.exitcode

    def wait(self, seconds: float = PATIENCE_SECONDS) -> int:
        """Its exit status."""
        self._process.join(seconds)
        code = self.poll()
        assert code is not None, f"it does not end: {self.printed()[-3000:]}"
        return code

    def send_signal(self, number: int) -> None:
        """See ``subprocess.Popen.send_signal``."""
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """See ``subprocess.Popen.kill``."""
        self.send_signal(signal.SIGKILL)


def run_file(path: str) -> None:
    """Run a file as ``python FILE`` does: a ``main`` for a `Script`."""
    runpy.run_path(path, run_name="__main__")


def _run(
    main: Callable[..., int | None],
    words: list[str],
    output: str,
    cwd: str,
    environment: dict[str, Any],
) -> None:
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = [main.__module__, *words]
    fork_processes(forks=True)
    sys.exit(main(*words) or 0)
