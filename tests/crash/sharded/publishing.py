"""One rank of a training that is followed and published: rank 0 compares every step with its model, gathered."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import lowdiff
from lowdiff.compressors import TopK
from lowdiff.recovery import Follower
from lowdiff.testing import wait_until
from tests.crash.sharded.training import batch, build, gathered, join

STEPS = 5


def is_published(step: int, stats: dict[str, Any]) -> bool:
    """Whether a step's version is there."""
    return bool(stats["published_step"] == step)


def main(*words: str) -> None:
    """Train a few steps: rank, world size, folder, and what `build` makes."""
    rank, world_size, place, kind = int(words[0]), int(words[1]), Path(words[2]), words[3]
    join(rank, world_size, place / "store")
    model = build(kind, world_size, frozenset())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    target = place / "target"
    settings: dict[str, Any] = {"compressor": TopK(0.2)} if kind == "ddp" else {}
    subscriber = lowdiff.Subscriber(target)
    follower = Follower(place / "run", staging=place / "staging")
    with lowdiff.Checkpointer(
        place / "run",
        staging=place / "staging",
        publish=lowdiff.Publisher(target, anchor_every=3),
        **settings,
    ) as checkpointer:
        checkpointer.attach(model, optimizer)
        for step in range(STEPS):
            optimizer.zero_grad()
            model(batch(kind, step, 0, rank)).square().mean().backward()
            optimizer.step()
            checkpointer.commit()
            bare = model.module if isinstance(model, DistributedDataParallel) else model
            whole = {name: gathered(tensor) for name, tensor in bare.state_dict().items()}
            if rank == 0:
                wait_until(checkpointer, partial(is_published, step + 1))
                version = subscriber.newest()
                assert version is not None
                assert version.step == step + 1
                found = version.state_dict()
                assert found.keys() == whole.keys()
                while follower.step < step + 1:
                    follower.look()
                followed = follower.state.model_state_dict()
                for name, tensor in whole.items():
                    assert torch.equal(found[name], tensor.bfloat16()), name
                    assert torch.equal(followed[name], tensor), name
            else:
                assert "published_step" not in checkpointer.stats()
            dist.barrier()
