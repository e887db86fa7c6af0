"""Several nodes: any rank that lives suffices, with survivors, whatever became of the other nodes."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from lowdiff.persistence.files.paths import StagingFolder
from tests.crash.launch.survivor_lives import Lives, lost, whole
from tests.crash.launch.test_survivors import AT, broken, check, dies
from tests.unit.loops import wait_until


def lost_node(
    folder: Path, strategy: str, *options: object, victim: int = 1, phase: str = "backward"
) -> Lives:
    """A node is lost with all that it had, while the other's ranks have the whole state of its last step."""
    words = ["--nodes", "01", "--norm", "layer", "--strategy", strategy, *options]
    faults = {victim: [*dies(phase), "--node-dies"]}
    lost = folder / f"node{victim}"
    return broken(folder, 2, faults, *words, between=lambda: shutil.rmtree(lost))


@pytest.mark.slow
@pytest.mark.launch
@pytest.mark.parametrize("strategy", ["replica", "cast"])
def test_without_copies_a_log_or_a_replica_goes_back_to_what_is_durable(
    tmp_path: Path, strategy: str
) -> None:
    found = lost_node(tmp_path / "lost", strategy, "--snapshot-every", 4)
    expected = whole(2, "--strategy", strategy, "--norm", "layer")
    began, resumed = found.resumed
    assert (began, resumed < AT) == (0, True), found.output
    check(found, expected, resumed=resumed)


@pytest.mark.slow
@pytest.mark.launch
def test_a_node_is_lost_before_it_has_told_of_the_step_that_the_others_made(
    tmp_path: Path,
) -> None:
    found = lost_node(tmp_path / "lost", "survivors", phase="optimizer")
    check(found, whole(2, "--strategy", "survivors", "--norm", "layer"), resumed=AT + 1)


@pytest.mark.launch
@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_disk_may_be_lost_with_its_node(tmp_path: Path, victim: int) -> None:
    found = lost_node(tmp_path / "lost", "survivors", "--own-disks", victim=victim)
    check(found, whole(2, "--strategy", "survivors", "--norm", "layer"), resumed=AT)


def check_resumed(
    folder: Path, victims: list[int], *options: object, node: int, nodes: str
) -> None:
    """The step's parameters, optimizer and scheduler come back from those that live."""
    words = ["--seeds", "--nodes", nodes, *options]
    faults = {rank: dies("backward") for rank in victims}
    found = broken(folder, len(nodes), faults, *words, between=lost(folder / f"node{node}"))
    for rank in range(len(nodes)):
        check_goes_on(found, AT, rank=rank)


def check_goes_on(found: Lives, step: int, *, rank: int) -> None:
    """All resume at a step, with the state that a rank had made; some generators are seeded anew."""
    assert found.resumed == [0, step], found.output
    lines = [line for line in found.lines[rank] if line.get("step") == step]
    made, resumed = (
        next(line["state"] for line in lines if line["word"] == word)
        for word in ("made", "resumed")
    )
    assert made == resumed, f"rank {rank}: {found.output}"
    assert "are seeded anew" in found.output


@pytest.mark.slow
@pytest.mark.launch
def test_a_node_is_lost_and_the_other_has_all_of_the_state(tmp_path: Path) -> None:
    folder = tmp_path / "lost"
    check_resumed(folder, [1], node=1, nodes="01")
    # What was saved for the other node goes with the staging of the incarnation that failed.
    roots = [folder / name / "staging" for name in ("node0", "node1")]
    wait_until(lambda: not [stage for root in roots for stage in StagingFolder.all(root)])


@pytest.mark.launch
@pytest.mark.slow
@pytest.mark.parametrize(
    ("nodes", "victims", "node"), [("01", [0], 0), ("001", [2], 1), ("001", [0, 1], 0)]
)
def test_any_node_may_be_lost_where_buffers_are_alike(
    tmp_path: Path, nodes: str, victims: list[int], node: int
) -> None:
    check_resumed(tmp_path / "lost", victims, "--norm", "layer", node=node, nodes=nodes)


@pytest.mark.launch
@pytest.mark.slow
@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize(
    ("nodes", "victim"), [("01", 0), ("01", 1), ("001", 0), ("001", 1), ("001", 2)]
)
def test_a_process_dies_on_a_node_that_stays(
    tmp_path: Path, phase: str, nodes: str, victim: int
) -> None:
    words = ["--seeds", "--nodes", nodes]
    expected = whole(len(nodes), *words)
    found = broken(tmp_path / "killed", len(nodes), {victim: dies(phase)}, *words)
    check(found, expected, resumed=AT)


@pytest.mark.launch
@pytest.mark.slow
@pytest.mark.parametrize(("nodes", "victim"), [("01", 0), ("01", 1), ("001", 2)])
def test_a_process_that_dies_after_its_exchange_leaves_its_generators_unknown(
    tmp_path: Path, nodes: str, victim: int
) -> None:
    words = ["--seeds", "--nodes", nodes, "--norm", "layer"]
    found = broken(tmp_path / "killed", len(nodes), {victim: dies("between")}, *words)
    check_goes_on(found, AT + 1, rank=1 - min(victim, 1))


@pytest.mark.launch
@pytest.mark.slow
@pytest.mark.parametrize(("victim", "option"), [(0, "--seeds"), (1, "--object")])
def test_what_a_lost_node_alone_had_costs_the_steps_since_the_last_snapshot(
    tmp_path: Path, victim: int, option: str
) -> None:
    folder, words = tmp_path / "lost", ["--nodes", "01", option]
    between = lost(folder / f"node{victim}")
    found = broken(folder, 2, {victim: dies("backward")}, *words, between=between)
    assert found.resumed == [0, 0], found.output
    assert "it alone had" in found.output


@pytest.mark.launch
@pytest.mark.slow
@pytest.mark.parametrize(
    ("failing", "norm", "resumed"), [(0, "batch", AT), (0, "layer", AT + 1), (1, "batch", AT + 1)]
)
def test_nodes_that_are_a_step_apart_go_on_from_the_newest_step_that_all_have(
    tmp_path: Path, failing: int, norm: str, resumed: int
) -> None:
    words = ["--seeds", "--nodes", "01", "--norm", norm]
    # It raises between its exchange and its step, and saves; the other one goes on by a step.
    found = broken(tmp_path / "apart", 2, {failing: dies("error")}, *words)
    assert found.resumed == [0, resumed], found.output
    if resumed == AT:  # the buffers of rank 0 are not known at the later one
        expected = whole(2, *words)
        check(found, expected, resumed=AT)
    else:
        check_goes_on(found, resumed, rank=1 - failing)
