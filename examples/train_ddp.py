"""Data-parallel training that survives kill -9: see README.md in this folder."""

from __future__ import annotations

import argparse
import hashlib
import os
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import lowdiff
from lowdiff.compressors import TopK


def join() -> int:
    """Join the other ranks; returns this one's number."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    agent_has_it = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        world_size,
        is_master=rank == 0 and not agent_has_it,
    )
    # torchrun --max-restarts starts the workers again with the same store, which still holds the
    # addresses of the dead ones; a prefix of its own for each attempt keeps Gloo from finding them.
    # (On several nodes take the prefix from a counter in the store: this variable is per node.)
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    fresh = dist.PrefixStore(f"attempt-{attempt}", store)
    dist.init_process_group("gloo", store=fresh, rank=rank, world_size=world_size)
    return rank


def epoch_after_epoch(loader: Iterable[Any]) -> Iterator[Any]:
    """Batches without end."""
    while True:
        yield from loader


def main() -> None:
    """Train, or go on training."""
    parser = argparse.ArgumentParser()
    parser.add_argument("run", help="folder of the run")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--staging", help="folder in memory (tmpfs); by default in /dev/shm")
    args = parser.parse_args()
    rank = join()

    torch.manual_seed(0)
    inputs = torch.randn(4096, 32)
    dataset = TensorDataset(inputs, inputs.cos().sum(1, keepdim=True))
    model = nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Dropout(0.1), nn.Linear(256, 1))
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.steps)

    checkpointer = lowdiff.Checkpointer(
        args.run, compressor=TopK(density=0.05), staging=args.staging
    )
    loader = checkpointer.dataloader(dataset, batch_size=32)  # its position is part of each step
    with checkpointer:
        completed = checkpointer.attach(ddp, optimizer, scheduler=scheduler)
        if rank == 0:
            print(f"starting at step {completed}", flush=True)
        batches = epoch_after_epoch(loader)
        for step in checkpointer.steps(until=args.steps):
            features, targets = next(batches)
            loss = nn.functional.mse_loss(ddp(features), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            if rank == 0 and (step + 1) % 10 == 0:
                print(f"step {step + 1}: loss {loss.item():.9g}", flush=True)

    weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    print(f"rank {rank}: weights {hashlib.sha256(weights).hexdigest()[:16]}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
