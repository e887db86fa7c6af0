"""Restart of all ranks by torchrun: those that live save the state before they end.

torchrun --standalone --nproc-per-node=2 --max-restarts=3 examples/restart_torchrun.py runs/restarted
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import lowdiff


def main(run: str) -> None:
    """Train or resume."""
    # torchrun's store keeps the addresses of the attempt before, so each attempt looks at names of its own.
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    attempt = f"attempt-{os.environ['TORCHELASTIC_RESTART_COUNT']}"
    store = dist.PrefixStore(attempt, dist.TCPStore(host, port, is_master=False))
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 1)))
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=3e-3)
    # A hang ends the process once the state is saved; torchrun sees that and starts all anew.
    with lowdiff.Checkpointer(run, strategy="survivors", on_hang="exit") as checkpointer:
        print(f"starting at step {checkpointer.attach(ddp, optimizer)}", flush=True)
        for step in checkpointer.steps(until=2000):
            batch = torch.randn(50, 32, generator=torch.Generator().manual_seed(2 * step + rank))
            loss = nn.functional.mse_loss(ddp(batch), batch.cos().sum(1, keepdim=True))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if (step + 1) % 100 == 0 and rank == 0:
                print(f"step {step + 1}: loss {loss.item():.9g}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
