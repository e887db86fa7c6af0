"""Layers that are frozen and thawed behind `attach`: exact, and said where a resumed script does it otherwise."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import lowdiff
from lowdiff import testing
from lowdiff.compressors import PowerSGD, TopK
from lowdiff.persistence.format.values import same
from tests.unit.loops import Loop

UNTIL, THAWED = 12, 6

SETTINGS: dict[str, dict[str, Any]] = {
    "topk": {"compressor": TopK(0.1)},
    "powersgd": {"compressor": PowerSGD(matrix_rank=2)},
    "gradients": {"compressor": None, "strategy": "gradients"},
    "replica": {"compressor": None, "strategy": "replica"},
    "survivors": {"compressor": None, "strategy": "survivors"},
}


def train(
    loop: Loop, until: int, thaw: Callable[[Loop, int], None], dies_at: int | None = None
) -> dict[str, torch.Tensor]:
    loop.attach()
    for number in loop.checkpointer.steps(until):
        thaw(loop, number)
        loop.step(number)
        if number == dies_at:
            loop.die()
            return {}
    loop.checkpointer.close()
    return loop.weights()


def by_number(loop: Loop, number: int) -> None:
    loop.model.get_submodule("0").requires_grad_(number >= THAWED)


def at_the_very_step(loop: Loop, number: int) -> None:
    """As callbacks do that thaw when an epoch begins."""
    if number == THAWED:
        loop.model.get_submodule("0").requires_grad_(True)


@pytest.mark.cases(2)
@pytest.mark.parametrize("dies_at", [3, THAWED - 1, THAWED, THAWED + 2])
@pytest.mark.parametrize("strategy", ["topk", "powersgd", "gradients", "replica"])
def test_a_run_that_thaws_by_the_steps_number_is_exact_wherever_it_dies(
    tmp_path: Path, strategy: str, dies_at: int
) -> None:
    settings = SETTINGS[strategy]
    calm = train(Loop(tmp_path / "calm", settings=settings), UNTIL, by_number)
    train(Loop(tmp_path / "torn", settings=settings), UNTIL, by_number, dies_at)
    assert same(train(Loop(tmp_path / "torn", settings=settings), UNTIL, by_number), calm)


@pytest.mark.parametrize("strategy", ["topk", "survivors"])
def test_a_resumed_script_that_trains_other_layers_is_told(
    tmp_path: Path, strategy: str, caplog: pytest.LogCaptureFixture
) -> None:
    def life(until: int) -> None:
        loop = Loop(tmp_path, settings=SETTINGS[strategy])
        loop.attach()
        loop.model.get_submodule("0").requires_grad_(False)
        for number in loop.checkpointer.steps(until):
            at_the_very_step(loop, number)
            loop.step(number)
        loop.checkpointer.close()

    life(THAWED - 2)
    life(THAWED - 1)  # frozen before and now
    assert "LD220" not in caplog.text
    life(THAWED + 1)
    assert "LD220" not in caplog.text  # the step that thaws is not the first
    life(THAWED + 3)
    said = [line for line in caplog.messages if "LD220" in line]
    assert len(said) == 1
    assert "trained before and frozen now: 0.bias, 0.weight" in said[0]


def test_what_is_frozen_is_part_of_a_step(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    train(loop, THAWED + 2, by_number, THAWED + 1)
    for step, frozen in ((THAWED, ["0.weight", "0.bias"]), (THAWED + 1, None)):
        items = lowdiff.recover(tmp_path / "run", step, staging=tmp_path / "staging").items[0]
        assert ("loop/frozen" in items) is (frozen is not None)
    state = lowdiff.recover(tmp_path / "run", THAWED, staging=tmp_path / "staging")
    assert state.item("loop/frozen", 0) == ["0.weight", "0.bias"]


def test_frozen_parameters_of_an_optimizer_are_named_at_attach(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loop = Loop(tmp_path)
    loop.model.get_submodule("0").requires_grad_(False)
    loop.attach()
    said = [line for line in caplog.messages if "LD321" in line]
    assert len(said) == 1
    assert "holds 2 frozen parameters, '0.weight' among them" in said[0]
    testing.kill(loop.checkpointer)
