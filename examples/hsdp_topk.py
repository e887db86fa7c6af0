"""HSDP with compressed gradients: shards within a node, top-k between the copies; see README.md in this folder.

export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1      # for --max-restarts: docs/getting_started.md
torchrun --standalone --nproc-per-node=4 --max-restarts=3 examples/hsdp_topk.py runs/hsdp
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import TensorDataset

import lowdiff
from lowdiff.compressors import TopK

CONTEXT, WIDTH, COPIES = 16, 32, 2


class NextByte(nn.Module):
    """Predicts the byte that follows a window of bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(256, WIDTH)
        self.blocks = nn.Sequential(
            nn.Sequential(nn.Linear(CONTEXT * WIDTH, 4 * WIDTH), nn.GELU(), nn.Dropout(0.1)),
            nn.Sequential(nn.Linear(4 * WIDTH, 4 * WIDTH), nn.GELU()),
        )
        self.head = nn.Linear(4 * WIDTH, 256)

    def forward(self, window: torch.Tensor) -> torch.Tensor:
        """Return logits of shape ``[batch, 256]``."""
        logits: torch.Tensor = self.head(self.blocks(self.tokens(window).flatten(1)))
        return logits


def main(argv: Sequence[str] | None = None) -> None:
    """Train or resume."""
    parser = argparse.ArgumentParser()
    parser.add_argument("run", help="folder of the run")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--staging", help="folder in memory (tmpfs); by default in /dev/shm")
    args = parser.parse_args(argv)
    dist.init_process_group("gloo")
    rank, shape = dist.get_rank(), (COPIES, dist.get_world_size() // COPIES)

    # Ranks of a row share out one copy of the model, ranks of a column hold the same shards.
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("copies", "shards"))
    torch.manual_seed(0)  # every rank builds the same weights
    model = NextByte()
    for block in model.blocks:
        fully_shard(block, mesh=mesh["shards"])
    fully_shard(model, mesh=mesh["shards"])
    torch.manual_seed(rank)  # and draws its own dropout
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.steps)

    text = torch.tensor(list(Path(__file__).read_bytes()))
    checkpointer = lowdiff.Checkpointer(
        args.run, compressor=TopK(density=0.01), staging=args.staging
    )
    loader = checkpointer.dataloader(TensorDataset(text.unfold(0, CONTEXT + 1, 1)), batch_size=8)
    with checkpointer:
        # FSDP reduces gradients within a row; lowdiff compresses them and averages over the columns.
        completed = checkpointer.attach(
            model, optimizer, replicate=mesh["copies"], scheduler=scheduler
        )
        if rank == 0:
            print(f"starting at step {completed}", flush=True)
        batches = (batch for _ in itertools.count() for batch in loader)  # epoch after epoch
        for step in checkpointer.steps(until=args.steps):
            (window,) = next(batches)
            loss = nn.functional.cross_entropy(model(window[:, :-1]), window[:, -1])
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            if rank == 0:
                print(f"step {step + 1}: loss {loss.item():.9g}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
