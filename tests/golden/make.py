"""Make the golden run of this format version: ``python -m tests.golden.make FOLDER``.

A few steps of a tiny training with everything that the format knows of: top-k gradients with error
feedback, snapshots, sealed segments, an average, a step around which something else than the
optimizer writes, and one that cannot be replayed. Learning rate, momentum and decay are powers of two, so that no processor and no
torch rounds a product in another way. ``states.json`` says what the live objects were after each step.

Made once for each version and never again: later versions of lowdiff show with it what they read. Runs of
other versions of PyTorch have the same states.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import lowdiff
from lowdiff.compressors import TopK

STEPS = 6
#: Around this step something writes to a weight.
WRITTEN = 3
#: After this step something writes to the average, so that only a snapshot leads to it.
CHANGED = 5


def sha256(model: dict[str, Any], optimizer: dict[str, Any], average: dict[str, Any]) -> str:
    """Of every tensor of three state dicts, with its name and type."""
    found = hashlib.sha256()
    momenta = {f"momentum.{i}": state["momentum_buffer"] for i, state in optimizer["state"].items()}
    for part in (model, momenta, average):
        for name, tensor in sorted(part.items()):
            found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
            found.update(tensor.detach().contiguous().numpy().tobytes())
    return found.hexdigest()


def make(folder: Path) -> None:
    """Train, and leave the run folder and the digests of its states."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    states = {}
    with tempfile.TemporaryDirectory() as staging:
        checkpointer = lowdiff.Checkpointer(
            folder / "run",
            staging=staging,
            compressor=TopK(0.25, dense_below=8),
            snapshot_every=1000,
            batch_size=2,
            retention=None,
        )
        with checkpointer:
            checkpointer.attach(model, optimizer, average=average)
            states[0] = sha256(model.state_dict(), optimizer.state_dict(), average.state_dict())
            for step in checkpointer.steps(STEPS):
                _train(model, optimizer, average, step + 1)
                states[step + 1] = sha256(
                    model.state_dict(), optimizer.state_dict(), average.state_dict()
                )
    shutil.rmtree(folder / "run" / "locks")
    shutil.rmtree(folder / "run" / "measurements", ignore_errors=True)
    (folder / "states.json").write_text(json.dumps(states, indent=1) + "\n")


def _train(
    model: nn.Module, optimizer: torch.optim.Optimizer, average: AveragedModel, step: int
) -> None:
    optimizer.zero_grad()
    inputs = torch.linspace(-1, step, 60).view(10, 6)
    model(inputs).pow(2).mean().backward()
    weight = model.get_parameter("0.weight")
    with torch.no_grad():
        if step == WRITTEN:
            weight.mul_(0.5)
        optimizer.step()
        if step == WRITTEN:
            weight.clamp_(-0.25, 0.25)
    average.update_parameters(model)
    if step == CHANGED:
        with torch.no_grad():
            average.get_parameter("module.2.weight").zero_()


if __name__ == "__main__":
    make(Path(sys.argv[1]))
