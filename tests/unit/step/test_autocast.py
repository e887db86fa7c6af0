"""A loop that steps, commits or recovers inside ``torch.autocast``, as some scripts do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import lowdiff
from lowdiff.compressors import Cast, PowerSGD, Quantize, TopK
from lowdiff.errors import UsageError
from lowdiff.persistence.format.values import same
from lowdiff.protocols import Compressor
from tests.crash.pool import Pool
from tests.unit.loops import Loop

COMPRESSORS = [
    PowerSGD(2, dense_below=64),
    Cast(torch.float16),
    Quantize(),
    TopK(0.1, value_dtype=torch.float16),
    TopK(0.1, dense_below=64, value_bits=2),
    None,
]


class InsideLoop(Loop):
    """Everything of a step is inside autocast."""

    def step(self, number: int) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            loss = super().step(number)
            self.checkpointer.commit()
        return loss


def loop_of(folder: Path, compressor: Compressor | None, **given: Any) -> Loop:
    settings = {"snapshot_every": 1000, "compressor": compressor}
    return InsideLoop(folder, settings=settings, **given)


def train(loop: Loop) -> dict[int, dict[str, torch.Tensor]]:
    """Weights after each of a few steps, of which only the first has a snapshot."""
    loop.attach()
    made = {}
    for number in range(4):
        loop.step(number)
        made[number + 1] = loop.weights()
    loop.checkpointer.close()
    return made


def assert_recovers(folder: Path, made: dict[int, dict[str, torch.Tensor]]) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        for step, weights in made.items():
            state = lowdiff.recover(folder / "run", step, staging=folder / "staging")
            found = {name.removeprefix("module."): v for name, v in weights.items()}
            assert same(dict(state.model_state_dict()), found)


@pytest.mark.cases(2)
@pytest.mark.parametrize("compressor", COMPRESSORS, ids=str)
def test_every_step_comes_back_bit_for_bit(tmp_path: Path, compressor: Compressor | None) -> None:
    made = train(loop_of(tmp_path, compressor))
    assert_recovers(tmp_path, made if compressor is not None else {4: made[4]})


def in_ddp(rank: int, world_size: int, folder: str) -> dict[int, dict[str, torch.Tensor]]:
    """A pool's job."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(20, 60), nn.ReLU(), nn.Linear(60, 3)))
    return train(loop_of(Path(folder), PowerSGD(2, dense_below=64), model=model))


def test_every_step_of_one_process_in_ddp_comes_back_bit_for_bit(
    pool: Pool, tmp_path: Path
) -> None:
    (made,) = pool.run(in_ddp, 1, str(tmp_path))
    assert_recovers(tmp_path, made)


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.Adafactor(p, lr=1e-2),
        pytest.param(
            lambda p: torch.optim.Muon([q for q in p if q.dim() == 2], lr=1e-2),
            marks=pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="newer than this"),
        ),
    ],
    ids=["adafactor", "muon"],
)
def test_an_optimizer_that_multiplies_matrices_is_refused_inside_autocast(
    tmp_path: Path, make: Callable[[Any], torch.optim.Optimizer]
) -> None:
    model = nn.Sequential(nn.Linear(20, 60, bias=False), nn.Linear(60, 3, bias=False))
    loop = loop_of(tmp_path, TopK(0.1), model=model, make=make)
    loop.attach()
    before = loop.weights()
    with pytest.raises(UsageError, match=r"optimizer\.step\(\) runs inside torch\.autocast"):
        loop.step(0)
    assert same(loop.weights(), before)
    Loop.step(loop, 0)
    loop.checkpointer.commit()
    made = {1: loop.weights()}
    loop.checkpointer.close()
    assert_recovers(tmp_path, made)
