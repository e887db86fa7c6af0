"""A small GPT on several processes that survives kill -9: README.md in this folder tells how.

export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1      # for --max-restarts: docs/getting_started.md
torchrun --standalone --nproc-per-node=2 --max-restarts=3 examples/ddp_gpt.py runs/gpt
"""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

import lowdiff
from lowdiff.compressors import TopK

CONTEXT = 16


class Text(Dataset[torch.Tensor]):
    """Every window of ``CONTEXT + 1`` bytes of a text."""

    def __init__(self, text: bytes) -> None:
        self.bytes = torch.tensor(list(text))

    def __len__(self) -> int:
        """Number of windows."""
        return len(self.bytes) - CONTEXT

    def __getitem__(self, index: int) -> torch.Tensor:
        """One window, int64."""
        return self.bytes[index : index + CONTEXT + 1]


class GPT(nn.Module):
    """Predicts the next byte at every position."""

    def __init__(self, width: int = 32, layers: int = 2) -> None:
        super().__init__()
        self.tokens = nn.Embedding(256, width)
        self.positions = nn.Parameter(torch.zeros(CONTEXT, width))
        layer = nn.TransformerEncoderLayer(
            width, 4, 4 * width, dropout=0.1, activation="gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 256)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(CONTEXT))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits of shape ``[batch, time, 256]``."""
        x = self.tokens(tokens) + self.positions
        logits: torch.Tensor = self.head(self.blocks(x, mask=self.mask, is_causal=True))
        return logits


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
    dist.init_process_group("gloo")
    rank = dist.get_rank()

    torch.manual_seed(0)
    text = Text(Path(__file__).read_bytes())
    ddp = DistributedDataParallel(GPT())
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=3e-3, fused=True)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.steps)

    checkpointer = lowdiff.Checkpointer(
        args.run, compressor=TopK(density=0.05), staging=args.staging
    )
    loader = checkpointer.dataloader(text, batch_size=8)  # its position is part of each step
    with checkpointer:
        completed = checkpointer.attach(ddp, optimizer, scheduler=scheduler)
        if rank == 0:
            print(f"starting at step {completed}", flush=True)
        batches = epoch_after_epoch(loader)
        for step in checkpointer.steps(until=args.steps):
            window = next(batches)
            loss = nn.functional.cross_entropy(
                ddp(window[:, :-1]).flatten(0, 1), window[:, 1:].flatten()
            )
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            if rank == 0 and (step + 1) % 10 == 0:
                print(f"step {step + 1}: loss {loss.item():.9g}", flush=True)
            if checkpointer.preempted:
                break  # close() commits this body

    weights = b"".join(p.detach().numpy().tobytes() for p in ddp.parameters())
    print(f"rank {rank}: weights {hashlib.sha256(weights).hexdigest()[:16]}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
