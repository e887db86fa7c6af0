"""A tiny run to be broken, with what every step of it must come back as."""

from __future__ import annotations

import hashlib
import logging
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

import lowdiff
from lowdiff import testing
from lowdiff.compressors import TopK
from lowdiff.errors import LowDiffError
from lowdiff.persistence.format.values import encode
from lowdiff.recovery import RecoveredState, recover
from lowdiff.recovery.replay.replayer import ReplayOptions

#: Threads cost more than they bring at this size.
ONE_WORKER = ReplayOptions(num_workers=1)


class TinyTraining:
    """A model of a few hundred elements whose every step depends on the step's number alone."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        self.model = nn.Sequential(
            nn.Linear(8, 20), nn.BatchNorm1d(20), nn.ReLU(), nn.Linear(20, 4)
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 7, 0.9)

    @property
    def stateful(self) -> dict[str, Any]:
        return {"scheduler": self.scheduler}

    def step(self, step: int, model: nn.Module | None = None, rank: int = 0) -> None:
        """The body that leads from ``step`` to ``step + 1``."""
        chance = torch.Generator().manual_seed(step * 1000 + rank)
        inputs = torch.randn(16, 8, generator=chance)
        loss = ((model or self.model)(inputs) - inputs[:, :4]).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()

    def digest(self) -> str:
        """Of everything that recovery must bring back."""
        live = {name: thing.state_dict() for name, thing in self.stateful.items()}
        return digest(self.model.state_dict(), self.optimizer.state_dict(), live)


def digest(model: Mapping[str, Any], optimizer: Mapping[str, Any], live: Mapping[str, Any]) -> str:
    """SHA-256 of names, types and bits, whatever the order of the names."""
    parts = {f"model/{name}": value for name, value in model.items()}
    for number, entries in optimizer["state"].items():
        parts |= {f"optimizer/{number}/{name}": value for name, value in entries.items()}
    for number, group in enumerate(optimizer["param_groups"]):
        parts |= {f"group/{number}/{name}": value for name, value in group.items()}
    for thing, state in live.items():
        parts |= {f"{thing}/{name}": value for name, value in state.items()}
    result = hashlib.sha256()
    for name in sorted(parts):
        result.update(name.encode() + b"\0" + encode(parts[name]))
    return result.hexdigest()


def digest_of(state: RecoveredState) -> str:
    """Of a recovered state."""
    return digest(state.model_state_dict(), state.optimizer_state_dict(), state.stateful)


def checkpointer_for(run: Path, staging: Path, **settings: Any) -> lowdiff.Checkpointer:
    """Small batches and frequent snapshots, so that little training exercises much."""
    chosen: dict[str, Any] = {
        "compressor": TopK(0.1, dense_below=16),
        "snapshot_every": 5,
        "batch_size": 2,
        "retention": None,
        **settings,
    }
    return lowdiff.Checkpointer(run, staging=staging, **chosen)


@dataclass
class Victim:
    """A run on disk and in staging.

    Attributes:
        newest: Its last committed step.
        digests: Of each of its steps, and of some that an uninterrupted run makes after them.
    """

    run: Path
    staging: Path
    newest: int = 0
    digests: dict[int, str] = field(default_factory=dict)

    def copied(self, folder: Path) -> Victim:
        """The same files, to be broken."""
        copy = Victim(folder / "run", folder / "staging", self.newest, self.digests)
        shutil.copytree(self.run, copy.run)
        if self.staging.exists():
            shutil.copytree(self.staging, copy.staging)
        return copy

    def files(self) -> list[Path]:
        """Every file that recovery may read, run folder first."""
        found = [
            path
            for root in (self.run, self.staging)
            for path in sorted(root.rglob("*"))
            if path.is_file() and path.suffix not in (".lock", ".log")
        ]
        return [path for path in found if path.name != "status"]

    def recovered(self, step: int | None = None) -> RecoveredState:
        """What `lowdiff.recover` makes of it now."""
        return recover(self.run, step, staging=self.staging, options=ONE_WORKER)


def live(
    victim: Victim, until: int, *, end: str = "close", training: TinyTraining | None = None
) -> TinyTraining:
    """One life of the run, in this process.

    Args:
        victim: Where; its digests are filled in.
        until: Completed steps at the end.
        end: ``"close"``; ``"kill"``: trainer and writer die at once, and staging stays.
        training: What to train; a new one by default.
    """
    trained = training or TinyTraining()
    checkpointer = checkpointer_for(victim.run, victim.staging)
    resumed = checkpointer.attach(trained.model, trained.optimizer, **trained.stateful)
    victim.digests[resumed] = trained.digest()
    for step in checkpointer.steps(until):
        trained.step(step)
        victim.digests[step + 1] = trained.digest()
    victim.newest = until
    if end == "kill":
        testing.kill(checkpointer)
    else:
        checkpointer.close()
    return trained


def verdict(victim: Victim, step: int | None = None) -> str:
    """What recovery makes of a broken run: ``"exact"``, ``"earlier"`` or an error's name.

    Args:
        victim: The run.
        step: Which step is asked for; the newest by default.

    Raises:
        AssertionError: If it came back with other bits.
        Exception: Whatever recovery raised that is no `LowDiffError`.
    """
    try:
        state = victim.recovered(step)
    except LowDiffError as error:
        return type(error).__name__
    expected = victim.digests.get(state.step)
    assert digest_of(state) == expected, f"step {state.step} came back with other bits"
    return "exact" if state.step == (victim.newest if step is None else step) else "earlier"


def describe(error: BaseException) -> str:
    """An error that nobody foresaw, with the place it came from."""
    frames: Iterator[str] = (
        f"{Path(frame.f_code.co_filename).name}:{number}" for frame, number in _walk(error)
    )
    return f"{type(error).__name__}: {str(error)[:160]} ({' '.join(list(frames)[-3:])})"


def _walk(error: BaseException) -> Iterator[tuple[Any, int]]:
    trace = error.__traceback__
    while trace is not None:
        yield trace.tb_frame, trace.tb_lineno
        trace = trace.tb_next


@contextmanager
def listening() -> Iterator[list[str]]:
    """The warnings that lowdiff gives inside the block."""
    said: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    listener, logger = Listener(logging.WARNING), logging.getLogger("lowdiff")
    propagates, level = logger.propagate, logger.level
    logger.addHandler(listener)
    logger.propagate = False
    logger.setLevel(logging.WARNING)
    try:
        yield said
    finally:
        logger.removeHandler(listener)
        logger.propagate = propagates
        logger.setLevel(level)
