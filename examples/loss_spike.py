"""A run goes wrong at one step; the timeline shows the step, and a new run starts before it.

python examples/loss_spike.py runs/spike                        # a bad batch at step 800
lowdiff timeline runs/spike --out spike.png                     # which step was it?
lowdiff recover runs/spike --step 799 --as-run runs/healed
python examples/loss_spike.py runs/healed --skip 800            # the same, without that batch
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

import lowdiff
from lowdiff.compressors import TopK


def batch_of(step: int, spike_step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the batch that leads to ``step``, a function of the step; one of them is broken."""
    generator = torch.Generator().manual_seed(abs(step) + (1 << 32) * (step < 0))
    x = torch.randn(32, 16, generator=generator)
    y = torch.sin(3 * x[:, :1]) + x[:, 1:2] * x[:, 2:3]
    return (x, 1e4 * y) if step == spike_step else (x, y)  # data in a wrong unit


def main(argv: Sequence[str] | None = None) -> list[float]:
    """Train, and return the loss of every step of this process."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("run", type=Path, help="folder of the run")
    parser.add_argument("--spike-step", type=int, default=800)
    parser.add_argument("--until", type=int, default=850)
    parser.add_argument("--skip", type=int, default=None, help="step to feed another batch")
    parser.add_argument("--staging", type=Path, default=None)
    args = parser.parse_args(argv)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = nn.Sequential(
        nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    losses = []
    with lowdiff.Checkpointer(
        args.run,
        compressor=TopK(density=0.1, dense_below=256),
        snapshot_every=100,
        staging=args.staging,
        retention=None,  # keep every step, to be able to return to any of them
    ) as checkpointer:
        checkpointer.attach(model, optimizer)
        for done in checkpointer.steps(until=args.until):
            step = done + 1
            x, y = batch_of(-step if step == args.skip else step, args.spike_step)
            loss = nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    if losses:
        tail = losses[-20:]
        print(
            f"steps to {args.until}: mean loss of the last {len(tail)}: {sum(tail) / len(tail):.4g}"
        )
    return losses


if __name__ == "__main__":
    main()
