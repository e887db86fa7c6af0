"""Cells of the comparison: planned as a list, carried out one by one."""

from __future__ import annotations

import json
import random
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benches.harness import machine, versions
from benches.peers.arm import Task
from benches.peers.environments import CannotRun, python_of, versions_in
from benches.peers.figures import figures, slowest
from benches.peers.processes import Cell
from benches.peers.systems import SYSTEMS
from benches.peers.training import MODELS
from benches.peers.turns import saved_steps

#: From so many ranks on a machine of few cores, only bytes mean anything.
BYTES_ONLY_RANKS = 4
#: Several ranks recover from no more steps: making more takes long, and shows the same line.
LONGEST_SHARED_HISTORY = 100
#: Steps after which a training may be killed: how long one takes must be known.
FIRST_KILL = 4
_NEVER_ENDING = 100_000
#: A writer that outlives its trainer may be about to rename these.
_UNFINISHED = shutil.ignore_patterns("*.partial")


@dataclass(frozen=True, slots=True)
class Settings:
    """How every cell is measured.

    Attributes:
        block_steps: Steps of a block.
        rounds: ABBA rounds; 0 for what the cell asks for.
        kills: Trainings that are killed, every other one while it saves a step; 0 for what the
            cell asks for.
        last_kill: After how many steps at the most, and a part of one, beyond the first block.
        history: Steps after the newest full snapshot, for each recovery; empty for what the cell
            asks for.
        timeout_seconds: Of each phase.
    """

    seed: int
    block_steps: int
    rounds: int
    kills: int
    last_kill: int
    history: tuple[int, ...]
    timeout_seconds: float


@dataclass(frozen=True, slots=True)
class Plan:
    """One cell.

    Attributes:
        system: Key of ``SYSTEMS``.
        model: Key of ``MODELS``.
    """

    system: str
    model: str
    num_ranks: int

    @property
    def name(self) -> str:
        """For files and summaries."""
        return f"{self.model}x{self.num_ranks}/{self.system}"


def plan_cells(
    systems: Sequence[str], models: Sequence[str], ranks: Sequence[int]
) -> tuple[Plan, ...]:
    """All cells, those of one model and number of ranks together, as they are compared."""
    return tuple(
        Plan(system, model, num_ranks)
        for model in models
        for num_ranks in ranks
        for system in systems
    )


def settled(settings: Settings, plan: Plan) -> Settings:
    """The settings of one cell: what is left to it, as its model and its ranks ask for."""
    size = MODELS[plan.model]
    longest = max(size.histories) if plan.num_ranks == 1 else LONGEST_SHARED_HISTORY
    affordable = tuple(steps for steps in size.histories if steps <= longest)
    return replace(
        settings,
        rounds=settings.rounds or size.rounds,
        kills=settings.kills or size.kills,
        history=settings.history or affordable,
    )


def is_done(found: Mapping[str, Any] | None, settings: Settings, processor: str) -> bool:
    """Whether a cell needs no further run: it ran to its end here, under the same settings.

    What another processor did is not compared with what this one does.
    """
    if found is None or not found["summary"]:
        return False
    measured = found["settings"], found["machine"]["processor"]
    return bool(measured == (_plain(asdict(settings)), processor))


def carry_out(plan: Plan, settings: Settings, environments: Path, out: Path) -> dict[str, Any]:
    """Measure a cell by its settled settings; what was found, or why it cannot run here."""
    facts = machine()
    begun = time.perf_counter()
    system = SYSTEMS[plan.system]
    found: dict[str, Any] = {
        "plan": asdict(plan),
        "settings": _plain(asdict(settings)),
        "commit": versions()["commit"],
    }
    with (
        tempfile.TemporaryDirectory(prefix="files-", dir=out) as files,
        tempfile.TemporaryDirectory(prefix="lowdiff-bench-", dir="/dev/shm") as staging,
    ):
        folder = Path(files).absolute()
        try:
            python = python_of(system.environment, environments)
            found["versions"] = versions_in(python, system.environment)
            cell = Cell(python, folder.name, settings.timeout_seconds)
            try:
                found["samples"] = _Phases(plan, settings, cell, folder, Path(staging)).all()
            finally:
                cell.clean_up()
        except CannotRun as reason:
            found["cannot_run"] = str(reason)
    found |= {"machine": facts, "seconds": time.perf_counter() - begun}
    found["summary"] = figures(found["samples"]) if "samples" in found else {}
    return found


