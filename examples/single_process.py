"""One process, no DDP: a plain loop whose every step survives kill -9.

python examples/single_process.py runs/single        # kill it and start it again: it resumes
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
from torch import nn
from torch.utils.data import TensorDataset

import lowdiff
from lowdiff.compressors import TopK


def main(argv: Sequence[str] | None = None) -> dict[int, float]:
    """Train or resume; return the loss of every step that this process made."""
    parser = argparse.ArgumentParser()
    parser.add_argument("run", help="folder of the run")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--staging", help="folder in memory (tmpfs); by default in /dev/shm")
    args = parser.parse_args(argv)

    torch.manual_seed(0)
    inputs = torch.randn(1000, 32)
    dataset = TensorDataset(inputs, inputs.cos().sum(1, keepdim=True))
    model = nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Dropout(0.1), nn.Linear(256, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=500, gamma=0.5)

    checkpointer = lowdiff.Checkpointer(
        args.run, compressor=TopK(density=0.05), staging=args.staging
    )
    loader = checkpointer.dataloader(dataset, batch_size=32)  # its position is part of each step
    losses = {}
    with checkpointer:
        completed = checkpointer.attach(model, optimizer, scheduler=scheduler)
        print(f"starting at step {completed}", flush=True)
        while completed < args.steps and not checkpointer.preempted:
            begun = checkpointer.batch_of(loader)  # a resumed epoch goes on in its middle
            for batch, (features, targets) in enumerate(loader, start=begun):
                loss = nn.functional.mse_loss(model(features), targets)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                scheduler.step()
                checkpointer.commit()  # from here on, no crash loses this step
                completed += 1
                losses[completed] = loss.item()
                print(f"step {completed}: loss {loss.item():.9g}", flush=True)
                if batch + 1 == len(loader):
                    print(f"epoch {loader.epoch + 1} ends", flush=True)
                if completed == args.steps or checkpointer.preempted:
                    break
    return losses


if __name__ == "__main__":
    main()
