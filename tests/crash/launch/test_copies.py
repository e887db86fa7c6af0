"""Copies on other nodes: all processes die at once, a node is lost with all it had, and no step is."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.crash.launch.survivor_lives import ENGINES, Lives, whole
from tests.crash.launch.test_survivors import AT, broken, check, dies

#: Ranks 0 and 1 on two nodes; each node has a disk of its own.
WORDS = ("--nodes", "01", "--own-disks", "--copies", 2)


def lost(folder: Path, strategy: str, *options: object, victim: int = 1) -> Lives:
    """All die in one body, with their writers and replicas, and a node's memory and disk are lost."""
    words = [*WORDS, "--strategy", strategy, "--seeds", *options]
    faults = {rank: [*dies("backward"), "--node-dies"] for rank in (0, 1)}
    gone = folder / f"node{victim}"
    return broken(folder, 2, faults, *words, between=lambda: shutil.rmtree(gone))


def resumed(found: Lives) -> int:
    """Where the second life began: the last step, or one that was still on its way to the other node."""
    assert found.resumed[0] == 0
    assert AT - 2 <= found.resumed[1] <= AT, found.output
    return found.resumed[1]


@pytest.mark.slow
@pytest.mark.launch
@pytest.mark.parametrize("strategy", [pytest.param("replica", marks=pytest.mark.slow), "cast"])
@pytest.mark.parametrize("engine", ENGINES)
def test_a_node_is_lost_when_all_processes_die_and_no_step_is(
    tmp_path: Path, engine: str, strategy: str
) -> None:
    found = lost(tmp_path / "lost", strategy, "--engine", engine)
    expected = whole(2, "--strategy", strategy, "--seeds")
    check(found, expected, resumed=resumed(found))
    assert "LD803" not in found.output


@pytest.mark.launch
@pytest.mark.slow
@pytest.mark.parametrize("every", [3, 100])
@pytest.mark.parametrize("strategy", ["gradients", "replica", "cast", "topk"])
@pytest.mark.parametrize("engine", ENGINES)
def test_whichever_node_is_lost(tmp_path: Path, engine: str, strategy: str, every: int) -> None:
    words = "--snapshot-every", every, "--engine", engine
    found = lost(tmp_path / "lost", strategy, *words, victim=0)
    step = resumed(found)
    expected = whole(2, "--strategy", strategy, "--seeds")
    if strategy != "topk":
        check(found, expected, resumed=step)
    for rank in (0, 1):
        assert found.states(rank)[step] == expected.states(rank)[step]
    assert ("LD312" in found.output) == (strategy == "topk")


@pytest.mark.slow
@pytest.mark.launch
@pytest.mark.parametrize(
    ("nodes", "victim"),
    [
        ("01", 1),
        pytest.param("01", 0, marks=pytest.mark.slow),
        pytest.param("011", 1, marks=pytest.mark.slow),
        pytest.param("012", 1, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("every", [100, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("engine", ENGINES)
def test_with_its_residual_replicated_a_lost_rank_goes_on_bit_for_bit(
    tmp_path: Path, engine: str, nodes: str, victim: int, every: int
) -> None:
    size, folder = len(nodes), tmp_path / "lost"
    words = ["--nodes", nodes, "--own-disks", "--copies", 2, "--seeds", "--snapshot-every", every]
    faults = {rank: [*dies("backward"), "--node-dies"] for rank in range(size)}
    gone = folder / f"node{victim}"
    found = broken(
        folder,
        size,
        faults,
        *words,
        "--strategy",
        "replicated",
        "--engine",
        engine,
        between=lambda: shutil.rmtree(gone),
    )
    expected = whole(size, "--strategy", "topk", "--seeds")
    check(found, expected, resumed=resumed(found))
    for rank in range(size):
        assert found.owed(rank) == expected.owed(rank)
    assert "LD312" not in found.output
    assert "LD313" not in found.output
