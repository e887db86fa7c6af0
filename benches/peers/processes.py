"""Processes of a cell: started together, watched for memory, and none left behind."""

from __future__ import annotations

import os
import random
import shutil
import signal
import socket
import statistics
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from benches import ending
from benches.peers.arm import Task
from benches.peers.environments import ROOT, CannotRun, last_error
from benches.peers.histories import INSTANT

#: Every process of a cell has this in its environment, however it was started.
_MARK = "LOWDIFF_BENCH_CELL"
_WATCH_SECONDS = 0.5
_POLL_SECONDS = 0.05
_DIARY_POLL_SECONDS = 0.001
_TRACKER_SECONDS = 10.0
#: DLRover's sockets, one folder per run; a constant of its own, which no setting changes.
_SOCKETS = Path("/tmp/ckpt_sock")


@dataclass(frozen=True, slots=True)
class Killed:
    """Where a kill found a training.

    Attributes:
        completed: Steps that all ranks had made and saved.
        while_saving: Whether rank 0 was saving another.
    """

    completed: int
    while_saving: bool


@dataclass(slots=True)
class Cell:
    """The processes of one cell.

    Attributes:
        python: Interpreter of the system's environment.
        mark: No other cell's.
        timeout_seconds: For each phase.
        memory: Times (seconds since 1970) and bytes of all processes together, shared pages
            counted once.
    """

    python: Path
    mark: str
    timeout_seconds: float
    memory: list[tuple[float, int]] = field(default_factory=list)

    def run(self, task: Task) -> None:
        """Carry out a phase that ends by its own SIGKILL.

        Raises:
            CannotRun: If it does not come to its end.
        """
        ranks = self._start(task)
        deadline = time.monotonic() + self.timeout_seconds
        while any(rank.poll() is None for rank in ranks):
            if time.monotonic() > deadline:
                self._end(ranks)
                raise CannotRun(f"{task.phase} was not done after {self.timeout_seconds:.0f} s")
            if any(rank.poll() not in (None, -signal.SIGKILL) for rank in ranks):
                time.sleep(1)  # the others may have something to say
                self._end(ranks)
            time.sleep(_POLL_SECONDS)
        missing = [i for i in range(task.num_ranks) if not (task.found / f"rank-{i}.json").exists()]
        if missing:
            raise CannotRun(self._complaint(task))

    def kill_midway(
        self, task: Task, chance: random.Random, *, least_steps: int, while_saving: bool
    ) -> Killed:
        """SIGKILL all ranks at a random instant of a step, or of the call that saves one.

        Raises:
            CannotRun: If a rank ends by itself.
        """
        ranks = self._start(task)
        deadline = time.monotonic() + self.timeout_seconds
        # A call has begun where the number of entries is odd.
        awaited = 2 * least_steps + while_saving
        while len(noted := _noted(task.diary(0))) < awaited:
            if any(rank.poll() is not None for rank in ranks) or time.monotonic() > deadline:
                self._end(ranks)
                raise CannotRun(self._complaint(task))
            time.sleep(_DIARY_POLL_SECONDS)
        calls = [end - begin for begin, end in zip(noted[::2], noted[1::2], strict=False)]
        begins = noted[::2]
        step = (begins[-1] - begins[0]) / (len(begins) - 1)
        instant = noted[-1] + chance.random() * (statistics.median(calls) if while_saving else step)
        time.sleep(max(0.0, instant - time.monotonic()))
        self._end(ranks)
        lengths = [len(_noted(task.diary(rank))) for rank in range(task.num_ranks)]
        return Killed(task.block_steps + min(lengths) // 2, while_saving=lengths[0] % 2 == 1)

    @contextmanager
    def companion(self, module: str) -> Iterator[None]:
        """A process that stays while the ranks come and go, if there is such a module."""
        if not module:
            yield
            return
        agent = subprocess.Popen(
            [str(self.python), "-m", f"benches.peers.{module}"],
            cwd=ROOT,
            env=self._environment({"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            yield
        finally:
            self._end([agent])

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Measure memory meanwhile."""
        done = threading.Event()

        def watch() -> None:
            while not done.wait(_WATCH_SECONDS):
                self.memory.append((time.time(), sum(map(_memory, self.members()))))

        thread = threading.Thread(target=watch)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    def members(self) -> list[int]:
        """Process ids of all that belong to the cell."""
        return ending.marked(_MARK, self.mark)

    def clean_up(self) -> None:
        """End whatever was left behind, and remove what it holds in memory under the cell's mark."""
        deadline = time.monotonic() + _TRACKER_SECONDS
        while members := self.members():
            is_late = time.monotonic() > deadline
            for pid in members:
                # Python's resource tracker ends by itself, after removing the semaphores of the dead.
                if is_late or not _is_tracker(pid):
                    _kill(pid)
            time.sleep(_POLL_SECONDS)
        for path in Path("/dev/shm").glob(f"*{self.mark}*"):
            path.unlink()
        shutil.rmtree(_SOCKETS / self.mark, ignore_errors=True)

    def _start(self, task: Task) -> list[subprocess.Popen[bytes]]:
        task.found.mkdir(parents=True, exist_ok=True)
        for old in task.found.glob("rank-*"):
            old.unlink()
        for old in task.found.glob("diary-*"):
            old.unlink()
        path = task.found / "task.json"
        path.write_text(task.to_json(), encoding="utf-8")
        port = _free_port()
        started = []
        for rank in range(task.num_ranks):
            words = [str(self.python), "-m", "benches.peers.rank", str(path), str(rank)]
            with (task.found / f"rank-{rank}.log").open("wb") as log:
                environment = self._environment(_ranks(rank, task.num_ranks, port))
                started.append(
                    subprocess.Popen(words, cwd=ROOT, env=environment, stdout=log, stderr=log)
                )
        return started

    def _environment(self, more: dict[str, str]) -> dict[str, str]:
        return {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            _MARK: self.mark,
            # DLRover tells the runs on a machine apart by it, and thinks its agent started this.
            "TORCHELASTIC_RUN_ID": self.mark,
            "ROLE_NAME": "dlrover-trainer",
            **more,
        }

    def _end(self, processes: list[subprocess.Popen[bytes]]) -> None:
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()

    def _complaint(self, task: Task) -> str:
        logs = [path.read_text(errors="replace") for path in sorted(task.found.glob("rank-*.log"))]
        return f"{task.phase}: {last_error(chr(10).join(logs))}"


def _ranks(rank: int, num_ranks: int, port: int) -> dict[str, str]:
    """What a launcher tells each rank."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "NODE_RANK": "0",
        "NODE_NUM": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _is_tracker(pid: int) -> bool:
    try:
        return b"resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return False


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _noted(path: Path) -> list[float]:
    content = path.read_bytes() if path.exists() else b""
    return [instant for (instant,) in INSTANT.iter_unpack(content)]


def _memory(pid: int) -> int:
    """Bytes of a process, pages that it shares with others by their part."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return 0
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:")), 0)
