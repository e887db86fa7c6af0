"""Copies in other nodes' memory: a node is lost with its memory and its disk, and no replicated step is."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.node_losses import node_losses
from tests.faults.nodes import why_no_nodes

pytestmark = pytest.mark.launch


@pytest.fixture(autouse=True)
def _can_make_nodes() -> None:
    reason = why_no_nodes()
    if reason:
        pytest.skip(reason)


@pytest.mark.timeout(200)
@pytest.mark.parametrize("strategy", ["cast", "replica"])
def test_no_replicated_step_is_lost_with_a_node(tmp_path: Path, strategy: str) -> None:
    outcome = node_losses(tmp_path, 2, strategy=strategy, size=2, seed=1)
    assert not outcome.lost, "\n".join(outcome.lost)
    assert outcome.rounds == 2
