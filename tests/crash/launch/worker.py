"""One rank of a real launch: trains, tells how far it is, and at the end what it has.

``SCRIPT BUILDER RUN STAGING UNTIL REPORT``; under torchrun or alone.
"""

from __future__ import annotations

import argparse
import json
import os
import random
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

import lowdiff
from lowdiff.compressors import TopK
from tests.crash.all_trainings import TRAININGS
from tests.crash.lives import digests


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("builder")
    parser.add_argument("run")
    parser.add_argument("staging")
    parser.add_argument("until", type=int)
    parser.add_argument("report", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    rank = int(os.environ.get("RANK", "0"))
    torch.manual_seed(17)
    random.seed(17)
    np.random.seed(17)
    made = TRAININGS[args.builder](rank, int(os.environ.get("WORLD_SIZE", "1")))
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
    main()
