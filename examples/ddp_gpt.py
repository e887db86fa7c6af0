"""A small GPT on several processes that survives kill -9; see README.md in this folder.

export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1      # for --max-restarts: docs/getting_started.md
torchrun --standalone --nproc-per-node=2 --max-restarts=3 examples/ddp_gpt.py runs/gpt
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import os
import random
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import lowdiff
from lowdiff.compressors import PowerSGD

CONTEXT = 16


class GPT(nn.Module):
    """Predicts the next byte at every position."""

    def __init__(self, width: int, layers: int = 2) -> None:
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
        """Return logits of shape ``[batch, time, 256]``."""
        x = self.tokens(tokens) + self.positions
        logits: torch.Tensor = self.head(self.blocks(x, mask=self.mask, is_causal=True))
        return logits


def start_process_group() -> torch.device:
    """Use NCCL and reproducible kernels if each process has its own GPU, otherwise Gloo."""
    if torch.cuda.device_count() < int(os.environ["LOCAL_WORLD_SIZE"]):
        dist.init_process_group("gloo")
        return torch.device("cpu")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # the next line requires this
    torch.use_deterministic_algorithms(True)
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    return device


def main() -> None:
    """Train or resume."""
    parser = argparse.ArgumentParser()
    parser.add_argument("run", help="folder of the run")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--detach-after", type=int, help="step after which lowdiff is detached")
    parser.add_argument("--width", type=int, default=32, help="width of the model")
    parser.add_argument("--batch-size", type=int, default=8, help="windows per step and process")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--staging", help="folder in memory (tmpfs); by default in /dev/shm")
    args = parser.parse_args()
    device = start_process_group()
    rank = dist.get_rank()

    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(args.seed + rank)  # different dropout per rank; DDP copies rank 0's weights
    text = torch.tensor(list(Path(__file__).read_bytes()))
    windows = TensorDataset(text.unfold(0, CONTEXT + 1, 1))
    ddp = DistributedDataParallel(GPT(args.width).to(device))
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=3e-3, fused=True)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.steps)

    checkpointer = lowdiff.Checkpointer(
        args.run, compressor=PowerSGD(matrix_rank=4), staging=args.staging
    )
    loader = checkpointer.dataloader(windows, batch_size=args.batch_size)  # resumes its position
    with checkpointer:
        completed = checkpointer.attach(ddp, optimizer, scheduler=scheduler)
        if rank == 0:
            print(f"starting at step {completed}", flush=True)
        batches = (batch for _ in itertools.count() for batch in loader)  # epoch after epoch
        for step in checkpointer.steps(until=args.steps):
            if step == args.detach_after:
                checkpointer.detach()  # the rest is trained without lowdiff, for comparison
            window = next(batches)[0].to(device)
            logits = ddp(window[:, :-1])
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), window[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            if rank == 0:
                print(f"step {step + 1}: loss {loss.item():.9g}", flush=True)
            if checkpointer.preempted:
                break  # close() commits this body

    stats = checkpointer.stats()
    milliseconds = 1000 * stats["training_thread_seconds"] / max(1, stats["steps"])
    weights = b"".join(p.detach().cpu().numpy().tobytes() for p in ddp.parameters())
    digest = hashlib.sha256(weights).hexdigest()[:16]
    print(f"rank {rank}: weights {digest}, lowdiff {milliseconds:.3f} ms a step", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
