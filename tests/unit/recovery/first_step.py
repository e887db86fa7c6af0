"""Trains two steps in a fresh process and rebuilds the first one: what a process of a test runs."""

from __future__ import annotations

from pathlib import Path

import torch

import lowdiff
from lowdiff.compressors import TopK


def main(place: str) -> None:
    """Fail if the first optimizer step of this process cannot be replayed bit for bit.

    Args:
        place: Folder of its run.
    """
    folder = Path(place)
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(20, 6000), torch.nn.ReLU(), torch.nn.Linear(6000, 3)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with lowdiff.Checkpointer(
        folder / "run", staging=folder / "staging", compressor=TopK(0.9), retention=None
    ) as checkpointer:
        checkpointer.attach(model, optimizer)
        for _ in checkpointer.steps(2):
            optimizer.zero_grad()
            model(torch.randn(8, 20)).square().mean().backward()
            optimizer.step()
    lowdiff.recover(folder / "run", 1, staging=folder / "staging")
