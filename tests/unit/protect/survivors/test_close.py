"""Strategy survivors at the end of a training, and where something else wrote since the last commit."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lowdiff.testing import parts_of
from tests.crash.test_staging_removed import remove_tree
from tests.unit.loops import Loop, close_after_error, small_model, wait_until

SURVIVORS: dict[str, Any] = {"compressor": None, "strategy": "survivors"}


def in_place(loop: Loop) -> None:
    with torch.no_grad():
        for parameter in loop.model.parameters():
            parameter.mul_(0.5)


def through_data(loop: Loop) -> None:
    for parameter in loop.model.parameters():
        parameter.data.copy_(0.5 * parameter.data)


def replaced(loop: Loop) -> None:
    for parameter in loop.model.parameters():
        parameter.data = 0.5 * parameter.data


def optimizer_state(loop: Loop) -> None:
    for state in loop.optimizer.state.values():
        state["exp_avg"].zero_()


def number_in_state(loop: Loop) -> None:
    for state in loop.optimizer.state.values():
        state["of_the_users"] = 1


WRITES: list[Callable[[Loop], None]] = [
    in_place,
    through_data,
    replaced,
    optimizer_state,
    number_in_state,
]


@pytest.mark.cases(1)
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("fails", [False, True])
def test_what_was_written_since_the_last_commit_is_no_part_of_a_step(
    tmp_path: Path, write: Callable[[Loop], None], fails: bool, caplog: pytest.LogCaptureFixture
) -> None:
    loop = Loop(tmp_path, settings=SURVIVORS)
    loop.attach()
    states = {}
    for number in loop.checkpointer.steps(8):
        states[number] = loop.weights()
        loop.step(number)
    write(loop)
    close_after_error(loop.checkpointer) if fails else loop.checkpointer.close()
    assert "LD802" in caplog.text
    assert "LD801" not in caplog.text
    again = Loop(tmp_path, settings=SURVIVORS)
    assert again.attach() == 5
    assert all(torch.equal(value, states[5][name]) for name, value in again.weights().items())
    again.checkpointer.close()


def test_buffers_that_an_evaluation_moves_are_those_of_the_commit(tmp_path: Path) -> None:
    loop = Loop(tmp_path, settings=SURVIVORS)
    loop.attach()
    for number in loop.checkpointer.steps(8):
        loop.step(number)
    weights = loop.weights()
    loop.model(torch.randn(8, 20))
    loop.checkpointer.close()
    again = Loop(tmp_path, settings=SURVIVORS)
    assert again.attach() == 8
    assert all(torch.equal(value, weights[name]) for name, value in again.weights().items())
    again.checkpointer.close()


def test_an_average_that_moved_after_the_commit_is_not_torn(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loop = Loop(tmp_path, settings=SURVIVORS)
    average = torch.optim.swa_utils.AveragedModel(loop.model)
    loop.attach(average=average)
    for number in range(7):
        loop.step(number)
        loop.checkpointer.commit()
        average.update_parameters(loop.model)
    close_after_error(loop.checkpointer)
    assert "LD802" in caplog.text


def test_a_frozen_network_that_is_written_once_is_staged_a_few_times(tmp_path: Path) -> None:
    target = nn.Linear(400, 400).requires_grad_(False)
    model = nn.ModuleDict({"net": small_model(), "target": target})
    loop = Loop(tmp_path, settings={**SURVIVORS, "snapshot_every": 100})
    loop.model = model["net"]
    loop.optimizer = torch.optim.AdamW(loop.model.parameters(), lr=1e-2)
    loop.checkpointer.attach(model, loop.optimizer)
    for number in range(30):
        loop.step(number)
        if number == 3:
            with torch.no_grad():
                target.weight.add_(1.0)
        loop.checkpointer.commit()
    staged = loop.checkpointer.stats()["staged_bytes"]
    size = target.weight.nbytes
    assert size < staged < 8 * size
    kept = target.weight.clone()
    close_after_error(loop.checkpointer)
    again = nn.ModuleDict({"net": small_model(), "target": nn.Linear(400, 400)})
    again["target"].requires_grad_(False)
    optimizer = torch.optim.AdamW(again["net"].parameters(), lr=1e-2)
    fresh = Loop(tmp_path, settings={**SURVIVORS, "snapshot_every": 100})
    assert fresh.checkpointer.attach(again, optimizer) == 30
    assert torch.equal(again.get_parameter("target.weight"), kept)
    fresh.checkpointer.close()


def test_an_error_of_the_save_hides_none_of_the_users(tmp_path: Path) -> None:
    loop = Loop(tmp_path, settings=SURVIVORS)
    with pytest.raises(ZeroDivisionError):
        train_without_staging(loop)


def train_without_staging(loop: Loop) -> None:
    with loop.checkpointer:
        loop.attach()
        for number in loop.checkpointer.steps(10):
            if number == 7:
                (own,) = (loop.folder / "staging").glob("*/i*")
                remove_tree(own)
                raise ZeroDivisionError
            loop.step(number)


def test_a_checkpointer_that_is_closed_saves_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = (Loop(tmp_path / name, settings=SURVIVORS) for name in ("one", "two"))
    for loop in (first, second):
        loop.attach()
        loop.step(0)
        loop.checkpointer.commit()
    first.checkpointer.close()
    sys.excepthook(ValueError, ValueError("the loop is wrong"), None)
    assert "LD801" in caplog.text
    second.die()
    again = Loop(tmp_path / "two", settings=SURVIVORS)
    assert again.attach() == 1
    again.checkpointer.close()


def test_an_image_that_was_saved_over_does_not_stop_the_writer(tmp_path: Path) -> None:
    loop = Loop(tmp_path, settings={**SURVIVORS, "snapshot_every": 100})
    loop.attach()
    for number in range(3):
        loop.step(number)
        loop.checkpointer.commit()
    protection = parts_of(loop.checkpointer).protection
    blocked = tmp_path / "run/snapshots/i000000-s0000000003/rank-0000.safetensors.partial"
    blocked.mkdir(parents=True)
    protection.save("an alarm")
    wait_until(lambda: loop.checkpointer.stats()["writer_error"])
    loop.step(3)
    loop.checkpointer.commit()
    protection.save("another one")
    blocked.rmdir()
    wait_until(lambda: loop.checkpointer.stats()["durable_snapshot"] == 4)
    wait_until(lambda: not loop.checkpointer.stats()["writer_error"])
    loop.checkpointer.close()
