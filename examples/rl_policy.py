"""Reinforcement learning in two processes: one trains a policy, the other samples from the newest version of it.

python examples/rl_policy.py train runs/policy --target runs/policy-weights
python examples/rl_policy.py sample runs/policy-weights

The policy writes eight letters, and is rewarded for each that comes right after the one before it in the alphabet.
"""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Sequence

import torch
from torch import nn

import lowdiff
from lowdiff.compressors import TopK

LETTERS, LENGTH, ROWS = 26, 8, 64


class Policy(nn.Module):
    """Scores of the next letter, by the letter before."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(LETTERS, 64)
        self.body = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, LETTERS))

    def forward(self, letters: torch.Tensor) -> torch.Tensor:
        """Return scores for each row."""
        scores: torch.Tensor = self.body(self.embedding(letters))
        return scores

    def write(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return texts, one a row, and the logarithm of each letter's probability."""
        text = [torch.randint(LETTERS, (ROWS,))]
        chances = []
        for _ in range(LENGTH - 1):
            made = torch.distributions.Categorical(logits=self(text[-1]).float())
            text.append(made.sample())
            chances.append(made.log_prob(text[-1]))
        return torch.stack(text, 1), torch.stack(chances, 1)


def rewards_of(text: torch.Tensor) -> torch.Tensor:
    """Return the reward of each letter but the first."""
    return (text[:, 1:] == (text[:, :-1] + 1) % LETTERS).float()


def digest(weights: dict[str, torch.Tensor]) -> str:
    """Return a few digits that tell weights apart, rounded to bfloat16."""
    bits = (
        weights[name].bfloat16().view(torch.int16).numpy().tobytes() for name in sorted(weights)
    )
    return hashlib.blake2b(b"".join(bits), digest_size=6).hexdigest()


def train(run: str, target: str, steps: int, staging: str | None) -> None:
    """Train by REINFORCE, and publish every step."""
    torch.manual_seed(0)
    policy = Policy()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)
    publisher = lowdiff.Publisher(target, anchor_every=50)
    with lowdiff.Checkpointer(
        run, compressor=TopK(0.1), staging=staging, publish=publisher
    ) as checkpointer:
        checkpointer.attach(policy, optimizer)
        for step in checkpointer.steps(until=steps):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                text, chances = policy.write()
            rewards = rewards_of(text)
            optimizer.zero_grad()
            (-chances * (rewards - rewards.mean())).mean().backward()
            optimizer.step()
            reward = float(rewards.mean())
            print(f"step {step + 1}: reward {reward:.3f} {digest(policy.state_dict())}", flush=True)


def sample(target: str, steps: int) -> None:
    """Sample from each version that comes, until that of the last step."""
    torch.manual_seed(1)
    policy = Policy().bfloat16()
    for version in lowdiff.Subscriber(target, look_seconds=0.05):
        version.apply(policy)
        with torch.no_grad():
            text, _ = policy.write()
        reward = float(rewards_of(text).mean())
        print(f"{version}: reward {reward:.3f} {digest(policy.state_dict())}", flush=True)
        if version.step >= steps:
            break


def main(argv: Sequence[str] | None = None) -> None:
    """Train or sample."""
    parser = argparse.ArgumentParser(description=__doc__)
    kinds = parser.add_subparsers(dest="kind", required=True)
    trainer, sampler = kinds.add_parser("train"), kinds.add_parser("sample")
    trainer.add_argument("run", help="folder of the run")
    trainer.add_argument("--target", required=True, help="folder or URL for the weights")
    trainer.add_argument("--staging", help="folder in memory (tmpfs); by default in /dev/shm")
    sampler.add_argument("target", help="folder or URL of the weights")
    for one in (trainer, sampler):
        one.add_argument("--steps", type=int, default=1000)
    args = parser.parse_args(argv)
    if args.kind == "train":
        train(args.run, args.target, args.steps, args.staging)
    else:
        sample(args.target, args.steps)


if __name__ == "__main__":
    main()
