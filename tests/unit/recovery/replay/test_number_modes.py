"""Modes of the process on which bits depend: a run comes back as it reckoned, whoever recovers it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lowdiff
from lowdiff.core.numerics import arithmetic_of, environment_of, flushes_denormals
from lowdiff.errors import DamagedFile
from lowdiff.persistence.files.paths import RunFolder
from lowdiff.persistence.format.document import read_json, write_json
from lowdiff.persistence.format.values import same
from lowdiff.persistence.run.fences import read_fence
from lowdiff.recovery.inspect.verify import verify
from tests.unit.loops import Loop

CPU = torch.device("cpu")


@contextmanager
def flushed() -> Iterator[None]:
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


@contextmanager
def wide() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextmanager
def tensor_cores() -> Iterator[None]:
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision("highest")


def narrow_model() -> nn.Module:
    return nn.Linear(20, 3, dtype=torch.float32)


def trained(folder: Path, make: Callable[[Any], torch.optim.Optimizer]) -> Any:
    """A run of three steps that dies; the optimizer's state."""
    torch.manual_seed(0)
    loop = Loop(folder, model=narrow_model(), make=make)
    loop.attach()
    for number in loop.checkpointer.steps(3):
        inputs = torch.randn(8, 20, generator=torch.Generator().manual_seed(number)).float()
        # Squares of second moments this small are below the smallest normal number.
        loss = loop.model(inputs).square().mean() * 1e-19
        loop.optimizer.zero_grad()
        loss.backward()
        loop.optimizer.step()
    state = loop.optimizer.state_dict()["state"]
    loop.die()
    return {p: dict(sorted(entries.items())) for p, entries in state.items()}


def recovered(folder: Path) -> Any:
    found = lowdiff.recover(folder / "run", staging=folder / "staging")
    assert (found.step, found.base_step) == (3, 0)
    state = found.optimizer_state_dict()["state"]
    return {p: dict(sorted(entries.items())) for p, entries in state.items()}


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=1e-2)


def test_a_run_that_flushed_denormals_comes_back_without_them(tmp_path: Path) -> None:
    with flushed():
        expected = trained(tmp_path, adam)
        assert not any(entries["exp_avg_sq"].any() for entries in expected.values())
    assert same(recovered(tmp_path), expected)
    assert not flushes_denormals()


def test_a_run_that_kept_denormals_comes_back_with_them(tmp_path: Path) -> None:
    expected = trained(tmp_path, adam)
    assert any(entries["exp_avg_sq"].any() for entries in expected.values())
    with flushed():
        found = recovered(tmp_path)
        assert flushes_denormals()
    assert same(found, expected)


@pytest.mark.parametrize(
    "make",
    [adam, lambda p: torch.optim.NAdam(p, lr=1e-2), lambda p: torch.optim.ASGD(p, lr=1e-2)],
    ids=["Adam", "NAdam", "ASGD"],
)
def test_a_run_in_double_width_comes_back_in_it(tmp_path: Path, make: Any) -> None:
    with wide():
        expected = trained(tmp_path, make)
    assert same(recovered(tmp_path), expected)
    assert torch.get_default_dtype() == torch.float32
    report = verify(tmp_path / "run", staging=tmp_path / "staging")
    assert not report.failures


def test_a_fused_optimizer_in_double_width_is_replayed_with_its_scaler(tmp_path: Path) -> None:
    with wide():
        torch.manual_seed(0)
        loop = Loop(
            tmp_path,
            model=narrow_model(),
            make=lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
        )
        scaler = torch.amp.GradScaler("cpu", init_scale=3000.0)
        loop.attach(scaler=scaler)
        for number in loop.checkpointer.steps(3):
            inputs = torch.randn(8, 20, generator=torch.Generator().manual_seed(number)).float()
            loop.optimizer.zero_grad()
            scaler.scale(loop.model(inputs).square().mean()).backward()
            scaler.step(loop.optimizer)
            scaler.update()
        expected = loop.weights()
        loop.die()
    found = lowdiff.recover(tmp_path / "run", staging=tmp_path / "staging")
    assert (found.step, found.base_step) == (3, 0)
    assert same(dict(found.model_state_dict()), expected)


def test_a_replica_reckons_as_its_trainer(tmp_path: Path) -> None:
    with wide():
        torch.manual_seed(0)
        loop = Loop(
            tmp_path,
            model=narrow_model(),
            make=lambda p: torch.optim.ASGD(p, lr=1e-2),
            settings={"compressor": None},
        )
        loop.attach()
        for number in loop.checkpointer.steps(3):
            inputs = torch.randn(8, 20, generator=torch.Generator().manual_seed(number)).float()
            loop.optimizer.zero_grad()
            loop.model(inputs).square().mean().backward()
            loop.optimizer.step()
        expected = loop.optimizer.state_dict()["state"]
        loop.die()
    found = lowdiff.recover(tmp_path / "run", staging=tmp_path / "staging")
    assert found.step == 3
    state = found.optimizer_state_dict()["state"]
    sorted_state = [{p: dict(sorted(e.items())) for p, e in s.items()} for s in (state, expected)]
    assert same(*sorted_state)


def test_modes_are_recorded_and_put_back() -> None:
    with wide(), tensor_cores():
        recorded = environment_of(CPU)
    assert (recorded.default_dtype, recorded.matmul_precision) == ("float64", "high")
    with arithmetic_of(recorded):
        with arithmetic_of(recorded):
            pass
        assert torch.get_default_dtype() == torch.float64
        assert torch.get_float32_matmul_precision() == "high"
    assert torch.get_default_dtype() == torch.float32
    assert torch.get_float32_matmul_precision() == "highest"


def test_two_runs_with_different_modes_are_replayed_one_after_the_other() -> None:
    one = replace(environment_of(CPU), default_dtype="float64")
    other = replace(one, default_dtype="float16")
    seen: list[torch.dtype] = []
    begun = threading.Event()

    def second() -> None:
        begun.set()
        with arithmetic_of(other):
            seen.append(torch.get_default_dtype())

    with arithmetic_of(one):
        thread = threading.Thread(target=second)
        thread.start()
        begun.wait()
        seen.append(torch.get_default_dtype())
    thread.join()
    assert seen == [torch.float64, torch.float16]
    assert torch.get_default_dtype() == torch.float32


def test_a_precision_that_torch_could_not_tell_is_left_as_it_is() -> None:
    unknown = replace(environment_of(CPU), matmul_precision="")
    with tensor_cores(), arithmetic_of(unknown):
        assert torch.get_float32_matmul_precision() == "high"


@pytest.fixture
def fence_file(tmp_path: Path) -> Path:
    trained(tmp_path, adam)
    return RunFolder(tmp_path / "run").fence(0, 0)


def rewritten(path: Path, environment: dict[str, Any]) -> Path:
    document = read_json(path)
    path.unlink()
    write_json(path, document | {"environment": environment})
    return path


@pytest.mark.parametrize("field", ["default_dtype", "matmul_precision"])
def test_a_mode_that_is_missing_or_that_torch_does_not_have_is_refused(
    fence_file: Path, field: str
) -> None:
    recorded = asdict(read_fence(fence_file).environment)
    missing = {key: value for key, value in recorded.items() if key != field}
    for environment in (missing, recorded | {field: "Tensor"}):
        with pytest.raises(DamagedFile):
            read_fence(rewritten(fence_file, environment))


def test_a_precision_that_torch_could_not_tell_is_read(fence_file: Path) -> None:
    unknown = replace(read_fence(fence_file).environment, matmul_precision="")
    assert read_fence(rewritten(fence_file, asdict(unknown))).environment == unknown
