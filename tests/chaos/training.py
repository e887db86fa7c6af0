"""The training that is killed: a loop as a user writes it, and a record of how far it came.

``python -m tests.chaos.training log OUT`` trains or resumes in the folder OUT and leaves a digest of the final
state in ``OUT/result``. Beside the folder, where a kill does not wait for it, ``OUT.rank-0`` gets a line when a process
begins, when ``attach`` returns, and when the body of a step ended.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import lowdiff
from lowdiff.compressors import TopK

#: Enough for four snapshots, the removal of old ones, and batches that are not full at the end.
STEPS, SNAPSHOT_EVERY = 12, 4
STRATEGIES: dict[str, dict[str, Any]] = {
    "log": {"compressor": TopK(density=0.1)},
    "replica": {"strategy": "replica"},
    "survivors": {"strategy": "survivors"},
}


def train(strategy: str, out: Path, rank: int, world_size: int) -> None:
    """Train to the end, from wherever the run is."""
    journal = os.open(f"{out}.rank-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(journal, b"begin\n")
    out.mkdir(exist_ok=True)
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(
        nn.Linear(32, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 1)
    )
    if world_size > 1:
        dist.init_process_group("gloo")
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.9)
    with lowdiff.Checkpointer(
        out / "run",
        staging=out / "staging",
        snapshot_every=SNAPSHOT_EVERY,
        batch_size=2,
        retention=2,
        **STRATEGIES[strategy],
    ) as checkpointer:
        start = checkpointer.attach(model, optimizer, scheduler=scheduler)
        os.write(journal, f"attached {start}\n".encode())
        print(f"resumed from step {start}", flush=True)  # noqa: T201
        completed = start
        for step in checkpointer.steps(until=STEPS):
            if step > start:
                os.write(journal, f"ended {step}\n".encode())
            chance = torch.Generator().manual_seed(1000 * step + rank)
            inputs = torch.randn(16, 32, generator=chance)
            loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            completed = step + 1
            if checkpointer.preempted:
                break  # close() commits this body
    os.write(journal, f"ended {completed}\n".encode())
    if completed < STEPS:
        return
    if rank == 0:
        (out / "result").write_text(digest(model, optimizer) + "\n")
    if world_size > 1:
        dist.destroy_process_group()


def digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """SHA-256 of all bits of the weights and of the optimizer's state."""
    tensors = [*model.parameters()]
    for parameter in model.parameters():
        state = optimizer.state[parameter]
        tensors += [state[name] for name in sorted(state)]
    result = hashlib.sha256()
    for tensor in tensors:
        result.update(tensor.detach().contiguous().numpy().tobytes())
    return result.hexdigest()


def main(argv: Sequence[str]) -> int:
    """Train, as a rank of several if the environment says so."""
    torch.set_num_threads(1)
    strategy, out = argv
    rank, world_size = (
        int(os.environ.get(name, n)) for name, n in (("RANK", 0), ("WORLD_SIZE", 1))
    )
    train(strategy, Path(out), rank, world_size)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
