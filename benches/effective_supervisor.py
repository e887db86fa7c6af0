"""Starts the ranks of ``effective_life``, kills them along a trace of failures, and starts them anew.

Meanwhile a `Reference` may take turns. A life stands still in a turn: all its processes are stopped, and its clock
with them. All arms start in the same way.
"""

from __future__ import annotations

import math
import os
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess

from typing_extensions import Self

from benches.effective_life import Plan, live, new_store, processes
from benches.effective_reference import Reference, Turn
from benches.survivors_life import WORLD_SIZE, Line
from lowdiff.demo.launch import child_processes

PROCESS, NODE = range(2)
_LOOK_SECONDS = 0.05
#: How long torchrun waits between SIGTERM and SIGKILL.
_TERM_SECONDS = 30.0
_PATIENCE_SECONDS = 300.0
#: What is still made after the end was decided, so that no rank learns of the end too late.
_LAST_STEPS, _LAST_SECONDS = 3, 0.5
#: Of a life between two turns of the reference, and the steps of one.
_TURN_EVERY_SECONDS, _TURN_STEPS = 25.0, 6
#: Of a life from its begin, or a restart, until the next turn.
_SETTLING_SECONDS = 10.0


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
    """A failure that happened, by the life's clock.

    Attributes:
        killed: When the victim was killed.
        ended: When the last process of that attempt was gone, and the node's memory as well.
    """

    strike: Strike
    killed: float
    ended: float


@dataclass(frozen=True, slots=True)
class Ran:
    """A training that has ended.

    Attributes:
        began: When all ranks trained, by the life's clock: seconds since 1970 without the turns before.
        struck: Its failures.
        lines: What its processes noted, by the same clock.
        plain_seconds: What a step without checkpoints took, in each turn.
    """

    began: float
    struck: Sequence[Struck]
    lines: Sequence[Line]
    plain_seconds: Sequence[float]


class Supervisor:
    """One training of one arm; a context manager that leaves no process behind.

    Args:
        plan: The training.
        reference: What takes turns with it.
        cold: Whether each process imports everything itself.
    """

    def __init__(
        self, plan: Plan, reference: Reference | None = None, *, cold: bool = False
    ) -> None:
        self._plan, self._reference = plan, reference
        plan.folder.mkdir(parents=True)
        plan.staging.mkdir(parents=True)
        self._context, self._store = processes(cold=cold), new_store()
        self.turns: list[Turn] = []
        self._next_turn = math.inf
        self._attempt = -1
        self._ranks: list[BaseProcess] = []

    def __enter__(self) -> Self:
        self._begin()
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._ranks:
            if process.is_alive():  # else another process may have its number
                for pid in _with_children(process):
                    _send(pid, signal.SIGKILL)
            process.join()

    @property
    def lines(self) -> list[Line]:
        """All that its processes noted so far, by the life's clock."""
        lines = Line.read(self._plan.folder)
        return [replace(line, when=without_turns(line.when, self.turns)) for line in lines]

    def began(self) -> float:
        """Wait until the first attempt trains on all ranks; when that was."""
        self._watch(self._trains)
        began = max(self._attached())
        self._next_turn = began + _SETTLING_SECONDS
        return began

    def strike(self, strike: Strike, began: float) -> Struck:
        """Wait until a failure is due, let it happen, and start all ranks anew."""
        self._watch(lambda: self._now() >= began + strike.at_seconds)
        victim = self._ranks[strike.victim]
        # The writer is a child of the trainer, and the replica too: they are on its node.
        victims = _with_children(victim) if strike.kind == NODE else [victim.pid or 0]
        killed = self._now()
        for pid in victims:
            _send(pid, signal.SIGKILL)
        victim.join()
        self._end_others()
        if strike.kind == NODE:
            shutil.rmtree(self._plan.node(strike.victim), ignore_errors=True)
        ended = self._now()
        self._next_turn = max(self._next_turn, ended + _SETTLING_SECONDS)
        self._begin()
        return Struck(strike, killed, ended)

    def end(self, not_before: float) -> list[Line]:
        """Let it end by itself, after a time and a step that is new; all that its processes noted."""

        def goes_on() -> bool:
            if self._now() < not_before:
                return False
            steps = [line for line in self.lines if line.what == "step"]
            own = [line.step for line in steps if line.attempt == self._attempt]
            return bool(own) and max(own) == max(line.step for line in steps)

        self._watch(goes_on)
        if self._reference is not None and not self.turns:
            self._take_turn(self._reference)
        steps = [line for line in self.lines if line.what == "step" and line.rank == 0]
        in_reach = sum(line.when > self._now() - _LAST_SECONDS for line in steps)
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
            told = self._plan, self._attempt, rank, self._store.port
            process = self._context.Process(target=live, args=told)
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
            if self._reference is not None and self._now() >= self._next_turn and self._trains():
                self._take_turn(self._reference)

    def _now(self) -> float:
        """The life's clock."""
        return without_turns(time.time(), self.turns)

    def _trains(self) -> bool:
        """Whether all ranks of this attempt are at their steps."""
        return len(self._attached()) == WORLD_SIZE

    def _attached(self) -> list[float]:
        """When ranks of this attempt came to their steps."""
        own = [line for line in self.lines if line.attempt == self._attempt]
        return [line.when for line in own if line.what == "attached"]

    def _take_turn(self, reference: Reference) -> None:
        """Stop everything of the life while the reference makes its steps."""
        pids = [pid for process in self._ranks for pid in _with_children(process)]
        began = time.time()
        try:
            for pid in pids:
                _send(pid, signal.SIGSTOP)
            seconds = reference.step_seconds(_TURN_STEPS)
        finally:
            for pid in pids:
                _send(pid, signal.SIGCONT)
        self.turns.append(Turn(began, time.time(), seconds))
        self._next_turn = self._now() + _TURN_EVERY_SECONDS

    def _has_progress(self) -> bool:
        path = self._plan.folder / "diary"
        return time.time() - path.stat().st_mtime < _PATIENCE_SECONDS

    def _printed(self) -> str:
        path = self._plan.folder / "output"
        return path.read_text()[-8000:] if path.exists() else "nothing was printed"


def run(
    plan: Plan,
    strikes: Sequence[Strike],
    horizon_seconds: float,
    reference: Reference,
    *,
    cold: bool,
) -> Ran:
    """Train through failures, in turns with a training without checkpoints."""
    with Supervisor(plan, reference, cold=cold) as supervisor:
        began = supervisor.began()
        struck = [supervisor.strike(strike, began) for strike in strikes]
        lines = supervisor.end(began + horizon_seconds)
        plain = [turn.step_seconds for turn in supervisor.turns]
    return Ran(began, struck, lines, plain)


def run_whole(plan: Plan, steps: int) -> list[Line]:
    """Train for some steps without a failure; all that was noted."""
    with Supervisor(plan) as supervisor:
        supervisor.end_at(steps)
        return supervisor.lines


def without_turns(when: float, turns: Sequence[Turn]) -> float:
    """A time by the clock of a life that stood still in these turns."""
    return when - sum(turn.stood(when) for turn in turns)


def _with_children(process: BaseProcess) -> list[int]:
    """The process, and all that it started or that they did."""
    found = [process.pid or 0]
    for pid in found:
        found += child_processes(pid)
    return found


def _send(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def removed(plan: Plan) -> None:
    """Remove all files of a training that has ended."""
    for folder in (plan.folder, plan.staging):
        shutil.rmtree(folder, ignore_errors=True)
