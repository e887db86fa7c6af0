"""Training on an accelerator, whose parameters nobody reads but a snapshot.

Without one the CPU stands for it: there, too, sums and version counters tell of writes then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import lowdiff
from lowdiff.compressors.feedback import Scaled
from lowdiff.core import devices
from lowdiff.errors import StorageError
from lowdiff.model.binding import Attached
from lowdiff.protect.replica.queue import ReplicaQueue
from lowdiff.recovery.inspect.verify import verify
from lowdiff.step.residual import COPIED_EVERY, CopiedResidual, read_residual
from lowdiff.types import Layout, ParameterSpec
from tests.crash.pool import Pool
from tests.processes import is_alive
from tests.unit.loops import Loop, small_model

CPU = pytest.param("cpu", id="not read")
CUDA = pytest.param(
    "cuda",
    id="cuda",
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    ],
)
STEPS = 12


@pytest.fixture(params=[CPU, CUDA])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    if request.param == "cuda":
        yield "cuda"
        return
    monkeypatch.setattr(Attached, "is_on_host", property(lambda _: False))
    monkeypatch.setattr(devices, "sums_there", lambda _: True)
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


def recovered(folder: Path, step: int | None = None, device: str = "cpu") -> lowdiff.RecoveredState:
    return lowdiff.recover(folder / "run", step, staging=folder / "staging", device=device)


def test_every_step_comes_back_bit_for_bit(tmp_path: Path, device: str) -> None:
    loop = loop_on(device, tmp_path)
    loop.attach()
    expected, looked_at = {}, (1, 5, 6, 12)
    for number in loop.checkpointer.steps(STEPS):
        loop.step(number)
        if number + 1 in looked_at:
            expected[number + 1] = {n: value.cpu() for n, value in loop.weights().items()}
    loop.checkpointer.close()
    report = verify(tmp_path / "run", tmp_path / "staging")
    assert report.ok, report.failures
    for step, state in expected.items():
        found = recovered(tmp_path, step, device).model_state_dict()
        assert all(torch.equal(found[name], value) for name, value in state.items()), step


@pytest.mark.parametrize("strategy", ["gradients", "replica"])
@pytest.mark.parametrize("num_optimizers", [1, 2])
def test_dense_gradients_come_back_though_the_next_backward_pass_writes_them_first(
    tmp_path: Path, device: str, num_optimizers: int, strategy: str
) -> None:

    class KeptGradients(DeviceLoop):
        """Gradients are zeroed in place, so their memory is that of the next step's."""

        def step(self, number: int) -> torch.Tensor:
            inputs = torch.randn(8, 20, generator=torch.Generator().manual_seed(number))
            for optimizer in optimizers:
                optimizer.zero_grad(set_to_none=False)
            loss: torch.Tensor = self.model(inputs.to(self.device)).square().mean()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=False)
            return loss.detach()

    settings = {"compressor": None, "strategy": strategy}
    loop = KeptGradients(tmp_path, model=small_model().to(device), settings=settings)
    loop.device = device
    parameters = list(loop.model.parameters())
    parts = [parameters] if num_optimizers == 1 else [parameters[:2], parameters[2:]]
    optimizers = [torch.optim.AdamW(part, lr=1e-2) for part in parts]
    loop.checkpointer.attach(loop.model, optimizers)
    for number in range(9):
        loop.step(number)
        loop.checkpointer.commit()
    before = loop.weights()
    loop.settle()
    loop.die()
    found = recovered(tmp_path, device=device)
    assert found.step == 9
    state = found.model_state_dict()
    for name, value in before.items():
        if device == "cpu":
            assert torch.equal(state[name], value), name
        else:  # the replica computes on the host
            assert torch.allclose(state[name], value.cpu(), rtol=1e-4, atol=1e-6), name


def test_a_kill_costs_no_committed_step(tmp_path: Path, device: str) -> None:
    loop = loop_on(device, tmp_path)
    loop.attach()
    for number in range(5):
        loop.step(number)
        loop.checkpointer.commit()
    loop.settle()
    loop.die()
    assert recovered(tmp_path).step == 5


def test_a_learning_rate_that_is_a_tensor_is_that_of_the_snapshots_step(
    tmp_path: Path, device: str
) -> None:
    rate = torch.tensor(0.01, device=device)
    loop = DeviceLoop(
        tmp_path,
        model=small_model().to(device),
        make=lambda parameters: torch.optim.AdamW(parameters, lr=rate, foreach=False),
    )
    loop.device = device
    loop.attach()
    for number in loop.checkpointer.steps(7):
        rate.fill_(0.01 / (number + 1))
        loop.step(number)
    loop.checkpointer.close()
    report = verify(tmp_path / "run", tmp_path / "staging")
    assert report.ok, report.failures
    (group,) = recovered(tmp_path, 5, device).optimizer_state_dict()["param_groups"]
    assert float(group["lr"]) == pytest.approx(0.01 / 5)


def test_an_object_that_writes_parameters_whenever_it_is_read_loses_no_step(
    tmp_path: Path, device: str
) -> None:
    loop = loop_on(device, tmp_path)

    class Swapping:
        """Puts averaged weights in place and takes them back, as some do in ``state_dict``."""

        def state_dict(self) -> dict[str, int]:
            with torch.no_grad():
                for parameter in loop.model.parameters():
                    parameter.mul_(1.0)
            return {"swaps": 1}

        def load_state_dict(self, state_dict: dict[str, int]) -> None: ...

    loop.attach(average=Swapping())
    for number in loop.checkpointer.steps(4):
        loop.step(number)
    weights = loop.weights()
    loop.die()
    state = recovered(tmp_path, device=device)
    assert state.step == 4
    found = state.model_state_dict()
    assert all(torch.equal(found[name], value.cpu()) for name, value in weights.items())


