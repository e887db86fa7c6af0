"""Replay by blocks has the bits of the live run, whatever its threads, dtype and kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import lowdiff
from lowdiff.compressors import TopK
from lowdiff.persistence.format.values import same
from lowdiff.recovery.replay.replayer import ReplayOptions

#: Below and above torch's grain of 32768 elements, and never a multiple of a vector.
SIZES = [1, 63, 1000, 32769, 70_001, 131_101]

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1),
    "adamw_foreach": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    "adamw_fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1, centered=True),
    "adadelta": lambda p: torch.optim.Adadelta(p),
    "adamax": lambda p: torch.optim.Adamax(p),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.1),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.1),
    "asgd": lambda p: torch.optim.ASGD(p),
    "rprop": lambda p: torch.optim.Rprop(p),
}


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


class Bag(torch.nn.Module):
    """Parameters of awkward sizes."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.all = torch.nn.ParameterList(
            torch.randn(size, generator=generator).to(dtype) for size in SIZES
        )


def train(folder: Path, bag: Bag, optimizer: torch.optim.Optimizer, steps: int) -> None:
    """Optimizer steps on made-up gradients; the last snapshot is that of step 0."""
    checkpointer = lowdiff.Checkpointer(
        folder / "run",
        compressor=TopK(0.3, dense_below=64),
        snapshot_every=1000,
        staging=folder / "staging",
        retention=None,
    )
    checkpointer.attach(bag, optimizer)
    generator = torch.Generator().manual_seed(1)
    for _ in checkpointer.steps(steps):
        for parameter in bag.all:
            gradient = torch.randn(parameter.shape, generator=generator)
            parameter.grad = gradient.to(parameter.dtype)
        optimizer.step()
    checkpointer.close()


def assert_replays(
    folder: Path,
    bag: Bag,
    optimizer: torch.optim.Optimizer,
    steps: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Replay from step 0 gives the live bits, by blocks, without falling back."""
    # Leave only the snapshot of step 0, so that there is something to replay.
    for snapshot in (folder / "run" / "snapshots").glob(f"*-s{steps:010d}"):
        for path in snapshot.iterdir():
            path.unlink()
    state = lowdiff.recover(
        folder / "run", staging=folder / "staging", options=ReplayOptions(block_elements=8192)
    )
    assert "replaying whole tensors" not in caplog.text
    assert (state.step, state.base_step) == (steps, 0)
    found = state.model_state_dict()
    for name, expected in bag.state_dict().items():
        assert same(found[name], expected), name
    assert same(state.optimizer_state_dict()["state"], optimizer.state_dict()["state"])


@pytest.mark.cases(1)
@pytest.mark.parametrize("num_threads", [1, 2, 3])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_elementwise_optimizer_replays_by_blocks(
    tmp_path: Path,
    threads: Callable[[int], None],
    caplog: pytest.LogCaptureFixture,
    name: str,
    num_threads: int,
) -> None:
    threads(num_threads)
    bag = Bag(torch.float32)
    optimizer = OPTIMIZERS[name](bag.parameters())
    train(tmp_path, bag, optimizer, 4)
    assert_replays(tmp_path, bag, optimizer, 4, caplog)
    assert torch.get_num_threads() == num_threads


@pytest.mark.cases(1)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("name", ["adamw", "adamw_fused", "sgd"])
def test_every_dtype_replays_by_blocks(
    tmp_path: Path,
    threads: Callable[[int], None],
    caplog: pytest.LogCaptureFixture,
    name: str,
    dtype: torch.dtype,
) -> None:
    threads(3)
    bag = Bag(dtype)
    optimizer = OPTIMIZERS[name](bag.parameters())
    train(tmp_path, bag, optimizer, 4)
    assert_replays(tmp_path, bag, optimizer, 4, caplog)


@pytest.mark.slow
def test_a_parameter_changed_behind_our_back_is_noticed_at_recovery(tmp_path: Path) -> None:
    bag = Bag(torch.float32)
    optimizer = torch.optim.SGD(bag.parameters(), lr=0.1)
    checkpointer = lowdiff.Checkpointer(
        tmp_path / "run",
        compressor=TopK(0.3),
        snapshot_every=1000,
        staging=tmp_path / "staging",
        watch="recovery",
    )
    checkpointer.attach(bag, optimizer)
    for step in checkpointer.steps(70):
        for parameter in bag.all:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        if step == 5:
            bag.all[3].data += 1e-3
    with pytest.raises(lowdiff.errors.ReplayMismatch, match=r"after step 6, 'all\.3' of the"):
        lowdiff.recover(tmp_path / "run", 69, staging=tmp_path / "staging")
    checkpointer.close()
