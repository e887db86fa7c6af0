"""One rank of a model, sharded over all ranks, that loads a ``torch.distributed.checkpoint`` folder."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from tests.crash.sharded.training import build, gathered, join


def main(rank: str, world_size: str, folder: str, kind: str) -> None:
    """Load it, and say whether it holds what `training.whole` left."""
    place = Path(folder)
    join(int(rank), int(world_size), place / "store-loading")
    model = build(kind, int(world_size), frozenset())
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=place / "exported")
    expected = torch.load(place / "whole.pt")["model"]
    same = all(torch.equal(gathered(v), expected[name]) for name, v in model.state_dict().items())
    sys.stdout.write(f"same: {same}\n")
    sys.stdout.flush()
    dist.barrier()
    os._exit(0)
