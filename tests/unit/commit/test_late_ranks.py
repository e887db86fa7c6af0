"""Several ranks whose steps arrive late, each at its own time: what a rank says is committed comes back, in bits.

Gradients are changed behind their exchange from a step on, which ranks find when the step has arrived: by chance at
different commits. Only a snapshot of all ranks makes such a step recoverable.
"""

from __future__ import annotations

import time
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

#: From this step on gradients are changed.
CHANGED_FROM = 3
#: What one rank has copied meanwhile, and the other has not.
STEP_SECONDS = 0.01


def lived(
    rank: int, world_size: int, folder: str, compressor: Compressor, until: int, seed: int
) -> tuple[int, int, list[torch.Tensor]]:
    """Train until a step is committed, and die in the one after it, behind its optimizer's step.

    Returns:
        Where it began, what this rank knew to be committed then, and the weights of the committed step.
    """
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(12, 400), nn.ReLU(), nn.Linear(400, 4))
    model = wrapped(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    checkpointer = lowdiff.Checkpointer(
        f"{folder}/run", staging=f"{folder}/staging", snapshot_every=100, compressor=compressor
    )
    slow = rank == seed % 2
    late = testing.late_copies(
        least_seconds=0.02 * slow, most_seconds=0.002 + 0.06 * slow, seed=seed
    )
    with testing.whole_buckets(), as_from_an_accelerator(rank), late:
        began = checkpointer.attach(model, optimizer)
        for number in range(began, until + 1):
            if number == until:
                weights = [p.detach().clone() for p in net.parameters()]
            optimizer.zero_grad()
            model(batch(number, rank, 6, 12)).square().mean().backward()
            if number >= CHANGED_FROM:
                for parameter in net.parameters():
                    assert parameter.grad is not None
                    parameter.grad.add_(0.01)
            optimizer.step()
            time.sleep(STEP_SECONDS)
            if number < until:
                checkpointer.commit()
        committed = checkpointer.stats()["committed_step"]
        testing.kill(checkpointer)
        return began, committed, weights


@pytest.mark.parametrize("compressor", [TopK(0.1), PowerSGD(2)], ids=["top-k", "PowerSGD"])
@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 8))]
)
def test_what_ranks_take_for_committed_comes_back(
    pool: Pool, tmp_path: Path, compressor: Compressor, seed: int
) -> None:
    whole = pool.run(lived, 2, str(tmp_path / "whole"), compressor, 16, seed)
    newest = 0
    for until in (4, 6, 8, 9, 11, 13, 14, 16):
        lives = pool.run(lived, 2, str(tmp_path / "killed"), compressor, until, seed + until)
        begun = lives[0][0]
        assert {began for began, *_ in lives} == {begun}
        assert newest <= begun <= until
        newest = max(committed for _, committed, _ in lives)
        assert newest <= until
    for (*_, ours), (*_, theirs) in zip(lives, whole, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
