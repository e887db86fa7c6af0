"""Training on an accelerator: copies run beside it, and records are staged a step later.

`LateCopies` stands for the accelerator here: a copy that reads its source too late, or is read too
early, shows in the recovered bits. The tests marked ``gpu`` have never run on a GPU yet.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import lowdiff
import lowdiff.opening
from lowdiff.host_copy import HostCopies
from lowdiff.recovery.verify import verify
from lowdiff.residuals import COPIED_EVERY, CopiedResidual
from tests.face.late_copies import LateCopies
from tests.face.loops import Loop, small_model

LATE = pytest.param("late", id="late copies")
CUDA = pytest.param(
    "cuda",
    id="cuda",
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    ],
)
STEPS = 12


@pytest.fixture(params=[LATE, CUDA])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    if request.param == "cuda":
        yield "cuda"
        return
    monkeypatch.setattr(lowdiff.opening, "HostCopies", LateCopies)
    yield "cpu"


class DeviceLoop(Loop):
    """A loop whose model and batches are on a device."""

    device = "cpu"

    def step(self, number: int) -> torch.Tensor:
        inputs = torch.randn(8, 20, generator=torch.Generator().manual_seed(number))
        loss: torch.Tensor = self.model(inputs.to(self.device)).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.detach()


def loop_on(device: str, folder: Path, **settings: Any) -> DeviceLoop:
    loop = DeviceLoop(folder, model=small_model().to(device), settings=settings)
    loop.device = device
    return loop


def recovered(folder: Path, step: int | None = None) -> lowdiff.RecoveredState:
    return lowdiff.recover(folder / "run", step, staging=folder / "staging")


@pytest.mark.parametrize("snapshot", ["atomic", "rolling"])
def test_every_step_comes_back_bit_for_bit(tmp_path: Path, device: str, snapshot: str) -> None:
    loop = loop_on(device, tmp_path, snapshot=snapshot)
    loop.attach()
    expected, looked_at = {}, (1, 5, 6, 12)
    for number in loop.checkpointer.steps(STEPS):
        loop.step(number)
        if number + 1 in looked_at:
            expected[number + 1] = {n: value.cpu() for n, value in loop.weights().items()}
    loop.checkpointer.close()
    report = verify(tmp_path / "run", tmp_path / "staging")
    assert [replay.last for replay in report.replays if replay.compared][:2] == [5, 10]
    if device == "cuda":
        # Processors round differently; what the snapshots hold was never replayed.
        expected = {step: expected[step] for step in (5, 12)}
    else:
        assert report.ok, report.failures
    for step, state in expected.items():
        found = recovered(tmp_path, step).model_state_dict()
        assert all(torch.equal(found[name], value) for name, value in state.items()), step


def test_a_kill_costs_the_step_whose_copies_were_under_way(tmp_path: Path, device: str) -> None:
    loop = loop_on(device, tmp_path)
    loop.attach()
    for number in range(5):
        loop.step(number)
        loop.checkpointer.commit()
    loop.die()
    assert recovered(tmp_path).step == 4


def test_a_snapshot_is_given_up_if_parameters_change_while_it_is_copied(
    tmp_path: Path, device: str, caplog: pytest.LogCaptureFixture
) -> None:
    loop = loop_on(device, tmp_path)
    loop.attach()
    caplog.set_level(logging.WARNING)
    for number in loop.checkpointer.steps(8):
        if number == 5:  # the snapshot of step 5 is under way
            with torch.no_grad():
                for parameter in loop.model.parameters():
                    parameter.mul_(0.5)
        loop.step(number)
    loop.checkpointer.close()
    assert "changed outside optimizer.step()" in caplog.text
    report = verify(tmp_path / "run", tmp_path / "staging")
    assert report.snapshots == (0, 6, 8)
    if device != "cuda":
        assert report.ok, report.failures


def test_a_failing_action_is_run_again_and_before_what_came_after_it() -> None:
    copies = LateCopies(torch.device("cpu"))
    done: list[str] = []
    fails = [True]

    def first() -> None:
        if fails.pop():
            fails.append(False)
            raise OSError("full")
        done.append("first")

    copies.then(first)
    copies.then(lambda: done.append("second"))
    with pytest.raises(OSError, match="full"):
        copies.finish()
    assert done == []
    copies.finish()
    assert done == ["first", "second"]


def test_on_a_cpu_nothing_is_copied_and_nothing_waits() -> None:
    copies = HostCopies(torch.device("cpu"))
    tensor = torch.ones(3)
    done: list[bool] = []
    copies.then(lambda: done.append(True))
    assert done
    assert copies.fetch(tensor).data_ptr() == tensor.data_ptr()
    assert copies.fetch_copy(tensor).data_ptr() == tensor.data_ptr()
    assert not copies.lag
