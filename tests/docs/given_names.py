"""What the snippets of docs/ take as given: a run in ``runs/gpt``, and objects to attach."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading

import torch
from torch import nn

import lowdiff
from lowdiff.compressors import PowerSGD, TopK  # noqa: F401 - snippets use it

ddp_model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 1))
optimizer = torch.optim.AdamW(ddp_model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=20)


class Lion(torch.optim.SGD):
    """An optimizer of a third party."""


def train(checkpointer: lowdiff.Checkpointer, until: int) -> None:
    """A usual loop."""
    checkpointer.attach(ddp_model, optimizer, scheduler=scheduler)
    for _ in checkpointer.steps(until=until):
        optimizer.zero_grad()
        ddp_model(torch.randn(16, 8)).square().mean().backward()
        optimizer.step()
        scheduler.step()


with lowdiff.Checkpointer("runs/gpt", compressor=TopK(density=0.1), snapshot_every=20) as made:
    train(made, until=50)
    made.keep(45, label="best")

if "operations" in sys.argv[1]:  # its snippets belong to a training that goes on
    checkpointer = lowdiff.Checkpointer("runs/served", compressor=TopK(density=0.1))
    train(checkpointer, until=5)
    with socket.create_server(("", 0)) as free:
        local_rank = free.getsockname()[1] - 8000
    # The machine is taken away in the middle of the loop that waits for it.
    threading.Timer(2, os.kill, (os.getpid(), signal.SIGTERM)).start()
