"""Strategy survivors replays no step: what else than the optimizer wrote costs nothing, and is saved all the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import lowdiff
from lowdiff.model.items import ItemTracker
from tests.unit.loops import Loop

UNTIL = 4


def train(loop: Loop, until: int) -> None:
    """Train, and write to the optimizer's state before each step but the first."""
    for number in loop.checkpointer.steps(until):
        for state in loop.optimizer.state.values():
            state["exp_avg"].mul_(0.5)
        loop.step(number)


def test_state_that_was_written_outside_costs_no_snapshot_and_is_in_the_last_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = {"strategy": "survivors", "compressor": None, "snapshot_every": 1000}
    loop = Loop(tmp_path, settings=settings)
    with loop.checkpointer:
        loop.attach()
        before = loop.checkpointer.stats()["snapshots"]
        train(loop, UNTIL)
        assert loop.checkpointer.stats()["snapshots"] == before
    assert "LD" not in caplog.text
    recovered = lowdiff.recover(tmp_path / "run", staging=tmp_path / "staging")
    assert recovered.step == UNTIL
    expected = loop.optimizer.state_dict()["state"]
    found: dict[int, Any] = recovered.optimizer_state_dict()["state"]
    assert all(torch.equal(found[i]["exp_avg"], own["exp_avg"]) for i, own in expected.items())


def test_a_peek_reads_what_is_asked_for_and_changes_nothing() -> None:
    asked = []

    def read() -> dict[str, int]:
        asked.append(1)
        return {"count": len(asked)}

    buffer = torch.zeros(3)
    tracker = ItemTracker(lambda: {"buffer/x": buffer}, {"counter": read}, torch.device("cpu"), {})
    tracker.start({}, is_under_way=False)
    tracker.changed()
    torch.rand(1)
    assert tracker.peek({"rng/torch"}).keys() == {"rng/torch", "stateful/counter"}
    buffer += 1
    names = {"rng/torch", "stateful/counter", "buffer/x"}
    found = tracker.peek(names)
    assert found.keys() == names
    changed, _ = tracker.changed()
    assert changed.keys() >= names
    assert all(changed[name] == found[name] for name in ("rng/torch", "buffer/x"))
