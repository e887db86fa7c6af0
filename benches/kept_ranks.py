"""Steps of two ranks that share a machine's cores: without checkpoints, with a replica, with gradients kept.

    torchrun --nproc-per-node=2 -m benches.kept_ranks FOLDER STAGING PAIRS [--smoke]

All arms are in the same processes and take turns in ABBA order. Rank 0 leaves its pairs of seconds in
``FOLDER/pairs.json``. It is a part of ``bench_lowdiff_plus``.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import lowdiff
from benches.gpt import GPT, GPTConfig
from benches.harness import Pair, abba
from lowdiff.persistence.format.values import same

MODEL = GPTConfig(layers=6, heads=6, width=384, dropout=0.0)
SMOKE_MODEL = GPTConfig(layers=2, heads=2, width=64, dropout=0.0)
#: Arms by what a Checkpointer is told; None for no Checkpointer.
ARMS: dict[str, str | None] = {
    "plain": None,
    "twin": None,
    "replica": "replica",
    "gradients": "gradients",
}
_ROWS, _WARM_UP_TURNS = 8, 3
_SNAPSHOT_EVERY = 20


class Trainee:
    """A model in DDP, its optimizer and its Checkpointer."""

    def __init__(self, arm: str, folder: Path, staging: Path, config: GPTConfig) -> None:
        torch.manual_seed(0)
        self.config = config
        self.model = DistributedDataParallel(GPT(config))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.checkpointer: lowdiff.Checkpointer | None = None
        strategy = ARMS[arm]
        if strategy is not None:
            self.checkpointer = lowdiff.Checkpointer(
                folder / arm,
                strategy=strategy,
                staging=staging / arm,
                snapshot_every=_SNAPSHOT_EVERY,
                on_error="raise",
            )
            self.checkpointer.attach(self.model, self.optimizer)

    def step(self, number: int) -> float:
        """Make one step; seconds, of which the ranks begin together."""
        generator = torch.Generator().manual_seed(1000 * number + dist.get_rank())
        tokens = torch.randint(
            self.config.vocabulary, (_ROWS, self.config.context + 1), generator=generator
        )
        dist.barrier()
        began = time.perf_counter()
        self.optimizer.zero_grad()
        self.model(tokens[:, :-1], tokens[:, 1:]).backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        if self.checkpointer is not None:
            self.checkpointer.commit()
        return time.perf_counter() - began


def measure(folder: Path, staging: Path, num_pairs: int, *, smoke: bool) -> None:
    """Take turns, see that all arms trained alike, and write what rank 0 measured."""
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // int(os.environ["WORLD_SIZE"])))
    dist.init_process_group("gloo")
    config = SMOKE_MODEL if smoke else MODEL
    trainees = {arm: Trainee(arm, folder, staging, config) for arm in ARMS}
    pairs: dict[str, list[Pair]] = {arm: [] for arm in ARMS if arm != "plain"}

    numbers = {arm: count() for arm in ARMS}

    def steps_of(arm: str) -> Callable[[], float]:
        return lambda: trainees[arm].step(next(numbers[arm]))

    for number in range(_WARM_UP_TURNS + (num_pairs + 1) // 2):
        for arm in pairs:
            found = list(abba(steps_of(arm), steps_of("plain")))
            if number >= _WARM_UP_TURNS:
                pairs[arm] += found
    # The plain arm is further on, because it is the baseline of all: compare those that made equally many.
    for arm in ("replica", "gradients"):
        for twin, own in zip(
            trainees["twin"].model.parameters(), trainees[arm].model.parameters(), strict=True
        ):
            assert same(twin.detach(), own.detach()), f"{arm} changed training"
    for trainee in trainees.values():
        if trainee.checkpointer is not None:
            trainee.checkpointer.close()
    if dist.get_rank() == 0:
        (folder / "pairs.json").write_text(json.dumps(pairs))
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("staging", type=Path)
    parser.add_argument("pairs", type=int)
    parser.add_argument("--smoke", action="store_true")
    asked = parser.parse_args()
    measure(asked.folder, asked.staging, asked.pairs, smoke=asked.smoke)
