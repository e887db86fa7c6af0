"""What several ranks take for committed comes back in bits, though a step turns out not to replay.

Only a snapshot of all ranks makes such a step recoverable. Either gradients are changed behind their exchange, which
ranks whose steps arrive late find at different commits; or one rank alone loads optimizer state.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from torch import nn

import lowdiff
from lowdiff import testing
from lowdiff.compressors import PowerSGD, TopK
from lowdiff.protocols import Compressor
from tests.crash.lives import as_from_an_accelerator
from tests.crash.pool import Pool
from tests.crash.trainings import batch, wrapped

#: From this step on gradients are changed, or state is loaded.
CHANGED_FROM = 3
#: What one rank has copied meanwhile, and the other has not.
STEP_SECONDS = 0.01


def lived(
    rank: int,
    world_size: int,
    folder: str,
    compressor: Compressor,
    until: int,
    seed: int,
    changes: str,
    is_late: bool,
) -> tuple[int, int, list[torch.Tensor]]:
    """Train until a step is committed, and die in the one after it, behind its optimizer's step.

    Returns:
        Where it began, what this rank knew to be committed then, and the weights of the committed step.
    """
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(12, 400), nn.ReLU(), nn.Linear(400, 4))
    model = wrapped(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    checkpointer = lowdiff.Checkpointer(
        f"{folder}/run", staging=f"{folder}/staging", snapshot_every=100, compressor=compressor
    )
    with ExitStack() as late:
        late.enter_context(testing.whole_buckets())
        if is_late:
            slow = rank == seed % 2
            late.enter_context(as_from_an_accelerator(rank))
            copies = testing.late_copies(
                least_seconds=0.02 * slow, most_seconds=0.002 + 0.06 * slow, seed=seed
            )
            late.enter_context(copies)
        began = checkpointer.attach(model, optimizer)
        for number in range(began, until + 1):
            weights = [p.detach().clone() for p in net.parameters()]
            optimizer.zero_grad()
            model(batch(number, rank, 6, 12)).square().mean().backward()
            if changes == "gradients" and number >= CHANGED_FROM:
                for parameter in net.parameters():
                    assert parameter.grad is not None
                    parameter.grad.add_(0.01)
            if changes == "state of rank 0" and number % 4 == CHANGED_FROM and rank == 0:
                optimizer.load_state_dict(optimizer.state_dict())
            optimizer.step()
            time.sleep(STEP_SECONDS)
            if number < until:
                checkpointer.commit()
        committed = checkpointer.stats()["committed_step"]
        testing.kill(checkpointer)
        return began, committed, weights


@pytest.mark.parametrize("compressor", [TopK(0.1), PowerSGD(2)], ids=["top-k", "PowerSGD"])
@pytest.mark.parametrize(
    ("changes", "is_late"),
    [("gradients", True), ("state of rank 0", True), ("state of rank 0", False)],
)
@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 4))]
)
def test_what_ranks_take_for_committed_comes_back(
    pool: Pool, tmp_path: Path, compressor: Compressor, seed: int, changes: str, is_late: bool
) -> None:
    (*_, first), (*_, second) = pool.run(
        lived, 2, str(tmp_path / "whole"), compressor, 16, seed, changes, False
    )
    newest = 0
    for until in (4, 6, 8, 9, 11, 13, 14, 16):
        folder = str(tmp_path / "killed")
        lives = pool.run(lived, 2, folder, compressor, until, seed + until, changes, is_late)
        begun = lives[0][0]
        assert {began for began, *_ in lives} == {begun}
        assert newest <= begun <= until
        newest = max(committed for _, committed, _ in lives)
        assert newest <= until
    for (*_, ours), theirs in zip(lives, (first, second), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def keeping(
    rank: int, world_size: int, folder: str, every_steps: int, loads: bool, is_late: bool
) -> list[list[torch.Tensor]]:
    """Train 16 steps whose gradients stay in memory, and close; returns the weights of each.

    Where one ``loads``, rank 0 alone needs a snapshot of some steps.
    """
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(12, 400), nn.ReLU(), nn.Linear(400, 4))
    model = wrapped(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    checkpointer = lowdiff.Checkpointer(
        f"{folder}/run",
        staging=f"{folder}/staging",
        strategy="gradients",
        snapshot_every=5,
        retention=lowdiff.Retention(snapshots=1, every_steps=every_steps),
    )
    with ExitStack() as late:
        if is_late:
            late.enter_context(as_from_an_accelerator(rank))
            slow = 0.05 * (rank == 1)
            late.enter_context(testing.late_copies(least_seconds=slow, most_seconds=0.01 + slow))
        checkpointer.attach(model, optimizer)
        weights = [[p.detach().clone() for p in net.parameters()]]
        for number in range(16):
            optimizer.zero_grad()
            model(batch(number, rank, 6, 12)).square().mean().backward()
            if loads and rank == 0 and number % 3 == 2:
                optimizer.load_state_dict(optimizer.state_dict())
            optimizer.step()
            if loads and rank == 1 and number == 9:
                os.kill(os.getpid(), signal.SIGUSR1)
                time.sleep(0.1)
            checkpointer.commit()
            weights.append([p.detach().clone() for p in net.parameters()])
        checkpointer.close()
    return weights


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("every_steps", "loads", "is_late"),
    [(3, True, True), (4, True, False), (3, False, True), (1, False, True), (6, False, True)],
)
def test_ranks_keep_each_step_that_they_are_to_keep(
    pool: Pool, tmp_path: Path, every_steps: int, loads: bool, is_late: bool
) -> None:
    weights, _ = pool.run(keeping, 2, str(tmp_path), every_steps, loads, is_late)
    for step in range(every_steps, 17, every_steps):
        state = lowdiff.recover(tmp_path / "run", step, staging=tmp_path / "staging")
        found = [value for name, value in state.model_state_dict().items()]
        assert all(torch.equal(a, b) for a, b in zip(found, weights[step], strict=True)), step
