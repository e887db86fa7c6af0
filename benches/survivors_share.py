"""What strategy survivors takes of the training thread, in one process of ``bench_survivors``.

    torchrun --nproc-per-node=N -m benches.survivors_share FOLDER STAGING STEPS [--smoke]

Each rank leaves its steps in ``FOLDER/share.RANK``.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import lowdiff
from benches.gpt import GPT, GPTConfig

#: 10.7 million parameters; with this batch a step of two ranks on two cores takes more than 0.3 s.
MODEL = GPTConfig(layers=6, heads=6, width=384)
SMOKE_MODEL = GPTConfig(layers=2, heads=2, width=64)
ROWS = 8
_WARM_UP_STEPS = 5
_NEVER = 1 << 40


@dataclass(frozen=True, slots=True)
class Share:
    """One step of one rank.

    Attributes:
        seconds: The whole step.
        hooks_seconds: Of these, what lowdiff's hooks took in ``optimizer.step()``.
        commit_seconds: What ``commit()`` took.
    """

    seconds: float
    hooks_seconds: float
    commit_seconds: float


def share_of(steps: Sequence[Share]) -> float:
    """Time in lowdiff's code over the time of all steps."""
    own = sum(step.hooks_seconds + step.commit_seconds for step in steps)
    return own / sum(step.seconds for step in steps)


def measure(folder: Path, staging: Path, num_steps: int, *, smoke: bool) -> None:
    """Train, and write what each step took."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // world_size))
    dist.init_process_group("gloo")
    config = SMOKE_MODEL if smoke else MODEL
    torch.manual_seed(0)
    gpt = GPT(config)
    model = DistributedDataParallel(gpt) if world_size > 1 else gpt
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 100)
    checkpointer = lowdiff.Checkpointer(
        folder / f"run-{world_size}", strategy="survivors", staging=staging, snapshot_every=_NEVER
    )
    found = []
    with checkpointer:
        checkpointer.attach(model, optimizer, scheduler=scheduler)
        for _ in range(_WARM_UP_STEPS + num_steps):
            began = time.perf_counter()
            tokens = torch.randint(config.vocabulary, (ROWS, config.context + 1))
            optimizer.zero_grad()
            model(tokens[:, :-1], tokens[:, 1:]).backward()
            stepping = time.perf_counter()
            before = checkpointer.stats()["training_thread_seconds"]
            looked = time.perf_counter() - stepping
            optimizer.step()
            after = checkpointer.stats()["training_thread_seconds"]
            scheduler.step()
            committing = time.perf_counter()
            # Whole, with what lies around the parts that `training_thread_seconds` counts.
            checkpointer.commit()
            ended = time.perf_counter()
            found.append(Share(ended - began - 2 * looked, after - before, ended - committing))
    steps = [asdict(share) for share in found[_WARM_UP_STEPS:]]
    (folder / f"share.{rank}").write_text(json.dumps(steps))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("staging", type=Path)
    parser.add_argument("steps", type=int)
    parser.add_argument("--smoke", action="store_true")
    asked = parser.parse_args()
    measure(asked.folder, asked.staging, asked.steps, smoke=asked.smoke)
