"""Every compressor on CUDA, where gradients are ready on a stream and not at a time, and ranks that share a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import lowdiff
from lowdiff.compressors import Cast, CyclicTopK, PowerSGD, Quantize, RandomK, TopK
from lowdiff.protocols import Compressor
from lowdiff.recovery.inspect.verify import verify
from lowdiff.recovery.replay.replayer import ReplayOptions
from tests.crash.pool import Pool
from tests.unit.loops import small_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
COMPRESSORS = {
    "topk": TopK(density=0.1),
    "topk of 2 bits": TopK(density=0.1, value_bits=2),
    "cyclic": CyclicTopK(density=0.1),
    "randomk": RandomK(density=0.1),
    "powersgd": PowerSGD(matrix_rank=2, dense_below=100),
    "quantize": Quantize(8),
    "cast": Cast(torch.bfloat16),
    "none": None,
}
STEPS = 10
DEVICE = torch.device("cuda")


def train(rank: int, world_size: int, folder: Path, compressor: Compressor | None) -> list[Any]:
    """Weights after every step, on the host; all ranks share one GPU."""
    model = small_model().to(DEVICE)
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-2)
    seen = []
    with lowdiff.Checkpointer(
        folder / "run",
        compressor=compressor,
        staging=folder / "staging",
        snapshot_every=4,
        retention=None,
    ) as checkpointer:
        checkpointer.attach(ddp, optimizer)
        for number in checkpointer.steps(STEPS):
            optimizer.zero_grad()
            seed = world_size * number + rank
            inputs = torch.randn(8, 20, generator=torch.Generator().manual_seed(seed))
            # Work that is queued, so that a reader on another stream would come too early.
            hidden = inputs.to(DEVICE)
            for _ in range(50):
                hidden = hidden @ torch.eye(20, device=DEVICE)
            ddp(hidden).square().mean().backward()
            optimizer.step()
            seen.append({name: value.cpu().tolist() for name, value in model.named_parameters()})
    return seen


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("name", COMPRESSORS)
def test_every_step_comes_back_with_the_bits_that_it_had(
    tmp_path: Path, pool: Pool, name: str, num_ranks: int
) -> None:
    ranks = pool.run(train, num_ranks, tmp_path, COMPRESSORS[name])
    assert all(seen == ranks[0] for seen in ranks)
    first, last = ranks[0][0], ranks[0][-1]
    assert first != last
    report = verify(tmp_path / "run", tmp_path / "staging", options=ReplayOptions(device=DEVICE))
    assert report.ok, report.failures
    # LowDiff+ keeps no step but the snapshots on a disk.
    steps = (4, 8) if COMPRESSORS[name] is None else (1, 4, 7, STEPS)
    for step in steps:
        state = lowdiff.recover(tmp_path / "run", step, staging=tmp_path / "staging", device=DEVICE)
        found = state.model_state_dict()
        assert {n: found[n].cpu().tolist() for n in first} == ranks[0][step - 1], step
