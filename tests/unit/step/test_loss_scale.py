"""A loss scale that is a power of two changes no bit of a training, whenever it moves.

So what error feedback keeps is the same with and without a scaler, and every mistake about its unit
shows in the weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lowdiff
from lowdiff import testing
from lowdiff.compressors import CyclicTopK, PowerSGD, Quantize, RandomK, TopK
from lowdiff.protocols import Compressor
from tests.crash.pool import Pool
from tests.crash.trainings import batch, wrapped
from tests.unit.loops import as_late

COMPRESSORS: dict[str, Compressor] = {
    "topk": TopK(0.1, dense_below=64),
    "topk of 2 bits": TopK(0.1, dense_below=64, value_bits=2),
    "cyclic": CyclicTopK(0.1, dense_below=64),
    "randomk": RandomK(0.1, dense_below=64),
    "randomk of 4 bits": RandomK(0.1, dense_below=64, value_bits=4),
    "powersgd": PowerSGD(2, dense_below=64),
    "8 bits": Quantize(8),
}
#: The others run with the slow tests.
FAST = ("topk", "powersgd")


@dataclass(frozen=True)
class Life:
    """One life of a run.

    Attributes:
        until: Last step.
        scale: First loss scale, doubled after every second step; None trains without a scaler.
        plain: Without DDP.
        unscales: Calls ``unscale_`` before the optimizer steps.
        overflows: A step whose gradients are infinite: with a scaler skipped, without left out.
        early_commit: Commits before the scaler is updated.
        dies: Ends without ``close()``.
        late: Does not wait for what a scaler says, and takes whole buckets, as on an accelerator.
    """

    until: int
    scale: float | None = None
    plain: bool = False
    fused: bool = False
    unscales: bool = False
    overflows: int = -1
    early_commit: bool = False
    dies: bool = False
    late: bool = False


def train(
    rank: int, world_size: int, folder: str, compressor: Compressor, lives: Sequence[Life]
) -> list[torch.Tensor]:
    """A pool's job: the weights after each step that an optimizer took, through several lives."""
    weights: list[torch.Tensor] = []
    for life in lives:
        with as_late() if life.late else nullcontext():
            weights += trained(rank, folder, compressor, life)
    return weights


def trained(rank: int, folder: str, compressor: Compressor, life: Life) -> list[torch.Tensor]:
    """One life."""
    weights = []
    torch.manual_seed(0)
    first_layer = nn.Linear(20, 60)
    inner = nn.Sequential(first_layer, nn.Tanh(), nn.Linear(60, 9))
    model = inner if life.plain else wrapped(inner)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=life.fused)
    scaler = torch.amp.GradScaler(
        "cpu", init_scale=life.scale or 1.0, growth_interval=2, enabled=life.scale is not None
    )
    checkpointer = lowdiff.Checkpointer(
        f"{folder}/run", compressor=compressor, staging=f"{folder}/staging-{rank}"
    )
    stateful: dict[str, Any] = {} if life.scale is None else {"scaler": scaler}
    first = checkpointer.attach(model, optimizer, **stateful)
    for step in range(first, life.until):
        optimizer.zero_grad()
        is_overflow = step == life.overflows
        if not (is_overflow and life.scale is None):
            loss = model(batch(step, rank, 16, 20)).square().mean()
            scaler.scale(loss * (torch.inf if is_overflow else 1.0)).backward()
            if life.unscales:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
        if life.early_commit:
            checkpointer.commit()
        scaler.update()
        if not life.early_commit:
            checkpointer.commit()
        weights.append(first_layer.weight.detach().clone())
    if life.dies:
        testing.kill(checkpointer)
    else:
        checkpointer.close()
    return weights


WAYS = {
    "ddp": Life(12, 4.0),
    "ddp, unscaled by hand": Life(12, 4.0, unscales=True),
    "ddp, committed before the update": Life(12, 4.0, early_commit=True),
    "ddp, an overflow": Life(12, 4.0, overflows=5),
    "ddp, fused, an overflow": Life(12, 4.0, fused=True, overflows=5),
    "ddp, fused, unscaled by hand": Life(12, 4.0, fused=True, unscales=True),
    "ddp, late, unscaled by hand": Life(12, 4.0, unscales=True, late=True),
    "ddp, late, fused, an overflow": Life(12, 4.0, fused=True, overflows=5, late=True),
    "plain, late, fused, an overflow": Life(
        12, 4.0, plain=True, fused=True, overflows=5, late=True
    ),
    "plain": Life(12, 4.0, plain=True),
    "plain, an overflow": Life(12, 4.0, plain=True, overflows=5),
    "plain, fused": Life(12, 4.0, plain=True, fused=True),
    "plain, fused, an overflow": Life(12, 4.0, plain=True, fused=True, overflows=5),
    "plain, fused, unscaled by hand": Life(12, 4.0, plain=True, fused=True, unscales=True),
}


