"""Whatever differs between two recovered states is named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import lowdiff
from lowdiff.persistence.format.values import encode
from lowdiff.recovery.compare import differences
from lowdiff.recovery.state import RecoveredState
from tests.unit.loops import Loop


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("compared")
    Loop(folder).run(2)
    return folder / "run"


def flip_sign_of_zero(state: RecoveredState) -> None:
    state.optimizers[0].state["0.weight"]["exp_avg"][3] = -0.0


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda s: None, []),
        (
            lambda s: s.parameters["0.bias"].add_(1),
            ["parameter 0.bias (60 elements; the first, 0: "],
        ),
        (lambda s: s.parameters.pop("0.bias"), ["parameter 0.bias (only on one side)"]),
        (
            lambda s: s.optimizers[0].groups[0].update(lr=2.0),
            ["optimizer 0: hyper-parameters"],
        ),
        (flip_sign_of_zero, ["optimizer 0, 0.weight: exp_avg"]),
        (
            lambda s: s.items[0].update({"buffer/1.running_mean": encode(torch.zeros(60))}),
            ["rank 0: item buffer/1.running_mean"],
        ),
        (
            lambda s: setattr(s, "held", s.held[1:]),
            ["parameters that hold a gradient tensor ((0, 1, 2, 3, 4, 5) against (1, 2, 3, 4, 5))"],
        ),
    ],
)
def test_every_difference_is_named(
    run: Path, change: Callable[[RecoveredState], Any], found: list[str]
) -> None:
    left, right = lowdiff.recover(run), lowdiff.recover(run)
    left.optimizers[0].state["0.weight"]["exp_avg"][3] = 0.0
    right.optimizers[0].state["0.weight"]["exp_avg"][3] = 0.0
    change(right)
    named = list(differences(left, right))
    assert len(named) == len(found)
    assert all(text.startswith(start) for text, start in zip(named, found, strict=True))
