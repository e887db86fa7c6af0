"""Starts the ranks of ``effective_life``, kills them along a trace of failures, and starts them anew.

Ranks are forked from a process that has imported PyTorch and lowdiff already, as a hot spare has; with
``cold`` each of them imports everything itself. All arms start in the same way.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess

import torch.distributed as dist
from typing_extensions import Self

from benches.effective_life import Plan, live
from benches.survivors_life import WORLD_SIZE, Line
from lowdiff.demo.launch import child_processes

PROCESS, NODE = range(2)
#: What children of the fork server find imported.
_IMPORTED = ("benches.effective_figures", "benches.harness", "torch._dynamo")
_LOOK_SECONDS = 0.05
#: How long torchrun waits between SIGTERM and SIGKILL.
_TERM_SECONDS = 30.0
_PATIENCE_SECONDS = 300.0
#: What is still made after the end was decided, so that no rank learns of the end too late.
_LAST_STEPS, _LAST_SECONDS = 3, 0.5


@dataclass(frozen=True, slots=True)
class Strike:
    """A failure that is to happen.

    Attributes:
        at_seconds: Since the training began.
        kind: `PROCESS` or `NODE`.
        victim: The rank.
    """

    at_seconds: float
    kind: int
    victim: int


@dataclass(frozen=True, slots=True)
class Struck:
    """A failure that happened, in seconds since 1970.

    Attributes:
        killed: When the victim was killed.
        ended: When the last process of that attempt was gone, and the node's memory as well.
    """

    strike: Strike
    killed: float
    ended: float


class Supervisor:
    """One training of one arm; a context manager that leaves no process behind."""

    def __init__(self, plan: Plan, *, cold: bool = False) -> None:
        self._plan = plan
        plan.folder.mkdir(parents=True)
        plan.staging.mkdir(parents=True)
        self._context = multiprocessing.get_context("spawn" if cold else "forkserver")
        if not cold:
            self._context.set_forkserver_preload(list(_IMPORTED))
        self._store = dist.TCPStore(
            "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=120)
        )
        self._attempt = -1
        self._ranks: list[BaseProcess] = []

    def __enter__(self) -> Self:
        self._begin()
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._ranks:
            if process.is_alive():  # else another process may have its number
                for pid in _with_children(process):
                    _kill(pid)
            process.join()

    @property
    def lines(self) -> list[Line]:
        """What its processes noted so far."""
        return Line.read(self._plan.folder)

    def began(self) -> float:
        """Wait until the first attempt trains on all ranks; when that was."""

        def attached() -> list[float]:
            return [line.when for line in self.lines if line.what == "attached"]

        self._watch(lambda: len(attached()) >= WORLD_SIZE)
        return max(attached())

    def strike(self, strike: Strike, began: float) -> Struck:
        """Wait until a failure is due, let it happen, and start all ranks anew."""
        self._watch(lambda: time.time() >= began + strike.at_seconds)
        victim = self._ranks[strike.victim]
        # The writer is a child of the trainer, and the replica too: they are on its node.
        victims = _with_children(victim) if strike.kind == NODE else [victim.pid or 0]
        killed = time.time()
        for pid in victims:
            _kill(pid)
        victim.join()
        self._end_others()
        if strike.kind == NODE:
            shutil.rmtree(self._plan.node(strike.victim), ignore_errors=True)
        ended = time.time()
        self._begin()
        return Struck(strike, killed, ended)

    def end(self, not_before: float) -> list[Line]:
        """Let it end by itself, after a time and a step that is new; all that its processes noted."""

        def goes_on() -> bool:
            if time.time() < not_before:
                return False
            steps = [line for line in self.lines if line.what == "step"]
            own = [line.step for line in steps if line.attempt == self._attempt]
            return bool(own) and max(own) == max(line.step for line in steps)

        self._watch(goes_on)
        steps = [line for line in self.lines if line.what == "step" and line.rank == 0]
        in_reach = sum(line.when > time.time() - _LAST_SECONDS for line in steps)
        self.end_at(max(line.step for line in steps) + in_reach + _LAST_STEPS)
        return self.lines

    def end_at(self, step: int) -> None:
        """Let it end by itself at a step."""
        self._plan.stop_at(step)
        for process in self._ranks:
            process.join(_PATIENCE_SECONDS)
            assert process.exitcode == 0, self._printed()

    def _begin(self) -> None:
        self._attempt += 1
        self._ranks = []
        for rank in range(WORLD_SIZE):
            process = self._context.Process(  # type: ignore[attr-defined]
                target=live, args=(self._plan, self._attempt, rank, self._store.port)
            )
            process.start()
            self._ranks.append(process)

    def _end_others(self) -> None:
        """End the ranks that live, as torchrun does; survivors save the state meanwhile."""
        for process in self._ranks:
            if process.is_alive():
                process.terminate()
        deadline = time.monotonic() + _TERM_SECONDS
        for process in self._ranks:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()

    def _watch(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while not condition():
            ended = wait([process.sentinel for process in self._ranks], _LOOK_SECONDS)
            assert not ended, self._printed()
            assert time.monotonic() < deadline or self._has_progress(), self._printed()

    def _has_progress(self) -> bool:
        path = self._plan.folder / "diary"
        return time.time() - path.stat().st_mtime < _PATIENCE_SECONDS

    def _printed(self) -> str:
        path = self._plan.folder / "output"
        return path.read_text()[-8000:] if path.exists() else "nothing was printed"


def run(
    plan: Plan, strikes: Sequence[Strike], horizon_seconds: float, *, cold: bool
) -> tuple[float, list[Struck], list[Line]]:
    """Train through failures; when it began to train, the failures, and all that was noted."""
    with Supervisor(plan, cold=cold) as supervisor:
        began = supervisor.began()
        struck = [supervisor.strike(strike, began) for strike in strikes]
        return began, struck, supervisor.end(began + horizon_seconds)


def run_whole(plan: Plan, steps: int) -> list[Line]:
    """Train for some steps without a failure; all that was noted."""
    with Supervisor(plan) as supervisor:
        supervisor.end_at(steps)
        return supervisor.lines


def _with_children(process: BaseProcess) -> list[int]:
    """The process, and all that it started or that they did."""
    found = [process.pid or 0]
    for pid in found:
        found += child_processes(pid)
    return found


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def removed(plan: Plan) -> None:
    """Remove all files of a training that has ended."""
    for folder in (plan.folder, plan.staging):
        shutil.rmtree(folder, ignore_errors=True)
