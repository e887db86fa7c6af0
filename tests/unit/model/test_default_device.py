"""``torch.set_default_device``, which many scripts call, is not where lowdiff's own tensors go.

Nothing can be read on the meta device, so what is made there by mistake is an error.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import lowdiff
from lowdiff.compressors import CyclicTopK, PowerSGD, Quantize, RandomK, TopK
from lowdiff.persistence.format.values import same
from lowdiff.protocols import Compressor
from lowdiff.recovery.inspect.verify import verify
from tests.crash.pool import Pool
from tests.unit.loops import Loop, small_model

COMPRESSORS = [
    pytest.param(TopK(0.1, dense_below=64, value_dtype=torch.bfloat16), marks=pytest.mark.slow),
    pytest.param(TopK(0.1, dense_below=64, value_bits=4), marks=pytest.mark.slow),
    pytest.param(CyclicTopK(0.1, dense_below=64), marks=pytest.mark.slow),
    pytest.param(RandomK(0.1, dense_below=64), marks=pytest.mark.slow),
    PowerSGD(2, dense_below=64),
    pytest.param(Quantize(), marks=pytest.mark.slow),
    None,
]


@contextmanager
def default_device(name: str) -> Iterator[None]:
    torch.set_default_device(name)
    try:
        yield
    finally:
        torch.set_default_device(None)


def loop_of(folder: Path, compressor: Compressor | None, model: nn.Module, **more: Any) -> Loop:
    settings = {"compressor": compressor, "snapshot_every": 1000, **more}
    # Older PyTorch would make Adam's counters on the default device.
    return Loop(
        folder, model, lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, foreach=False), settings
    )


def train(loop: Loop, until: int) -> dict[int, dict[str, torch.Tensor]]:
    """Weights after each step of one life."""
    made = {}
    data = TensorDataset(torch.randn(80, 20, generator=torch.Generator().manual_seed(0)))
    with default_device("meta"):
        loader = loop.checkpointer.dataloader(data, batch_size=8)
        resumed = loop.attach()
        for step in range(resumed, until):
            (inputs,) = next(iter(loader))
            loop.optimizer.zero_grad()
            loop.model(inputs).square().mean().backward()
            loop.checkpointer.clip_grad_norm_(loop.model.parameters(), 0.5)
            loop.optimizer.step()
            loop.checkpointer.commit()
            made[step + 1] = loop.weights()
        loop.checkpointer.close()
    return made


@pytest.mark.cases(1)
@pytest.mark.parametrize("compressor", COMPRESSORS, ids=str)
def test_one_process_trains_resumes_and_recovers(
    tmp_path: Path, compressor: Compressor | None
) -> None:
    made = train(loop_of(tmp_path, compressor, small_model()), 2)
    made |= train(loop_of(tmp_path, compressor, small_model()), 4)
    steps = made if compressor else {4: made[4]}
    with default_device("meta"):
        for step, weights in steps.items():
            state = lowdiff.recover(tmp_path / "run", step, staging=tmp_path / "staging")
            assert same(dict(state.model_state_dict()), weights)
        assert verify(tmp_path / "run", tmp_path / "staging").ok


def test_an_optimizer_that_recovery_builds_is_where_the_parameters_are(tmp_path: Path) -> None:
    # This kernel refuses tensors of the meta device.
    loop = Loop(tmp_path, make=lambda p: torch.optim.AdamW(p, fused=True))
    loop.attach()
    for number in loop.checkpointer.steps(4):
        loop.step(number)
    expected = loop.weights()
    loop.die()
    with default_device("meta"):
        state = lowdiff.recover(tmp_path / "run", staging=tmp_path / "staging")
    assert same(dict(state.model_state_dict()), expected)


def on_a_rank(rank: int, world_size: int, folder: str, compressor: Compressor | None) -> bool:
    """A pool's job: two lives, and a recovery on each rank."""
    root = Path(folder)
    for until in (2, 4):
        torch.manual_seed(0)
        # Without buffers, which every rank has of its own.
        model = nn.Sequential(nn.Linear(20, 60), nn.ReLU(), nn.Linear(60, 3))
        ddp = DistributedDataParallel(model)
        made = train(loop_of(root, compressor, ddp), until)
    with default_device("meta"):
        step = 3 if compressor else 4  # one to replay
        state = lowdiff.recover(root / "run", step, staging=root / "staging")
    found = {f"module.{name}": value for name, value in state.model_state_dict().items()}
    return same(found, made[step])


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "compressor",
    [TopK(0.1, dense_below=64), pytest.param(PowerSGD(2, 64), marks=pytest.mark.slow), None],
    ids=str,
)
def test_two_ranks_train_resume_and_recover(
    tmp_path: Path, pool: Pool, compressor: Compressor | None
) -> None:
    assert pool.run(on_a_rank, 2, str(tmp_path), compressor) == [True, True]
