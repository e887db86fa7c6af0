"""A training that is followed while it lives."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import lowdiff
from lowdiff.compressors import TopK
from lowdiff.recovery.compare import has_same_bits
from lowdiff.recovery.follower import Follower
from tests.unit.recovery.training import Model


class Training:
    """A training that makes one step at a time, and may be killed."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.folder = folder
        torch.manual_seed(3)
        self.model = Model()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        if settings.get("strategy") in (None, "log"):
            settings = {"compressor": TopK(0.1, dense_below=8), **settings}
        self.checkpointer = lowdiff.Checkpointer(
            folder / "run", staging=folder / "staging", **{"snapshot_every": 100, **settings}
        )
        self.step = self.checkpointer.attach(self.model, self.optimizer)

    def train(self, count: int = 1) -> None:
        for _ in range(count):
            self.optimizer.zero_grad()
            batch = torch.randn(8, 24)
            self.model(batch).square().mean().backward()
            self.optimizer.step()
            self.checkpointer.commit()
            self.step += 1

    def wait_for_snapshot(self, step: int) -> None:
        lowdiff.testing.wait_until(
            self.checkpointer, lambda stats: stats["durable_snapshot"] >= step
        )

    def follow(self, **settings: Any) -> Follower:
        return Follower(self.folder / "run", staging=self.folder / "staging", **settings)

    def assert_followed(self, follower: Follower) -> None:
        assert follower.step == self.step
        found = follower.state.model_state_dict()
        for name, tensor in self.model.state_dict().items():
            assert has_same_bits(found[name], tensor), name
        kept = follower.state.optimizer_state_dict()["state"]
        for index, entries in self.optimizer.state_dict()["state"].items():
            for key, value in entries.items():
                assert has_same_bits(kept[index][key], value), key


@contextmanager
def training(folder: Path, **settings: Any) -> Iterator[Training]:
    made = Training(folder, **settings)
    try:
        yield made
    finally:
        made.checkpointer.close()


def killed(folder: Path, steps: int, **settings: Any) -> Training:
    made = Training(folder, **settings)
    made.train(steps)
    lowdiff.testing.kill(made.checkpointer)
    return made
