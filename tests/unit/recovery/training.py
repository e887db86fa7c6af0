"""Real runs for the tests of recovery: a tiny model, trained for a few steps in this process."""

from __future__ import annotations

import copy
import json
import shutil
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from crc32c import crc32c
from torch import nn

import lowdiff
from lowdiff import testing
from lowdiff.compressors import TopK
from lowdiff.errors import ReplayMismatch
from lowdiff.model.items import Stateful
from lowdiff.recovery.replay import replayer
from lowdiff.recovery.replay.blocks import Unit
from lowdiff.recovery.replay.checksums import check_digests
from lowdiff.recovery.replay.replayer import ReplayOptions
from lowdiff.recovery.state import RecoveredState
from lowdiff.types import Fence


class Model(nn.Module):
    """Tied weights, batch norm, dropout, and a parameter without an optimizer state of size 1."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(24, 48)
        self.norm = nn.BatchNorm1d(48)
        self.dropout = nn.Dropout(0.1)
        self.last = nn.Linear(48, 24, bias=False)
        self.first_again = self.first
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.dropout(torch.relu(self.norm(self.first(x))))
        result: torch.Tensor = self.last(hidden) * self.scale
        return result


class Memory:
    """A stateful object with values that plain ``torch.load`` refuses."""

    def __init__(self) -> None:
        self.recent: deque[float] = deque(maxlen=3)
        self.counts = np.zeros(4, np.int64)

    def add(self, loss: float) -> None:
        self.recent.append(loss)
        self.counts[len(self.recent)] += 1

    def state_dict(self) -> dict[str, Any]:
        return {"recent": self.recent, "counts": self.counts, "mean": np.float64(loss_mean(self))}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.recent, self.counts = state["recent"], state["counts"]


def loss_mean(memory: Memory) -> float:
    return sum(memory.recent) / max(1, len(memory.recent))


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def two_optimizers(model: nn.Module) -> list[torch.optim.Optimizer]:
    first, *others = model.parameters()
    return [torch.optim.SGD([first], lr=0.05, momentum=0.9), torch.optim.Adam(others, lr=1e-3)]


@dataclass
class Trained:
    """A run on disk, and what the live objects held after each step of this process."""

    run: Path
    staging: Path
    models: dict[int, dict[str, torch.Tensor]] = field(default_factory=dict)
    optimizers: dict[int, list[dict[str, Any]]] = field(default_factory=dict)
    stateful: dict[int, dict[str, Any]] = field(default_factory=dict)

    def copied(self, folder: Path) -> Trained:
        """A copy of the files, to be damaged."""
        run, staging = folder / "copy", folder / "copied-staging"
        shutil.copytree(self.run, run)
        if self.staging.exists():
            shutil.copytree(self.staging, staging)
        return Trained(run, staging, self.models, self.optimizers, self.stateful)

    def segment(self, first: int, *, incarnation: int = 0, rank: int = 0) -> Path:
        name = f"i{incarnation:06d}-s{first:010d}.seg"
        return self.run / "segments" / f"rank-{rank:04d}" / name

    def shard(self, step: int, *, incarnation: int = 0, rank: int = 0) -> Path:
        folder = self.run / "snapshots" / f"i{incarnation:06d}-s{step:010d}"
        return folder / f"rank-{rank:04d}.safetensors"


def train(
    folder: Path,
    until: int,
    *,
    build: Callable[[nn.Module], Any] = adamw,
    end: str = "close",
    inside: Callable[[int, nn.Module], None] | None = None,
    **settings: Any,
) -> Trained:
    """Train up to ``until`` completed steps; again in the same folder to go on.

    Args:
        folder: Holds run and staging memory.
        until: Completed steps at the end.
        build: Makes the optimizer, or several.
        end: ``"close"``; ``"crash"``: an exception, so that all is durable but no last snapshot
            is taken; ``"kill"``: trainer and writer die at once.
        inside: Called in each body with the number of completed steps.
        settings: For the Checkpointer.
    """
    trained = Trained(folder / "run", settings.pop("staging", folder / "staging"))
    torch.manual_seed(1)
    model = Model()
    optimizer = build(model)
    optimizers: Sequence[torch.optim.Optimizer] = (
        optimizer if isinstance(optimizer, list) else [optimizer]
    )
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizers[0], [3, 6, 6])
    memory = Memory()

    def note(step: int) -> None:
        trained.models[step] = copy.deepcopy(model.state_dict())
        trained.optimizers[step] = [copy.deepcopy(o.state_dict()) for o in optimizers]
        live: dict[str, Stateful] = {"memory": memory, "scheduler": scheduler}
        trained.stateful[step] = {k: copy.deepcopy(v.state_dict()) for k, v in live.items()}

    chosen = {
        "compressor": TopK(0.1, dense_below=64),
        "snapshot_every": 5,
        "batch_size": 2,
        "retention": None,
        **settings,
    }
    checkpointer = lowdiff.Checkpointer(trained.run, staging=trained.staging, **chosen)
    # The writer begins a segment behind each snapshot, if it hears of it in time: a slow one must not
    # change which files there are.
    waits = end != "kill" and chosen["compressor"] is not None and chosen["snapshot_every"] == 5
    # Whoever looks at a crashed run finds all of it, however slow the disk.
    with suppress(_Crash), testing.limits(abandon_seconds=100.0), checkpointer:
        first = checkpointer.attach(model, optimizer, scheduler=scheduler, memory=memory)
        for step in checkpointer.steps(until):
            if waits and step > first and step % 5 == 0:
                durable = partial(_holds_snapshot, step)
                testing.wait_until(checkpointer, durable)
            note(step)
            if inside is not None:
                inside(step, model)
            batch = torch.randn(16, 24, generator=torch.Generator().manual_seed(step))
            loss = (model(batch) - batch).pow(2).mean()
            for o in optimizers:
                o.zero_grad()
            loss.backward()
            for o in optimizers:
                o.step()
            scheduler.step()
            memory.add(loss.item())
        note(until)
        if end == "kill":
            testing.kill(checkpointer)
        elif end == "crash":
            raise _Crash
    return trained


class _Crash(Exception):
    pass


def _holds_snapshot(step: int, stats: Mapping[str, Any]) -> bool:
    return bool(stats["durable_snapshot"] >= step)


def flip(path: Path, offset: int) -> None:
    """Change one bit of a file."""
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def part_sums(image: bytes) -> list[int]:
    """What a manifest says of an image's header and tensors, by the page of the format."""
    length = 8 + int.from_bytes(image[:8], "little")
    told = json.loads(image[8:length])
    del told["__metadata__"]
    places = sorted(entry["data_offsets"] for entry in told.values())
    return [
        crc32c(image[:length]),
        *(crc32c(image[length + first : length + last]) for first, last in places),
    ]


def refuse_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no step that is replayed in blocks have its checksums; whole tensors have theirs."""
    plan, is_whole = replayer.plan_units, list[bool]()

    def planned(state: RecoveredState, fence: Fence, options: ReplayOptions) -> list[Unit]:
        is_whole.append(options.whole)
        return plan(state, fence, options)

    def checked(*arguments: Any, **words: Any) -> None:
        if not is_whole[-1]:
            raise ReplayMismatch("blocks differ")
        check_digests(*arguments, **words)

    monkeypatch.setattr(replayer, "plan_units", planned)
    monkeypatch.setattr(replayer, "check_digests", checked)
