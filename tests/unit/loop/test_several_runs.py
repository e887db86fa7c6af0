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
