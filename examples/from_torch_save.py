"""From ``torch.save`` every few hundred steps to lowdiff at every step, and back.

python examples/from_torch_save.py runs/moved --old checkpoint.pt    # goes on where the file stops
lowdiff recover runs/moved --out checkpoint.pt --force               # the same keys; "step" is the run's own

``old_training`` is a script with ``torch.save``. In ``main``, comments mark the new lines.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

import lowdiff


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the data of the step after ``step``."""
    x = torch.randn(64, 32, generator=torch.Generator().manual_seed(step))
    return x, x.sin().sum(1, keepdim=True)


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a fresh model and optimizer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Dropout(0.1), nn.Linear(128, 1))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


def old_training(file: Path, steps: int = 20) -> None:
    """Save a checkpoint now and then; steps after the last one are lost with the process."""
    model, optimizer = build()
    for step in range(steps):
        x, y = batch(step)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": steps}
    torch.save(state, file)


def main(argv: Sequence[str] | None = None) -> dict[int, float]:
    """Train or resume; return the loss of every step that this process made."""
    parser = argparse.ArgumentParser()
    parser.add_argument("run", help="folder of the run")
    parser.add_argument("--old", type=Path, required=True, help="a file of torch.save")
    parser.add_argument("--steps", type=int, default=2000, help="on top of those of the file")
    parser.add_argument("--staging", help="folder in memory (tmpfs); by default in /dev/shm")
    args = parser.parse_args(argv)
    if not args.old.exists():
        old_training(args.old)

    model, optimizer = build()
    old = torch.load(args.old, weights_only=True)
    model.load_state_dict(old["model"])
    optimizer.load_state_dict(old["optimizer"])

    losses = {}
    # Without a compressor, the numerics of the training are unchanged (docs/lowdiff_plus.md).
    with lowdiff.Checkpointer(args.run, staging=args.staging) as checkpointer:  # new
        # A new run begins with the loaded state; a run with history replaces the loaded state.
        print(f"starting at step {checkpointer.attach(model, optimizer)}", flush=True)  # new
        for done in checkpointer.steps(until=args.steps):  # was: for step in range(...)
            step = old["step"] + done  # the run counts its own steps from 0
            x, y = batch(step)
            loss = nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses[step + 1] = loss.item()
            print(f"step {step + 1}: loss {loss.item():.9g}", flush=True)
    return losses  # gone: if step % 500 == 0: torch.save(...)


if __name__ == "__main__":
    main()
