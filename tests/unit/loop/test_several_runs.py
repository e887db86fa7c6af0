"""Several trainings in one process, the first of them finished before the process died."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import lowdiff
from lowdiff import testing
from lowdiff.compressors import TopK
from lowdiff.persistence.format.values import same

_STEPS = 4


class Killed(Exception):
    """What ends a life."""


def by_steps(checkpointer: lowdiff.Checkpointer, begun: int, act: Callable[[], None]) -> None:
    for _ in checkpointer.steps(_STEPS):
        act()


def by_commit(checkpointer: lowdiff.Checkpointer, begun: int, act: Callable[[], None]) -> None:
    for _ in range(begun, _STEPS):
        act()
        checkpointer.commit()


Way = Callable[[lowdiff.Checkpointer, int, Callable[[], None]], None]


class Fold:
    """One of the trainings; dies in its first body if it is to."""

    def __init__(self, folder: Path, *, is_killed: bool) -> None:
        self.model = nn.Sequential(nn.Linear(5, 7), nn.Dropout(0.2), nn.Linear(7, 2))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        self.checkpointer = lowdiff.Checkpointer(
            folder, compressor=TopK(0.3), staging=folder.parent / "staging"
        )
        self.begun = self.checkpointer.attach(self.model, self.optimizer)
        self._left = 1 if is_killed else _STEPS + 1

    def body(self) -> None:
        self._left -= 1
        if not self._left:
            testing.kill(self.checkpointer)
            raise Killed
        loss = self.model(torch.ones(6, 5)).square().mean() * (random.random() + np.random.rand())
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()


def folds(folder: Path, loop: Way, killed_in: int | None = None) -> list[dict[str, torch.Tensor]]:
    """Train three models one after the other, each from what the generators hold by then."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    found = []
    for number in range(3):
        fold = Fold(folder / f"run-{number}", is_killed=number == killed_in)
        try:
            loop(fold.checkpointer, fold.begun, fold.body)
        except Killed:
            return []
        fold.checkpointer.close()
        found.append({name: value.clone() for name, value in fold.model.state_dict().items()})
    return found


@pytest.mark.parametrize("loop", [by_steps, by_commit])
def test_a_finished_run_gives_back_what_it_had_drawn(
    tmp_path: Path, loop: Way, caplog: pytest.LogCaptureFixture
) -> None:
    expected = folds(tmp_path / "whole", loop)
    folds(tmp_path / "killed", loop, killed_in=1)
    caplog.clear()
    found = folds(tmp_path / "killed", loop)
    assert all(same(ours, theirs) for ours, theirs in zip(found, expected, strict=True))
    assert "LD212" not in caplog.text


def nested(folder: Path, killed_at: int | None = None) -> list[float]:
    """A loop over ``steps()`` in each epoch, with numbers drawn behind it; what the bodies drew."""
    torch.manual_seed(0)
    model = nn.Linear(5, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    checkpointer = lowdiff.Checkpointer(
        folder / "run", staging=folder / "staging", compressor=TopK(0.5)
    )
    checkpointer.attach(model, optimizer)
    drawn = []
    for epoch in range(4):
        for step in checkpointer.steps((epoch + 1) * 2):
            drawn.append(torch.rand(1).item())
            if step == killed_at:
                testing.kill(checkpointer)
                return drawn
            optimizer.zero_grad()
            model(torch.ones(3, 5)).square().mean().backward()
            optimizer.step()
        torch.rand(3)
    checkpointer.close()
    return drawn


def test_epochs_that_are_over_leave_the_first_body_its_numbers(tmp_path: Path) -> None:
    whole = nested(tmp_path / "whole")
    nested(tmp_path / "killed", killed_at=5)
    assert nested(tmp_path / "killed") == whole[5:]


@pytest.mark.parametrize("end", ["detach", "close"])
def test_an_end_behind_a_forward_pass_repeats_no_numbers(tmp_path: Path, end: str) -> None:
    for is_last in (False, True):
        fold = Fold(tmp_path / "run", is_killed=False)
        if is_last:
            fold.model(torch.ones(6, 5)).sum().backward()
            torch.rand(1)
            before = torch.get_rng_state()
            getattr(fold.checkpointer, end)()
            assert torch.equal(torch.get_rng_state(), before)
        else:
            fold.body()
            fold.checkpointer.commit()
            testing.kill(fold.checkpointer)
