"""One rank of a real launch: trains, tells how far it is, and at the end what it has.

``SCRIPT BUILDER RUN STAGING UNTIL REPORT [--die-at STEP]``; under torchrun or alone.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

import lowdiff
from lowdiff.compressors import TopK
from tests.scenarios import more_trainings, trainings
from tests.scenarios.lives import digests


def join() -> int:
    """Join the other ranks.

    The store's keys carry the attempt: torchrun --max-restarts starts the workers again with the
    same store, and Gloo would find the addresses of the dead ones in it.
    """
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        world_size,
        is_master=rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True",
    )
    prefixed = dist.PrefixStore(f"attempt-{attempt}", store)
    dist.init_process_group("gloo", store=prefixed, rank=rank, world_size=world_size)
    return int(attempt)


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("builder")
    parser.add_argument("run")
    parser.add_argument("staging")
    parser.add_argument("until", type=int)
    parser.add_argument("report", type=Path)
    parser.add_argument("--die-at", type=int, help="rank 1 kills itself in this step, once")
    args = parser.parse_args()
    torch.set_num_threads(1)
    attempt = join() if "RANK" in os.environ else 0
    rank = int(os.environ.get("RANK", "0"))
    torch.manual_seed(17)
    random.seed(17)
    np.random.seed(17)
    build = getattr(more_trainings, args.builder, None) or getattr(trainings, args.builder)
    made = build(rank, int(os.environ.get("WORLD_SIZE", "1")))
    checkpointer = lowdiff.Checkpointer(
        args.run,
        compressor=TopK(0.05, dense_below=64),
        snapshot_every=7,
        batch_size=3,
        staging=args.staging,
    )
    with checkpointer, args.report.with_suffix(f".{rank}").open("a") as report:
        resumed = checkpointer.attach(made.model, made.optimizer, **made.stateful)
        print(json.dumps({"resumed": resumed}), file=report, flush=True)
        for step in checkpointer.steps(args.until):
            loss = made.step(step)
            if args.die_at == step and attempt == 0 and rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            line = {"step": step, "loss": float(loss.detach()).hex()}
            print(json.dumps(line), file=report, flush=True)
        print(json.dumps({"state": digests(made)}), file=report, flush=True)


if __name__ == "__main__":
    main()