def test_a_close_that_fails_leaves_nothing_that_holds_the_run(
    tmp_path: Path, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = loop_on(device, tmp_path, compressor=None, strategy="replica")
    loop.attach()
    for number in range(3):
        loop.step(number)
        loop.checkpointer.commit()
    loop.step(3)
    stats = loop.checkpointer.stats()

    def full(*_: object, **__: object) -> int:
        raise StorageError("full")

    with monkeypatch.context() as patch:
        patch.setattr(ReplicaQueue, "stage", full)
        with pytest.raises(StorageError, match="full"):
            loop.checkpointer.close()
    assert not is_alive(stats["replica_pid"])
    assert not is_alive(stats["writer_pid"])
    assert loop_on(device, tmp_path, compressor=None, strategy="replica").run(4) == 3


def train_and_clamp(rank: int, world_size: int, folder: Path) -> dict[str, Any]:
    """Every step is followed by a change that only a snapshot can hold."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Attached, "is_on_host", property(lambda _: False))
        ddp = DistributedDataParallel(small_model())
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        with lowdiff.Checkpointer(
            folder / "run", staging=folder / "staging", snapshot_every=3
        ) as checkpointer:
            checkpointer.attach(ddp, optimizer)
            for number in checkpointer.steps(8):
                optimizer.zero_grad()
                inputs = torch.randn(8, 20, generator=torch.Generator().manual_seed(number))
                ddp(inputs).square().mean().backward()
                optimizer.step()
                with torch.no_grad():
                    for parameter in ddp.parameters():
                        parameter.clamp_(-0.1, 0.1)
    return {name: value.tolist() for name, value in ddp.module.named_parameters()}


def test_ranks_whose_every_step_takes_a_snapshot_do_not_wait_for_each_other_for_ever(
    tmp_path: Path, pool: Pool
) -> None:
    weights, others = pool.run(train_and_clamp, 2, tmp_path)
    assert weights == others
    found = recovered(tmp_path)
    assert found.step == 8
    assert {name: found.model_state_dict()[name].tolist() for name in weights} == weights


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kernel", [{}, {"foreach": False}, {"fused": True}], ids=str)
def test_a_run_killed_on_cuda_goes_on_bit_for_bit_from_a_copy_of_the_residual(
    tmp_path: Path, kernel: dict[str, Any]
) -> None:
    def make(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=1e-2, **kernel)

    def loop(folder: str) -> DeviceLoop:
        made = DeviceLoop(tmp_path / folder, model=small_model().cuda(), make=make)
        made.device = "cuda"
        return made

    last = 2 * COPIED_EVERY
    whole, killed, resumed = loop("whole"), loop("killed"), loop("killed")
    whole.run(last + 5)
    killed.attach()
    for number in range(last):
        killed.step(number)
        killed.checkpointer.commit()
    killed.settle()
    killed.die()
    assert resumed.run(last + 5) == last
    ours, theirs = resumed.weights(), whole.weights()
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())


def test_a_residual_is_copied_every_few_steps_into_the_next_slot(tmp_path: Path) -> None:
    spec = ParameterSpec("a", (3,), (1,), "float32", 0)
    layout = Layout((spec,))
    residual = CopiedResidual(tmp_path / "slots", layout, torch.device("cpu"), Scaled())
    marks = {}
    for step in range(1, 3 * COPIED_EVERY + 1):
        residual.pair(0)[1].fill_(step)
        residual.written(0)
        residual.settle()
        residual.advance()
        copy = residual.copy(step)
        if copy is not None:
            assert residual.mark() is not None
            copy.arrive()
        marks[step] = residual.mark()
    named = {step: mark for step, mark in marks.items() if mark is not None}
    assert list(named) == [COPIED_EVERY, 2 * COPIED_EVERY, 3 * COPIED_EVERY]
    for step, mark in named.items():
        found = read_residual(tmp_path / "slots", layout, mark)
        assert found is not None
        assert found[0].tolist() == [step] * 3


@pytest.mark.parametrize("compressor", ["none", "topk"])
@pytest.mark.parametrize("most", [100, 1_000_000])
def test_a_replica_that_cannot_keep_up_with_an_accelerator_is_named_at_the_start(
    tmp_path: Path,
    device: str,
    caplog: pytest.LogCaptureFixture,
    limits: Callable[..., None],
    compressor: str,
    most: int,
) -> None:
    limits(fast_replica_elements=most)
    settings: dict[str, Any] = {}
    if compressor == "none":
        settings = {"compressor": None, "strategy": "replica"}
    loop = loop_on(device, tmp_path, **settings)
    loop.attach()
    loop.checkpointer.close()
    named = [line for line in caplog.messages if line.startswith("LD320")]
    assert len(named) == (most == 100 and compressor == "none")
    assert all("compressor=PowerSGD(4)" in line for line in named)


def test_it_is_not_named_on_a_cpu(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, limits: Callable[..., None]
) -> None:
    limits(fast_replica_elements=100)
    loop = Loop(tmp_path, settings={"compressor": None})
    loop.attach()
    loop.checkpointer.close()
    assert "LD320" not in caplog.text
