"""One rank of a real launch: trains, tells how far it is, and at the end what it has.

``SCRIPT BUILDER RUN STAGING UNTIL REPORT``; under torchrun, alone, or as one of several that meet at the
file ``STORE``.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

import lowdiff
from lowdiff.compressors import TopK
from tests.crash.all_trainings import TRAININGS
from tests.crash.lives import digests


def main(*words: str) -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("builder")
    parser.add_argument("run")
    parser.add_argument("staging")
    parser.add_argument("until", type=int)
    parser.add_argument("report", type=Path)
    args = parser.parse_args(words)
    torch.set_num_threads(1)
    rank, world_size = (int(os.environ.get(k, d)) for k, d in (("RANK", "0"), ("WORLD_SIZE", "1")))
    if "STORE" in os.environ:
        store = dist.FileStore(os.environ["STORE"], world_size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    elif "RANK" in os.environ:
        dist.init_process_group("gloo")
    torch.manual_seed(17)
    random.seed(17)
    np.random.seed(17)
    made = TRAININGS[args.builder](rank, world_size)
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
            line = {"step": step, "loss": float(loss.detach()).hex()}
            print(json.dumps(line), file=report, flush=True)
        print(json.dumps({"state": digests(made)}), file=report, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
