"""Restart in place: a rank that dies is replaced by a spare; the others keep process, imports and data.

python -m lowdiff.integrations.nvrx --processes 3 examples/restart_in_place.py runs/in-place     # 2 and a spare
"""

from __future__ import annotations

import sys

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import lowdiff
from lowdiff.integrations import nvrx


@nvrx.restartable(world_size=2, hang_seconds=120)
def train(attempt: nvrx.Attempt, run: str, inputs: torch.Tensor) -> None:
    """Make everything anew that a failure may have broken; `attach` finds the state."""
    attempt.init_process_group("gloo")
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 1)))
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=3e-3)
    with lowdiff.Checkpointer(run, strategy="survivors") as checkpointer:
        print(f"starting at step {checkpointer.attach(ddp, optimizer)}", flush=True)
        for step in checkpointer.steps(until=2000):
            batch = inputs[step % 10 + 10 * attempt.rank :: 20]
            loss = nn.functional.mse_loss(ddp(batch), batch.cos().sum(1, keepdim=True))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if (step + 1) % 100 == 0 and attempt.rank == 0:
                print(f"step {step + 1}: loss {loss.item():.9g}", flush=True)


if __name__ == "__main__":
    train(sys.argv[1], torch.randn(1000, 32, generator=torch.Generator().manual_seed(0)))
