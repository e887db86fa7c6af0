"""One rank of a training whose nodes are lost: ``RANK WORLD_SIZE STORE FOLDER UNTIL STRATEGY`` and more.

It appends a line of JSON for every step to ``FOLDER/report.RANK``, with the digest of the state and
the newest step that all copies have. What a rank alone has is in a digest of its own: generators and
buffers that DDP takes from rank 0.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils._pytree import tree_map

import lowdiff
from lowdiff import compressors
from lowdiff.errors import LowDiffError
from lowdiff.model.sharding import local_of
from tests.crash.launch.survivor import digest
from tests.crash.lives import as_from_an_accelerator
from tests.crash.trainings import batch, wrapped

#: What a Checkpointer is told. A log that is never full makes nothing durable between two snapshots.
STRATEGIES: dict[str, dict[str, Any]] = {
    "cast": {"compressor": compressors.Cast(), "batch_size": 64},
    "topk": {"compressor": compressors.TopK(0.1), "batch_size": 64},
    "replicated": {
        "compressor": compressors.TopK(0.1),
        "batch_size": 64,
        "residual": "replicated",
    },
    "gradients": {"strategy": "gradients", "reproducible": True},
    "replica": {"strategy": "replica", "reproducible": True},
    # Parameters are sharded (FSDP2), so gradients and images are sent.
    "sharded": {"strategy": "replica"},
}
#: Exit status of a rank that lowdiff refused, and of one whose peers are gone.
REFUSED, ALONE = 4, 3
SNAPSHOT_EVERY = 6


def main(*words: str) -> int:
    """Train until a step, and say at each which steps are replicated."""
    parser = argparse.ArgumentParser()
    for name, kind in (
        ("rank", int),
        ("world_size", int),
        ("store", str),
        ("folder", Path),
        ("until", int),
        ("strategy", str),
        ("run", Path),
    ):
        parser.add_argument(name, type=kind)
    parser.add_argument("--copies", type=int, default=2)
    parser.add_argument("--step-seconds", type=float, default=0.0)
    parser.add_argument("--engine", choices=["host", "late"], default="host")
    args = parser.parse_args(words)
    logging.basicConfig(level=logging.WARNING)
    torch.set_num_threads(1)
    rank, size = args.rank, args.world_size
    dist.init_process_group(
        "gloo", store=dist.FileStore(args.store, size), rank=rank, world_size=size
    )
    torch.manual_seed(17)
    net = nn.Sequential(nn.Linear(30, 40), nn.BatchNorm1d(40), nn.ReLU(), nn.Linear(40, 5))
    torch.manual_seed(100 + rank)
    model: nn.Module = net
    if args.strategy == "sharded":
        fully_shard(net)
    else:
        model = wrapped(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9)
    checkpointer = lowdiff.Checkpointer(
        args.run,
        **STRATEGIES[args.strategy],
        copies=args.copies,
        snapshot_every=SNAPSHOT_EVERY,
    )
    report = os.open(args.folder / f"report.{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def tell(word: str, step: int) -> None:
        own = [torch.get_rng_state(), dict(net.named_buffers())]
        is_first = rank == 0 and args.strategy != "sharded"
        model_state = net.state_dict() if is_first else dict(net.named_parameters())
        state = {
            "model": {name: local_of(value).detach() for name, value in model_state.items()},
            "optimizer": tree_map(local_of, optimizer.state_dict()),
            "scheduler": scheduler.state_dict(),
        }
        stats = checkpointer.stats()
        line = {
            "word": word,
            "step": step,
            "state": digest(state),
            "own": digest(own),
            "replicated": stats.get("replicated_step", -1),
            "durable": stats["durable_step"],
            "pid": os.getpid(),
        }
        os.write(report, json.dumps(line).encode() + b"\n")

    around = as_from_an_accelerator(rank) if args.engine == "late" else nullcontext()
    try:
        with around, checkpointer:
            resumed = checkpointer.attach(model, optimizer, scheduler=scheduler)
            tell("resumed", resumed)
            for step in checkpointer.steps(args.until):
                loss = model(batch(step, rank, 16, 30)).square().mean()
                torch.rand(1)  # each rank has used its own generator in each step
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                scheduler.step()
                tell("made", step + 1)
                time.sleep(args.step_seconds)
    except (RuntimeError, LowDiffError) as error:
        sys.stdout.write(f"{type(error).__name__}: {error}\n")
        return REFUSED if isinstance(error, LowDiffError) else ALONE
    return 0
