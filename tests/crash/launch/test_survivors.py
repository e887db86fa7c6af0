"""Strategy survivors: whatever kills a rank, those that live save the state, and its bits come back."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.crash.launch.survivor_lives import (
    ENGINES,
    UNTIL,
    Lives,
    ended,
    life,
    lost,
    reports,
    whole,
)

AT = 6


def broken(
    folder: Path,
    world_size: int,
    faults: dict[int, list[object]],
    *options: object,
    between: Callable[[], None] = lambda: None,
) -> Lives:
    """A life in which some ranks fail, and another that goes on to the end."""
    faulty = {-1: list(options), **faults}
    stops = [rank for rank, words in faults.items() if "stop" in words]
    ended(life(folder, world_size, UNTIL, faulty, number=0), stopped=stops[0] if stops else None)
    between()
    scripts = life(folder, world_size, UNTIL, {-1: list(options)}, number=1)
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
@pytest.mark.parametrize(
    ("phase", "world_size", "victim", "resumed"),
    [
        ("backward", 2, 1, AT),
        ("optimizer", 2, 0, AT + 1),
        pytest.param("error", 1, 0, AT, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("engine", ENGINES)
def test_a_killed_rank_costs_the_open_body(
    tmp_path: Path, engine: str, phase: str, world_size: int, victim: int, resumed: int
) -> None:
    expected = whole(world_size, "--seeds")
    words = "--seeds", "--engine", engine
    found = broken(tmp_path / "killed", world_size, {victim: dies(phase)}, *words)
    check(found, expected, resumed=resumed)


@pytest.mark.slow
@pytest.mark.launch
def test_what_was_saved_for_the_dead_becomes_durable_without_another_attach(tmp_path: Path) -> None:
    """A survivor saves seconds after the death; all memory is lost once the writers have ended."""
    expected = whole(2, "--seeds")
    folder = tmp_path / "killed"
    faults: dict[int, list[object]] = {
        1: dies("backward"),
        0: ["--step", AT, "--late-seconds", 3],
    }
    found = broken(folder, 2, faults, "--seeds", between=lost(folder))
    check(found, expected, resumed=AT)


@pytest.mark.launch
@pytest.mark.slow
@pytest.mark.turns(5)
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize(
    "phase", ["forward", "backward", "exchange", "optimizer", "stepped", "error"]
)
@pytest.mark.parametrize("engine", ENGINES)
def test_wherever_a_rank_fails_it_costs_the_open_body(
    tmp_path: Path, engine: str, phase: str, world_size: int, victim: int
) -> None:
    expected = whole(world_size, "--seeds")
    words = "--seeds", "--engine", engine
    found = broken(tmp_path / "killed", world_size, {victim: dies(phase)}, *words)
    check(found, expected, resumed=AT + (phase in ("optimizer", "stepped")))


@pytest.mark.launch
@pytest.mark.slow
def test_generators_of_a_rank_that_died_before_its_optimizer_are_seeded_anew(
    tmp_path: Path,
) -> None:
    expected = whole(2, "--seeds")
    found = broken(tmp_path / "killed", 2, {1: dies("between")}, "--seeds")
    assert found.resumed == [0, AT + 1]
    assert found.states(0)[AT + 1] == expected.states(0)[AT + 1]
    assert "LD803: rank 1: its random generators (torch) are seeded anew" in found.output
    # Where ranks draw the same numbers nothing is lost.
    expected = whole(2)
    check(broken(tmp_path / "between", 2, {1: dies("between")}), expected, resumed=AT + 1)


@pytest.mark.launch
@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_buffers_that_rank_0_alone_had_send_all_ranks_back_to_the_last_snapshot(
    tmp_path: Path, engine: str
) -> None:
    every = ("--snapshot-every", 4)
    expected = whole(2, *every)
    found = broken(tmp_path / "killed", 2, {0: dies("between")}, *every, "--engine", engine)
    check(found, expected, resumed=4)
    assert "LD802" in found.output
    assert "it alone had buffer/norm." in found.output


@pytest.mark.launch
@pytest.mark.slow
@pytest.mark.parametrize("second", [0, 2])
@pytest.mark.parametrize("engine", ENGINES)
def test_another_survivor_takes_over_from_one_that_dies_in_its_save(
    tmp_path: Path, engine: str, second: int
) -> None:
    expected = whole(3, "--seeds")
    faults: dict[int, list[object]] = {1: dies("backward"), second: ["--phase", "save"]}
    words = "--seeds", "--engine", engine
    check(broken(tmp_path / "killed", 3, faults, *words), expected, resumed=AT)


@pytest.mark.launch
@pytest.mark.slow
def test_where_all_die_in_their_save_the_older_state_is_whole(tmp_path: Path) -> None:
    every = ("--snapshot-every", 4)
    expected = whole(3, *every)
    dying: list[object] = ["--phase", "save"]
    faults = {1: dies("backward"), 0: dying, 2: dying}
    check(broken(tmp_path / "killed", 3, faults, *every), expected, resumed=4)


@pytest.mark.launch
@pytest.mark.slow
def test_a_rank_that_hangs_is_noticed(tmp_path: Path) -> None:
    options = ("--hang-seconds", 3)
    expected = whole(3)
    found = broken(tmp_path / "stopped", 3, {1: dies("stop")}, *options)
    # It had taken part in the exchange, so the others made the step.
    check(found, expected, resumed=AT + 1)
    assert "LD804" in found.output


@pytest.mark.launch
@pytest.mark.slow
def test_sigterm_to_ranks_that_are_stuck_saves_the_state_and_ends_them(tmp_path: Path) -> None:
    expected = whole(3)
    folder = tmp_path / "stopped"
    scripts = life(folder, 3, UNTIL, {1: dies("stop")}, number=0)
    deadline = time.monotonic() + 60.0
    report = folder / "report.0"
    while not report.exists() or f'"made", "step": {AT + 1}' not in report.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    for rank in (0, 2):
        scripts[rank].send_signal(signal.SIGTERM)
    assert [scripts[rank].wait() for rank in (0, 2)] == [128 + signal.SIGTERM] * 2
    scripts[1].kill()
    scripts[1].wait()
    scripts = life(folder, 3, UNTIL, {}, number=1)
    assert [script.wait() for script in scripts] == [0] * 3
    check(reports(folder, 3), expected, resumed=AT + 1)
