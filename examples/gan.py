"""Two networks, two optimizers, one run: a GAN that learns the points of a ring.

python examples/gan.py runs/gan
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence

import torch
from torch import nn

import lowdiff
from lowdiff.compressors import TopK


def points_on_a_ring(count: int) -> torch.Tensor:
    """Return real data, ``[count, 2]``, drawn from the global generator, which attach restores."""
    angle = 2 * math.pi * torch.rand(count)
    return torch.stack([angle.cos(), angle.sin()], dim=1)


def main(argv: Sequence[str] | None = None) -> dict[int, float]:
    """Train or resume; return the discriminator's loss of each step of this process."""
    parser = argparse.ArgumentParser()
    parser.add_argument("run", help="folder of the run")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--staging", help="folder in memory (tmpfs); by default in /dev/shm")
    args = parser.parse_args(argv)

    torch.manual_seed(0)
    # One module for attach: both networks share the run's steps.
    both = nn.ModuleDict(
        {
            "generator": nn.Sequential(nn.Linear(8, 128), nn.ReLU(), nn.Linear(128, 2)),
            "discriminator": nn.Sequential(nn.Linear(2, 128), nn.ReLU(), nn.Linear(128, 1)),
        }
    )
    generator, discriminator = both["generator"], both["discriminator"]
    adams = [torch.optim.Adam(part.parameters(), lr=1e-3) for part in (generator, discriminator)]
    judge = nn.functional.binary_cross_entropy_with_logits
    losses = {}

    with lowdiff.Checkpointer(
        args.run, compressor=TopK(density=0.1), staging=args.staging
    ) as checkpointer:
        print(f"starting at step {checkpointer.attach(both, adams)}", flush=True)
        for step in checkpointer.steps(until=args.steps):
            # One body is one step: both networks are updated in turn.
            fake = generator(torch.randn(64, 8))
            real_score, fake_score = (
                discriminator(points_on_a_ring(64)),
                discriminator(fake.detach()),
            )
            loss = judge(real_score, torch.ones(64, 1)) + judge(fake_score, torch.zeros(64, 1))
            both.zero_grad()
            loss.backward()
            adams[1].step()

            discriminator.requires_grad_(False)  # in this turn it only passes gradients on
            both.zero_grad()
            judge(discriminator(fake), torch.ones(64, 1)).backward()
            adams[0].step()
            discriminator.requires_grad_(True)

            losses[step + 1] = loss.item()
            print(f"step {step + 1}: loss {loss.item():.9g}", flush=True)
    return losses


if __name__ == "__main__":
    main()
