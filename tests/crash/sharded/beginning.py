"""One rank of a training that begins with a ``torch.distributed.checkpoint`` folder; it may kill itself.

Without lowdiff it trains from the start, and leaves the folder on its way.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import lowdiff
from tests.crash.sharded.training import OPTIMIZERS, batch, build, digest, join

#: Steps of the training that leaves the folder.
BEFORE = 3


def main(rank: str, world_size: str, life: str, folder: str, kind: str, dies_at: str) -> None:
    """Train to the tenth step, and leave a line with the digest of each."""
    place, number, ranks = Path(folder), int(rank), int(world_size)
    torch.set_num_threads(1)
    join(number, ranks, place / f"store-{life}")
    model = build(kind, ranks, frozenset())
    optimizer = OPTIMIZERS["foreach"](model.parameters())
    report = (place / f"{life}.{number}").open("a", buffering=1)

    def train(step: int) -> None:
        optimizer.zero_grad()
        model(batch(kind, step, 0, number)).square().mean().backward()
        if step == int(dies_at) and number == ranks - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.step()
        report.write(json.dumps([step, digest(model, optimizer)]) + "\n")

    def ended() -> None:
        dist.barrier()
        sys.stdout.flush()
        os._exit(0)

    if life == "plain":
        for step in range(BEFORE + 7):
            if step == BEFORE:
                parts = get_state_dict(model, optimizer)
                dcp.save(
                    dict(zip(("model", "optimizer"), parts, strict=True)),
                    checkpoint_id=place / "dcp",
                )
            train(step)
        ended()
    # As docs/sharded.md shows it.
    parts = get_state_dict(model, optimizer)
    dcp.load(dict(zip(("model", "optimizer"), parts, strict=True)), checkpoint_id=place / "dcp")
    set_state_dict(model, optimizer, model_state_dict=parts[0], optim_state_dict=parts[1])
    checkpointer = lowdiff.Checkpointer(place / "run", snapshot_every=4, staging=place / "staging")
    resumed = checkpointer.attach(model, optimizer)
    report.write(json.dumps(["resumed", resumed]) + "\n")
    for step in checkpointer.steps(7):
        train(BEFORE + step)
    checkpointer.close()
    ended()