def expect_the_bits_of_a_training_without_scaler(
    pool: Pool, folder: Path, compressor: Compressor, world_size: int, lives: Sequence[Life]
) -> None:
    alone = [replace(life, scale=None, late=False) for life in lives]
    found = pool.run(train, world_size, str(folder / "scaled"), compressor, lives)
    expected = pool.run(train, world_size, str(folder / "alone"), compressor, alone)
    for rank in range(world_size):
        for step, (a, b) in enumerate(zip(found[rank], expected[rank], strict=True)):
            assert torch.equal(a, b), f"rank {rank}, step {step}: {(a - b).abs().max():.1e}"


@pytest.mark.cases(1)
@pytest.mark.parametrize("way", WAYS)
def test_a_loss_scale_changes_no_bit(pool: Pool, tmp_path: Path, way: str) -> None:
    expect_the_bits_of_a_training_without_scaler(
        pool, tmp_path, COMPRESSORS["topk"], 1, [WAYS[way]]
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[] if n in FAST else pytest.mark.slow) for n in COMPRESSORS],
)
def test_nor_with_any_compressor_on_two_ranks(pool: Pool, tmp_path: Path, name: str) -> None:
    expect_the_bits_of_a_training_without_scaler(
        pool, tmp_path, COMPRESSORS[name], 2, [WAYS["ddp, an overflow"]]
    )


@pytest.mark.slow
@pytest.mark.parametrize("dies", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize(
    "second",
    [Life(12, 64.0), Life(12), Life(12, 2.0, plain=True), Life(12, 2.0, plain=True, fused=True)],
)
def test_nor_does_a_life_with_another_scale_or_none(
    pool: Pool, tmp_path: Path, second: Life, dies: bool
) -> None:
    first = Life(7, 1024.0, fused=second.fused, dies=dies)
    lives = [first, second]
    expect_the_bits_of_a_training_without_scaler(pool, tmp_path, COMPRESSORS["topk"], 1, lives)


def train_half(rank: int, world_size: int, folder: str, plain: bool) -> float:
    """A pool's job: float16 under the scale that a GradScaler begins with; what is owed, if exact."""
    torch.manual_seed(0)
    inner = nn.Linear(30, 40).half()
    model = inner if plain else wrapped(inner)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    scaler = torch.amp.GradScaler("cpu")
    with lowdiff.Checkpointer(
        f"{folder}/run", compressor=COMPRESSORS["topk"], staging=f"{folder}/staging"
    ) as checkpointer:
        checkpointer.attach(model, optimizer, scaler=scaler)
        for step in checkpointer.steps(6):
            optimizer.zero_grad()
            loss = model(batch(step, rank, 16, 30).half()).float().square().mean()
            scaler.scale(loss * 1e-4).backward()
            scaler.step(optimizer)
            scaler.update()
    state = lowdiff.recover(f"{folder}/run", staging=f"{folder}/staging")
    assert torch.equal(state.model_state_dict()["weight"], inner.weight)
    owed = state.residuals[0]["weight"]
    assert owed.dtype == torch.float32
    return float(owed.count_nonzero()) / owed.numel()


@pytest.mark.parametrize("plain", [False, True])
def test_float16_parameters_keep_what_is_too_small_for_float16(
    pool: Pool, tmp_path: Path, plain: bool
) -> None:
    (share,) = pool.run(train_half, 1, str(tmp_path), plain)
    assert share > 0.8


def trained_unscaled(rank: int, _: int, folder: str, compressor: Compressor | None) -> int:
    """A pool's job: train with a scaler that is attached and not enabled, as ``enabled=use_amp`` makes it."""
    model = wrapped(nn.Linear(20, 9))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    checkpointer = lowdiff.Checkpointer(
        f"{folder}/run", compressor=compressor, staging=f"{folder}/staging-{rank}"
    )
    first = checkpointer.attach(model, optimizer, scaler=scaler)
    for step in checkpointer.steps(first + 2):
        optimizer.zero_grad()
        scaler.scale(model(batch(step, rank, 16, 20)).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
    checkpointer.close()
    return first


@pytest.mark.cases(1)
@pytest.mark.parametrize("compressor", [TopK(0.1), None], ids=["log", "replica"])
def test_a_scaler_that_is_not_enabled_has_no_scale(
    pool: Pool, tmp_path: Path, compressor: Compressor | None
) -> None:
    for first in (0, 2):
        assert pool.run(trained_unscaled, 2, str(tmp_path), compressor) == [first] * 2
