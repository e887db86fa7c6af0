"""Stateful objects that come, go or change between runs: what goes on, and what is said."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

import lowdiff
from tests.unit.loops import Loop


class Warmup:
    """Counts steps."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


class Cooldown(Warmup):
    """Another class."""


def live(folder: Path, until: int, **objects: Warmup) -> dict[str, int]:
    """One life; what each object had counted when it began."""
    loop = Loop(folder)
    loop.attach(**objects)
    counts = {name: thing.count for name, thing in objects.items()}
    for number in loop.checkpointer.steps(until):
        loop.step(number)
        for thing in objects.values():
            thing.count += 1
    loop.checkpointer.close()
    return counts


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What was warned about since this was last asked."""
    found = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    caplog.clear()
    return found


def test_objects_that_are_new_renamed_replaced_or_left_out_are_named_in_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    live(tmp_path, 3, warm=Warmup(), other=Warmup())
    assert warnings(caplog) == []  # all is new where a run begins
    assert live(tmp_path, 4, renamed=Warmup(), other=Cooldown()) == {"renamed": 0, "other": 0}
    (said,) = warnings(caplog)
    assert said.startswith("LD307: resuming at step 3: ")
    assert "renamed is new and starts afresh" in said
    assert "other is tests.unit.attach.test_objects_between_runs.Cooldown instead of" in said
    assert "warm was not attached again, and its state is left out" in said
    assert set(lowdiff.recover(tmp_path / "run", 3).stateful) == {"renamed", "other"}
    assert live(tmp_path, 5, renamed=Warmup(), other=Cooldown()) == {"renamed": 1, "other": 1}
    assert warnings(caplog) == []


class Early(Warmup):
    """Takes a state only before it was asked for one, as torchdata's node loader does."""

    def __init__(self) -> None:
        super().__init__()
        self.was_asked = False

    def state_dict(self) -> dict[str, Any]:
        self.was_asked = True
        return {"count": self.count, "table": torch.full((3000,), float(self.count))}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if not self.was_asked:
            self.count = state["count"]


@pytest.mark.cases(1)
@pytest.mark.parametrize("strategy", ["log", "replica", "survivors"])
def test_objects_are_given_their_state_before_they_are_asked_for_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, strategy: str
) -> None:
    compressor = {} if strategy == "log" else {"compressor": None, "strategy": strategy}
    for resumed, until in ((0, 3), (3, 5), (5, 6)):
        loop = Loop(tmp_path, settings=compressor)
        thing = Early()
        assert loop.attach(early=thing) == thing.count == resumed
        for number in loop.checkpointer.steps(until):
            loop.step(number)
            thing.count += 1
        loop.checkpointer.close()
    assert "LD309" not in caplog.text


def test_a_class_that_is_found_in_another_module_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for resumed, module in enumerate(["__main__", "__mp_main__", "train", "package.train"]):
        monkeypatch.setattr(Warmup, "__module__", module)
        assert live(tmp_path, resumed + 1, warm=Warmup()) == {"warm": resumed}
    assert warnings(caplog) == []


def test_a_loader_that_is_not_made_again_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = Loop(tmp_path)
    first.checkpointer.dataloader(TensorDataset(torch.arange(3)), batch_size=1)
    first.run(2)
    Loop(tmp_path).run(3)
    assert "dataloader0 was not attached again" in caplog.text


def test_differences_of_hyper_parameters_alone_are_no_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Loop(tmp_path).run(2)
    loop = Loop(tmp_path)
    loop.optimizer.param_groups[0]["lr"] = 5.0
    with caplog.at_level(logging.INFO):
        loop.run(3)
    assert "resuming at step 2: restored lr=0.01 of group 0 (given: 5.0)" in caplog.text
    assert warnings(caplog) == []
