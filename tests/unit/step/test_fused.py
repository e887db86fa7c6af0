"""The run's ``fused`` wins over the constructor's, also where a gradient scaler goes by it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

import lowdiff
from lowdiff.persistence.format.values import same
from tests.unit.loops import Loop, as_late

KINDS: list[Any] = [
    torch.optim.AdamW,
    lambda p, lr, fused: torch.optim.SGD(p, lr=lr, momentum=0.9, fused=fused),
    torch.optim.Adagrad,
]


@pytest.fixture(params=["at once", "late"])
def verdict(request: pytest.FixtureRequest) -> Iterator[None]:
    """When the host reads what a scaler says."""
    with as_late() if request.param == "late" else nullcontext():
        yield


def train(folder: Path, until: int, kind: Any, *, fused: bool | None, dies: bool = False) -> Any:
    """One life with a gradient scaler, whose scale is no power of two, and which meets an overflow."""
    loop = Loop(folder, make=lambda p: kind(p, lr=1e-2, fused=fused))
    scaler = torch.amp.GradScaler("cpu", init_scale=3000.0, growth_interval=2)
    loop.attach(scaler=scaler)
    for number in loop.checkpointer.steps(until):
        loop.scaled_step(number, scaler, overflows=number == 4)
    if dies:
        loop.die()
    else:
        loop.checkpointer.close()
    state = loop.optimizer.state_dict()["state"]
    return (
        {p: dict(sorted(e.items())) for p, e in state.items()},
        loop.weights(),
        scaler.get_scale(),
    )


@pytest.mark.cases(1)
@pytest.mark.parametrize("fused", [True, None], ids=["fused, then not", "not fused, then"])
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, id=name, marks=() if name == "AdamW" else pytest.mark.slow)
        for name, kind in zip(("AdamW", "SGD", "Adagrad"), KINDS, strict=True)
    ],
)
def test_a_run_goes_on_with_the_kernel_it_began_with(
    tmp_path: Path, kind: Any, fused: bool | None, verdict: None
) -> None:
    expected = train(tmp_path / "whole", 7, kind, fused=fused)
    train(tmp_path / "killed", 3, kind, fused=fused, dies=True)
    found = train(tmp_path / "killed", 7, kind, fused=None if fused else True)
    assert same(found, expected)


def test_a_scale_ends_with_the_scaler(tmp_path: Path) -> None:
    loop = Loop(tmp_path, make=lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True))
    loop.checkpointer.attach(loop.model, loop.optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=3000.0)
    for number in loop.checkpointer.steps(4):
        if number >= 2:
            loop.step(number)
            continue
        loop.scaled_step(number, scaler)
    expected = loop.weights()
    loop.die()
    recovered = lowdiff.recover(tmp_path / "run", staging=tmp_path / "staging")
    assert (recovered.step, recovered.base_step) == (4, 0)
    assert same(dict(recovered.model_state_dict()), expected)


def test_momentum_that_a_skipped_first_step_never_wrote_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verdict: None
) -> None:
    # torch keeps memory that nobody has written; here it holds something else each time.
    made = iter(range(1, 1000))

    def unwritten(like: torch.Tensor, **options: Any) -> torch.Tensor:
        return torch.full_like(like, next(made), **options)

    monkeypatch.setattr(torch, "empty_like", unwritten)
    loop = Loop(tmp_path, make=lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, fused=True))
    scaler = torch.amp.GradScaler("cpu", init_scale=3000.0)
    loop.attach(scaler=scaler)
    for number in loop.checkpointer.steps(3):
        loop.scaled_step(number, scaler, overflows=number == 0)
    state = loop.optimizer.state_dict()["state"]
    expected = [{p: dict(e) for p, e in state.items()}, loop.weights()]
    loop.die()
    found = lowdiff.recover(tmp_path / "run", staging=tmp_path / "staging")
    assert (found.step, found.base_step) == (3, 1)
    assert same([found.optimizer_state_dict()["state"], dict(found.model_state_dict())], expected)
