"""A step that does not replay ends recovery before it; no run is stuck behind it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lowdiff
from lowdiff import testing
from lowdiff.compressors import PowerSGD, TopK
from lowdiff.errors import ReplayMismatch
from lowdiff.protocols import Compressor
from tests.crash.pool import JobFailed, Pool
from tests.crash.trainings import batch, wrapped

WRITTEN, LAST = 13, 20
COMPRESSORS: dict[str, Callable[[], Compressor | None]] = {
    "topk": lambda: TopK(0.1, dense_below=16),
    "powersgd": lambda: PowerSGD(2),
    "none": lambda: None,
}


def life(
    rank: int,
    world_size: int,
    folder: str,
    compressor: str,
    until: int,
    written: int,
    settings: Any,
) -> tuple[int, dict[int, dict[str, torch.Tensor]]]:
    """Train to ``until`` and die; step ``written`` is written to behind everybody's back."""
    torch.manual_seed(3)
    first = nn.Linear(8, 40)
    module = nn.Sequential(first, nn.Tanh(), nn.Linear(40, 1))
    model = wrapped(module) if world_size > 1 else module
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    checkpointer = lowdiff.Checkpointer(
        f"{folder}/run",
        staging=f"{folder}/staging",
        compressor=COMPRESSORS[compressor](),
        snapshot_every=1000,
        watch="recovery",
        retention=None,
        **settings,
    )
    resumed = checkpointer.attach(model, optimizer)
    states = {resumed: {k: v.clone() for k, v in module.state_dict().items()}}
    for step in checkpointer.steps(until):
        optimizer.zero_grad()
        model(batch(step, rank, 5, 8)).square().mean().backward()
        optimizer.step()
        if step + 1 == written:
            first.weight.data[2, 3] = 0.25
        states[step + 1] = {k: v.clone() for k, v in module.state_dict().items()}
    testing.kill(checkpointer)
    return resumed, states


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert torch.equal(found[name], values), name


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("compressor", COMPRESSORS)
def test_a_run_goes_on_from_the_last_step_that_replays(
    pool: Pool, tmp_path: Path, compressor: str, world_size: int
) -> None:
    first = pool.run(life, world_size, str(tmp_path), compressor, LAST, WRITTEN, {})
    second = pool.run(life, world_size, str(tmp_path), compressor, LAST, -1, {})
    for (_, before), (resumed, after) in zip(first, second, strict=True):
        # Without a compressor a replica may have noticed, and begun anew with the trainer's state.
        assert resumed == WRITTEN - 1 or (compressor == "none" and resumed >= WRITTEN)
        assert_same(after[resumed], before[resumed])
    # What was trained after that is history like any other.
    third = pool.run(life, world_size, str(tmp_path), compressor, LAST + 2, -1, {})
    assert [resumed for resumed, _ in third] == [LAST] * world_size


def test_what_is_lost_is_said(pool: Pool, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ((_, states),) = pool.run(life, 1, str(tmp_path), "topk", LAST, WRITTEN, {})
    with caplog.at_level(logging.WARNING):
        state = lowdiff.recover(tmp_path / "run", staging=tmp_path / "staging")
    assert state.step == WRITTEN - 1
    assert_same(state.model_state_dict(), states[WRITTEN - 1])
    assert f"Steps {WRITTEN} to {LAST} cannot be had" in caplog.text
    assert "'0.weight'" in caplog.text


@pytest.mark.parametrize("step", [WRITTEN, LAST])
def test_a_step_that_was_asked_for_is_an_error_which_names_the_newest_good_one(
    pool: Pool, tmp_path: Path, step: int
) -> None:
    pool.run(life, 1, str(tmp_path), "topk", LAST, WRITTEN, {})
    with pytest.raises(ReplayMismatch, match=f"step {WRITTEN - 1} can") as caught:
        lowdiff.recover(tmp_path / "run", step=step, staging=tmp_path / "staging")
    assert caught.value.step == WRITTEN
    assert lowdiff.recover(tmp_path / "run", WRITTEN - 1, staging=tmp_path / "staging").step == 12


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2])
def test_whoever_wants_errors_gets_one_at_attach(
    pool: Pool, tmp_path: Path, world_size: int
) -> None:
    pool.run(life, world_size, str(tmp_path), "topk", LAST, WRITTEN, {})
    with pytest.raises(JobFailed, match=rf"ReplayMismatch: .* step {WRITTEN - 1} can"):
        pool.run(life, world_size, str(tmp_path), "topk", LAST, -1, {"on_error": "raise"})
    resumed = pool.run(life, world_size, str(tmp_path), "topk", LAST, -1, {})
    assert [step for step, _ in resumed] == [WRITTEN - 1] * world_size
