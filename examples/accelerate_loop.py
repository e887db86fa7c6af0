"""Hugging Face accelerate: call ``prepare`` as usual, then hand what it returned to ``LowDiffRun``.

accelerate launch --cpu --num_processes 2 examples/accelerate_loop.py runs/accelerate
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lowdiff.compressors import TopK
from lowdiff.integrations.accelerate import LowDiffRun


def main(argv: Sequence[str] | None = None) -> dict[int, float]:
    """Train or resume; return the loss of every step that this process made."""
    parser = argparse.ArgumentParser()
    parser.add_argument("run", help="folder of the run")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--staging", help="folder in memory (tmpfs); by default in /dev/shm")
    args = parser.parse_args(argv)

    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    inputs = torch.randn(1000, 32)
    dataset = TensorDataset(inputs, inputs.cos().sum(1, keepdim=True))
    model = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Dropout(0.1), nn.Linear(128, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=500, gamma=0.5)
    loader = DataLoader(dataset, batch_size=32, shuffle=True)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

    settings = {"compressor": TopK(density=0.05), "staging": args.staging}
    losses: dict[int, float] = {}
    with LowDiffRun(accelerator, args.run, model, optimizer, loader, scheduler, **settings) as run:
        accelerator.print(f"starting at step {run.step}")
        step = run.step
        for _ in run.epochs(args.steps):
            # A resumed epoch goes on in its middle.
            for batch, (features, targets) in enumerate(loader, start=run.consumed):
                if step == args.steps:
                    break
                loss = nn.functional.mse_loss(model(features), targets)
                optimizer.zero_grad()
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                step += 1
                losses[step] = loss.item()
                accelerator.print(f"step {step}: loss {loss.item():.9g}")
                if batch + 1 == len(loader):
                    accelerator.print(f"epoch {run.epoch + 1} ends")
            if step == args.steps:
                break
    accelerator.end_training()
    return losses


if __name__ == "__main__":
    main()
