"""Starts the training script under torchrun, follows it, and kills it the hard way."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from lowdiff.demo.records import Record, RecordReader, log_path
from lowdiff.errors import LowDiffError

if TYPE_CHECKING:
    from typing_extensions import Self

_POLL_SECONDS = 0.02
_OUTPUT_LINES_SHOWN = 25


class WorkersFailed(LowDiffError):
    """The training processes ended with an error or fell silent; the message has their words."""


def child_processes(pid: int) -> list[int]:
    """Direct children of a process that have not ended yet, read from ``/proc``."""
    children = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and _state_and_parent(int(folder.name)) == ("alive", pid):
            children.append(int(folder.name))
    return sorted(children)


def is_alive(pid: int) -> bool:
    """Whether the process exists and is not a zombie."""
    state = _state_and_parent(pid)
    return state is not None and state[0] == "alive"


def _state_and_parent(pid: int) -> tuple[str, int] | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:  # ended between listing and reading
        return None
    # The second field is the command in brackets and may itself hold blanks and brackets.
    state, parent = stat.rpartition(")")[2].split()[:2]
    return ("ended" if state in "ZX" else "alive"), int(parent)


class Launch:
    """One torchrun with its workers. Leaving the context kills whatever still runs.

    Args:
        command: What to start; torchrun's agent, whose direct children are the workers.
        log_folder: Where the workers write their records and their output is collected.
    """

    def __init__(self, command: Sequence[str], log_folder: Path) -> None:
        log_folder.mkdir(parents=True, exist_ok=True)
        self.log_folder = log_folder
        self._output_path = log_folder / "output.txt"
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # torchrun warns when it is unset
        with self._output_path.open("wb") as output:
            self._agent = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C reaches us alone, and we then kill them all
            )

    def workers(self) -> list[int]:
        """Process ids of the workers that are alive.

        torchrun gives each worker a session of its own, so neither a signal to its group nor to
        its session reaches them; and what they detached, as lowdiff's writer, is left out.
        """
        return child_processes(self._agent.pid)

    def records(self, *, silence_seconds: float = 180.0) -> Iterator[Record]:
        """Rank 0's records as they are written, until the processes end.

        Raises:
            WorkersFailed: They ended with an error, or wrote nothing for ``silence_seconds``.
        """
        reader = RecordReader(log_path(self.log_folder, 0))
        heard = time.monotonic()
        while True:
            ended = self._agent.poll() is not None  # asked first, so that no last record is missed
            for record in reader.new():
                heard = time.monotonic()
                yield record
            if ended:
                break
            if time.monotonic() - heard > silence_seconds:
                raise WorkersFailed(
                    f"the workers wrote nothing to {self.log_folder} for {silence_seconds:.0f} s"
                    + self._last_words()
                )
            time.sleep(_POLL_SECONDS)
        if self._agent.returncode != 0:
            raise WorkersFailed(
                f"torchrun ended with exit code {self._agent.returncode}" + self._last_words()
            )

    def kill(self, *, wait_seconds: float = 10.0) -> list[int]:
        """SIGKILL every worker and the agent, at once; returns the workers' process ids.

        Waits until they are gone, so that nothing of them runs when the next life begins.
        """
        workers = self.workers()
        for pid in [*workers, self._agent.pid]:
            _kill(pid)
        self._agent.wait()
        deadline = time.monotonic() + wait_seconds
        while any(is_alive(pid) for pid in workers):
            if time.monotonic() > deadline:
                raise WorkersFailed(f"workers {workers} are still there after SIGKILL")
            time.sleep(_POLL_SECONDS)
        return workers

    def close(self) -> None:
        """Kill what still runs; harmless when called twice."""
        if self._agent.poll() is None:
            self.kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _last_words(self) -> str:
        lines = self._output_path.read_text(errors="replace").splitlines()[-_OUTPUT_LINES_SHOWN:]
        return "; its last output:\n" + "\n".join(lines) + f"\n(all of it: {self._output_path})"


def torchrun_command(module: str, arguments: Sequence[str], *, world_size: int) -> list[str]:
    """Command that runs a module in ``world_size`` processes on this machine, on a free port."""
    torchrun = [sys.executable, "-m", "torch.distributed.run"]
    return [*torchrun, "--standalone", f"--nproc-per-node={world_size}", "-m", module, *arguments]


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:  # it ended on its own
        pass
