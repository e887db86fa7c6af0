"""Strategy survivors: whatever kills a rank, those that live save the state, and its bits come back."""

from __future__ import annotations

import json
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.crash.launch import survivor
from tests.processes import Script

UNTIL, AT = 10, 6


@dataclass(frozen=True)
class Lives:
    """What ranks reported, life after life."""

    lines: list[list[dict[str, Any]]]
    output: str

    @property
    def resumed(self) -> list[int]:
        """Where each life began, as rank 0 says."""
        return [line["step"] for line in self.lines[0] if line["word"] == "resumed"]

    def states(self, rank: int) -> dict[int, str]:
        """Step -> state; a later life's replaces an earlier's."""
        return {line["step"]: line["state"] for line in self.lines[rank] if line["word"] != "end"}

    def generators(self) -> list[str]:
        """At the end."""
        return [lines[-1]["rng"] for lines in self.lines]


def life(
    folder: Path, world_size: int, options: dict[int, list[object]], *, number: int
) -> list[Script]:
    folder.mkdir(exist_ok=True)
    store = folder / f"store-{number}"
    return [
        Script(
            survivor.main,
            *[rank, world_size, store, folder, UNTIL, *options.get(-1, []), *options.get(rank, [])],
            output=folder / f"output.{rank}",
        )
        for rank in range(world_size)
    ]


def reports(folder: Path, world_size: int) -> Lives:
    lines = [
        [json.loads(line) for line in (folder / f"report.{rank}").read_text().splitlines()]
        for rank in range(world_size)
    ]
    output = "".join((folder / f"output.{rank}").read_text() for rank in range(world_size))
    return Lives(lines, output)


def ended(scripts: list[Script], *, stopped: int | None = None) -> None:
    """Wait for all; a stopped one is killed once the others have ended, as a launcher does."""
    for rank, script in enumerate(scripts):
        if rank != stopped:
            script.wait()
    if stopped is not None:
        scripts[stopped].kill()
        scripts[stopped].wait()


def whole(folder: Path, world_size: int, *options: object) -> Lives:
    scripts = life(folder, world_size, {-1: list(options)}, number=0)
    assert [script.wait() for script in scripts] == [0] * world_size, scripts[0].printed()
    return reports(folder, world_size)


def broken(
    folder: Path, world_size: int, faults: dict[int, list[object]], *options: object
) -> Lives:
    """A life in which some ranks fail, and another that goes on to the end."""
    faulty = {-1: list(options), **faults}
    stops = [rank for rank, words in faults.items() if "stop" in words]
    ended(life(folder, world_size, faulty, number=0), stopped=stops[0] if stops else None)
    scripts = life(folder, world_size, {-1: list(options)}, number=1)
    assert [script.wait() for script in scripts] == [0] * world_size, scripts[0].printed()
    return reports(folder, world_size)


def dies(phase: str, step: int = AT) -> list[object]:
    return ["--phase", phase, "--step", step]


def check(found: Lives, whole: Lives, *, resumed: int, same_generators: bool = True) -> None:
    """Every state of every rank has the bits of the uninterrupted run's."""
    assert found.resumed == [0, resumed], found.output
    for rank in range(len(whole.lines)):
        assert found.states(rank) == whole.states(rank), found.output
    assert not same_generators or found.generators() == whole.generators()


@pytest.mark.launch
def test_one_of_two_ranks_is_killed_in_its_backward_pass(tmp_path: Path) -> None:
    expected = whole(tmp_path / "whole", 2, "--seeds")
    found = broken(tmp_path / "killed", 2, {1: dies("backward")}, "--seeds")
    check(found, expected, resumed=AT)


@pytest.mark.launch
@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("phase", survivor.PHASES[:4])
def test_a_rank_that_dies_before_its_step_costs_the_open_body(
    tmp_path: Path, phase: str, world_size: int, victim: int
) -> None:
    expected = whole(tmp_path / "whole", world_size, "--seeds")
    found = broken(tmp_path / "killed", world_size, {victim: dies(phase)}, "--seeds")
    # Between its exchange and its step it leaves the others to go on by one step.
    assert found.resumed[1] in ((AT, AT + 1) if phase in ("between", "exchange") else (AT,))
    check(found, expected, resumed=found.resumed[1])
