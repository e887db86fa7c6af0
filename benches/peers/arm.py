"""What a checkpointing system looks like to the bench, and what a process of the bench is told."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import nn


@dataclass(frozen=True, slots=True)
class Task:
    """What one process, or one process per rank, does for a cell.

    Attributes:
        phase: ``"overhead"``, ``"train"``, ``"kill"`` or ``"restore"``; see benches/peers/rank.py.
        system: Key of ``SYSTEMS``.
        model: Key of ``MODELS``.
        num_ranks: Processes that train together, on this machine.
        files: Folder for checkpoints, on a disk.
        staging: Folder in memory, for systems that let one choose it.
        found: Folder for what the processes find out.
        rounds: Of ABBA: two blocks without checkpoints and two with.
        block_steps: Steps of a block.
        steps: To train in ``"train"`` and ``"kill"``, or to find in ``"restore"``.
        is_sketch: Whether gradients are noise, which is cheap; else they are a GPT's.
    """

    phase: str
    system: str
    model: str
    num_ranks: int
    seed: int
    files: Path
    staging: Path
    found: Path
    rounds: int
    block_steps: int
    steps: int = 0
    is_sketch: bool = False

    @classmethod
    def from_json(cls, text: str) -> Task:
        """The inverse of ``to_json``."""
        values = json.loads(text)
        return cls(**{**values, **{k: Path(values[k]) for k in ("files", "staging", "found")}})

    def to_json(self) -> str:
        """As text."""
        return json.dumps(asdict(self), default=str)

    @property
    def expected(self) -> Path:
        """File with the state that a restore must bring back."""
        return self.found / "expected.pt"

    @property
    def expected_next(self) -> Path:
        """File with the one that training must reach from there in a step."""
        return self.found / "expected-next.pt"

    def diary(self, rank: int) -> Path:
        """File to which a rank appends when saving a step begins, and when it has ended."""
        return self.found / f"diary-{rank}"


@dataclass(frozen=True, slots=True)
class Place:
    """Where an arm of one rank works.

    Attributes:
        files: Folder that all ranks share, on a disk.
        staging: Folder in memory that all ranks share.
        snapshot_every: Steps between full snapshots, for systems that save differences.
        batch_size: Differences per write, for systems that collect them.
    """

    files: Path
    staging: Path
    rank: int
    num_ranks: int
    snapshot_every: int
    batch_size: int

    def step(self, step: int, suffix: str = "") -> Path:
        """Name of one step's checkpoint, for systems that leave naming to the user."""
        return self.files / f"step-{step:08d}{suffix}"

    def saved(self, suffix: str = "") -> list[tuple[int, Path]]:
        """Checkpoints that carry such names, newest first."""
        paths = self.files.glob(f"step-????????{suffix}")
        return sorted(((int(p.name[5:13]), p) for p in paths), reverse=True)


class Trained(Protocol):
    """The training that an arm protects."""

    @property
    def module(self) -> nn.Module:
        """What forward is called on: the model, in DDP where there are several ranks."""

    @property
    def model(self) -> nn.Module:
        """The model itself."""

    @property
    def optimizer(self) -> Any:
        """A ``torch.optim.Optimizer``."""

    @property
    def compression(self) -> Any:
        """What compresses its gradients, if anything does but the arm."""

    def state(self) -> dict[str, Any]:
        """``{"model": ..., "optimizer": ...}``, live tensors."""

    def load(self, state: dict[str, Any]) -> None:
        """Take such a state over."""


class Arm(Protocol):
    """A system that saves every step; the methods run on every rank, in the same order."""

    def open(self, training: Trained) -> None:
        """Begin a new run."""

    def after_step(self, step: int) -> bool:
        """Save the state after ``step``, as the system's documentation says; timed as its stall.

        Returns:
            False where the system leaves out this step.
        """

    def drain(self) -> None:
        """Return when all that was handed over lies where the system puts it."""

    def restore(self, training: Trained) -> int:
        """Bring a fresh training to the newest step that can be had; the step, 0 if there is none."""