@dataclass(frozen=True, slots=True)
class _Phases:
    """What a cell goes through, each phase on folders of its own."""

    plan: Plan
    settings: Settings
    cell: Cell
    files: Path
    staging: Path

    def all(self) -> dict[str, Any]:
        """Samples of every phase."""
        if self.plan.num_ranks >= BYTES_ONLY_RANKS:
            # With one snapshot, as by lowdiff's default.
            return {"bytes_only": self._history(LONGEST_SHARED_HISTORY)}
        return {
            **self._overhead(),
            "kills": self._kills(),
            "recoveries": {
                # So many steps after a snapshot in the middle.
                str(steps): self._history(2 * steps + 1, is_recovered=True)
                for steps in self.settings.history
            },
        }

    def _overhead(self) -> dict[str, Any]:
        """The blocks, and what comes back of them: all that there is, and then from files alone."""
        task = self._fresh("overhead", phase="overhead")
        num_steps = saved_steps(task)
        with self._agent():
            with self.cell.watched():
                self.cell.run(task)
            overhead = slowest(_found(task)) | {"memory": self.cell.memory}
            apart = shutil.copytree(task.files, self.files / "apart", ignore=_UNFINISHED)
            restored = self._restored(task, num_steps)
        task = replace(task, files=apart, staging=self.staging / "new")
        with self._agent():
            from_files = self._restored(task, num_steps)
        return {"overhead": overhead, "restore": restored, "restore_from_files": from_files}

    def _kills(self) -> list[dict[str, Any]]:
        chance = random.Random(self.settings.seed)
        kills = []
        for number in range(self.settings.kills):
            task = self._fresh(f"kill-{number}", phase="kill", steps=_NEVER_ENDING)
            with self._agent():
                killed = self.cell.kill_midway(
                    task,
                    chance,
                    least_steps=chance.randint(FIRST_KILL, self.settings.last_kill),
                    while_saving=number % 2 == 1,
                )
                ranks = self._restored(task, killed.completed)
            kills.append(asdict(killed) | {"ranks": ranks})
        return kills

    def _history(self, steps: int, *, is_recovered: bool = False) -> dict[str, Any]:
        task = self._fresh(f"history-{steps}", phase="train", steps=steps, is_sketch=True)
        with self._agent():
            self.cell.run(task)
            written = _found(task)[0]
            return written | ({"ranks": self._restored(task, steps)} if is_recovered else {})

    def _restored(self, task: Task, steps: int) -> list[dict[str, Any]]:
        """What every rank found of a restore."""
        restoring = replace(task, phase="restore", steps=steps)
        self.cell.run(restoring)
        return _found(restoring)

    @contextmanager
    def _agent(self) -> Iterator[None]:
        """The system's agent, if it has one; whatever is left in the end is cleared away."""
        with self.cell.companion(SYSTEMS[self.plan.system].agent):
            yield
        self.cell.clean_up()

    def _fresh(self, name: str, **changes: Any) -> Task:
        """A task in empty folders."""
        for folder in (*self.files.iterdir(), *self.staging.iterdir()):
            shutil.rmtree(folder)
        task = Task(
            phase="",
            system=self.plan.system,
            model=self.plan.model,
            num_ranks=self.plan.num_ranks,
            seed=self.settings.seed,
            files=self.files / "checkpoints",
            staging=self.staging / name,
            found=self.files / "found",
            rounds=self.settings.rounds,
            block_steps=self.settings.block_steps,
        )
        return replace(task, **changes)


def _found(task: Task) -> list[dict[str, Any]]:
    paths = [task.found / f"rank-{rank}.json" for rank in range(task.num_ranks)]
    return [json.loads(path.read_text(encoding="utf-8")) for path in paths]


def _plain(value: Any) -> Any:
    """As it is after a way through JSON."""
    return json.loads(json.dumps(value))
