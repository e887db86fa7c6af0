"""A small GPT, sharded by FSDP2, that survives kill -9 and goes on with any number of processes.

export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1      # for --max-restarts: docs/getting_started.md
torchrun --standalone --nproc-per-node=2 --max-restarts=3 examples/fsdp2_gpt.py runs/fsdp2
"""

from __future__ import annotations

import argparse
import hashlib
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import lowdiff

CONTEXT = 16


class GPT(nn.Module):
    """Predicts the next byte at every position."""

    def __init__(self, width: int, layers: int = 2) -> None:
        super().__init__()
        self.tokens = nn.Embedding(256, width)
        self.positions = nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, 4, 4 * width, dropout=0.0, activation="gelu", batch_first=True
            )
            for _ in range(layers)
        )
        self.head = nn.Linear(width, 256)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits of shape ``[batch, time, 256]``."""
        x = self.tokens(tokens) + self.positions(torch.arange(CONTEXT, device=tokens.device))
        mask = nn.Transformer.generate_square_subsequent_mask(CONTEXT, device=tokens.device)
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        logits: torch.Tensor = self.head(x)
        return logits


def main() -> None:
    """Train or resume."""
    parser = argparse.ArgumentParser()
    parser.add_argument("run", help="folder of the run")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--staging", help="folder in memory (tmpfs); by default in /dev/shm")
    args = parser.parse_args()
    kind = "cuda" if torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]) else "cpu"
    if kind == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if kind == "cuda" else "gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh(kind, (size,))  # (copies, size // copies) for HSDP

    torch.manual_seed(0)
    model = GPT(width=32).to(kind)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    text = torch.tensor(list(Path(__file__).read_bytes()))
    windows = text.unfold(0, CONTEXT + 1, 1)
    with lowdiff.Checkpointer(args.run, strategy="replica", staging=args.staging) as checkpointer:
        checkpointer.attach(model, optimizer)
        for step in checkpointer.steps(until=args.steps):
            chance = torch.Generator().manual_seed(step * size + rank)
            batch = windows[torch.randint(len(windows), (8,), generator=chance)].to(kind)
            loss = nn.functional.cross_entropy(
                model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten()
            )
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            if rank == 0 and (step + 1) % 100 == 0:
                print(f"step {step + 1}, loss {loss.item():.3f}", flush=True)
    weights = {name: value.full_tensor() for name, value in model.state_dict().items()}
    if rank == 0:
        found = hashlib.sha256()
        for value in weights.values():
            found.update(value.cpu().numpy().tobytes())
        print(f"weights {found.hexdigest()[:16]}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
