"""Copies in other nodes' memory: a node is lost with its memory and its disk, and no replicated step is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.faults.node_losses import node_losses
from tests.faults.nodes import why_no_nodes

pytestmark = pytest.mark.launch


@pytest.fixture(autouse=True)
def _can_make_nodes() -> None:
    reason = why_no_nodes()
    if reason:
        pytest.skip(reason)


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize("strategy", ["cast", "replica"])
def test_no_replicated_step_is_lost_with_a_node(tmp_path: Path, strategy: str) -> None:
    check(tmp_path, 2, strategy, size=2)


@pytest.mark.slow
@pytest.mark.turns(3)
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("strategy", "size", "copies"),
    [("topk", 3, 2), ("replica", 4, 3), ("sharded", 2, 2), ("sharded", 3, 2)],
)
def test_any_nodes_but_one_of_a_group_may_be_lost(
    tmp_path: Path, strategy: str, size: int, copies: int
) -> None:
    check(tmp_path, 4, strategy, size=size, copies=copies)


@pytest.mark.campaign
@pytest.mark.timeout(400)
@pytest.mark.parametrize(("size", "copies"), [(3, 2), (4, 3)])
def test_error_feedback_is_not_lost_either(tmp_path: Path, size: int, copies: int) -> None:
    kinds = ("lost", "silent", "recovering", "returns")
    check(tmp_path, 4, "replicated", size=size, copies=copies, kinds=kinds)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_shared_disk_serves_where_all_copies_are_lost(tmp_path: Path) -> None:
    kinds = ("group", "lost")
    check(tmp_path, 2, "cast", size=2, shares_disk=True, kinds=kinds)


def check(folder: Path, rounds: int, strategy: str, **options: Any) -> None:
    outcome = node_losses(folder, rounds, strategy=strategy, seed=1, **options)
    assert not outcome.lost, "\n".join(outcome.lost)
    assert outcome.rounds == rounds
