"""What strategy survivors takes of the training thread, in one process of ``bench_survivors``.

    torchrun --nproc-per-node=N -m benches.survivors_share FOLDER STAGING STEPS [--smoke]

Each rank leaves its steps in ``FOLDER/share.RANK``.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import lowdiff
from benches.gpt import GPT, GPTConfig
from lowdiff.commit.session import Session

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
        cpu_seconds: Processor time of the training thread in the step.
        own_cpu_seconds: Of this, in lowdiff's hooks and ``commit()``.
    """

    seconds: float
    hooks_seconds: float
    commit_seconds: float
    cpu_seconds: float
    own_cpu_seconds: float


def share_of(steps: Sequence[Share]) -> float:
    """Time in lowdiff's code over the time of all steps."""
    own = sum(step.hooks_seconds + step.commit_seconds for step in steps)
    return own / sum(step.seconds for step in steps)


def cpu_share_of(steps: Sequence[Share]) -> float:
    """The same of the training thread's processor time, which other work on the machine moves less."""
    return sum(step.own_cpu_seconds for step in steps) / sum(step.cpu_seconds for step in steps)


@dataclass(slots=True)
class Spent:
    """Time in some functions so far."""

    seconds: float = 0.0
    cpu_seconds: float = 0.0

    def counted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, of which each call counts."""

        @functools.wraps(function)
        def call(*arguments: Any) -> Any:
            began, cpu_began = time.perf_counter(), time.thread_time()
            try:
                return function(*arguments)
            finally:
                self.seconds += time.perf_counter() - began
                self.cpu_seconds += time.thread_time() - cpu_began

        return call


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
    # Whole, with what lies around the parts that `training_thread_seconds` counts.
    hooks, commits = Spent(), Spent()
    for name in ("before_optimizer", "after_optimizer"):
        setattr(Session, name, hooks.counted(getattr(Session, name)))
    commit = commits.counted(checkpointer.commit)
    found = []
    with checkpointer:
        checkpointer.attach(model, optimizer, scheduler=scheduler)
        for _ in range(_WARM_UP_STEPS + num_steps):
            before = hooks.seconds, commits.seconds, hooks.cpu_seconds + commits.cpu_seconds
            began, cpu_began = time.perf_counter(), time.thread_time()
            tokens = torch.randint(config.vocabulary, (ROWS, config.context + 1))
            optimizer.zero_grad()
            model(tokens[:, :-1], tokens[:, 1:]).backward()
            optimizer.step()
            scheduler.step()
            commit()
            found.append(
                Share(
                    seconds=time.perf_counter() - began,
                    hooks_seconds=hooks.seconds - before[0],
                    commit_seconds=commits.seconds - before[1],
                    cpu_seconds=time.thread_time() - cpu_began,
                    own_cpu_seconds=hooks.cpu_seconds + commits.cpu_seconds - before[2],
                )
            )
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
