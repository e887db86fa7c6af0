"""One life of a training with an optimizer of a third party; it may end by its own SIGKILL.

``KIND FOLDER UNTIL DIES STRATEGY``: writes a digest of parameters and
optimizer state after every step to ``FOLDER/digests``, a line each.
"""

from __future__ import annotations

import hashlib
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

import lowdiff
from lowdiff.compressors import TopK
from lowdiff.persistence.format.values import encode
from tests.crash import third_party


def model() -> nn.Module:
    """Two matrices: one that blocks cut, and a small one."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(20, 60, bias=False), nn.ReLU(), nn.Linear(60, 12, bias=False))


def made(kind: str, parameters: Any) -> torch.optim.Optimizer:
    """The optimizer that a name stands for; a number after it is when its state comes."""
    name, _, begins = kind.partition("-")
    options = {"begins": int(begins)} if begins else {}
    optimizer: torch.optim.Optimizer = getattr(third_party, name)(list(parameters), **options)
    return optimizer


def digest(weights: Mapping[str, Any], state: Mapping[int, Any]) -> str:
    """Of everything that must have the same bits."""
    # A snapshot does not keep the order in which an optimizer made its entries.
    entries = {p: dict(sorted(own.items())) for p, own in sorted(state.items())}
    return hashlib.sha256(encode([dict(weights), entries])).hexdigest()


def recovered_digest(run: Path, staging: Path, step: int) -> str:
    """The same of what ``recover`` returns."""
    found = lowdiff.recover(run, step, staging=staging)
    return digest(found.model_state_dict(), found.optimizer_state_dict()["state"])


def backward(net: nn.Module, number: int, rank: int = 0) -> None:
    """Gradients of one batch."""
    inputs = torch.randn(8, 20, generator=torch.Generator().manual_seed(100 * number + rank))
    net(inputs).square().mean().backward()


def train(
    kind: str, folder: Path, until: int, *, dies: int = -1, replica: bool = False, **settings: Any
) -> None:
    """Go on to ``until``; dies inside the body of step ``dies``, when its optimizer has stepped."""
    net = model()
    optimizer = made(kind, net.parameters())
    chosen = {"imports": ["tests.crash.registered"]} if replica else {"compressor": TopK(0.2)}
    with lowdiff.Checkpointer(
        folder / "run",
        staging=folder / "staging",
        **{"snapshot_every": 7, "batch_size": 3, "retention": None, **chosen, **settings},
    ) as checkpointer:
        checkpointer.attach(net, optimizer)
        with (folder / "digests").open("a") as lines:
            for number in checkpointer.steps(until):
                optimizer.zero_grad()
                backward(net, number)
                optimizer.step()
                state = optimizer.state_dict()["state"]
                if number + 1 == dies:
                    os.kill(os.getpid(), signal.SIGKILL)
                lines.write(f"{number + 1} {digest(net.state_dict(), state)}\n")
                lines.flush()


def digests(folder: Path) -> dict[int, str]:
    """Step -> digest; a later life's replaces an earlier's."""
    lines = (line.split() for line in (folder / "digests").read_text().splitlines())
    return {int(step): value for step, value in lines}


def main(kind: str, folder: str, until: str, dies: str, strategy: str) -> None:
    """Entry point."""
    torch.set_num_threads(1)
    third_party.register()
    Path(folder).mkdir(parents=True, exist_ok=True)
    train(kind, Path(folder), int(until), dies=int(dies), replica=strategy == "replica")
