"""What a training process tells the demo: one JSON line per event, flushed at once.

No torch here: the process that follows the training must start quickly.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True, slots=True)
class Attached:
    """The checkpointer holds model and optimizer; training can begin.

    Attributes:
        completed: Step that training continues from; 0 in a new run.
        seconds: Time that ``attach`` took.
        time: When it returned, in seconds since the epoch.
    """

    completed: int
    seconds: float
    time: float


@dataclass(frozen=True, slots=True)
class StepDone:
    """The loop body that makes one step is at its last line; the step is not committed yet.

    Its gradient exchange included every rank, and a rank gets there only after it has staged
    the step before. So this line proves that ``step - 1`` is committed.

    Attributes:
        step: The step that the body makes, from 1.
        loss: This rank's training loss as ``float.hex``, which keeps every bit.
        seconds: Time spent in the body.
        time: When it ended, in seconds since the epoch.
        staged_bytes: Bytes staged in this life before this step.
    """

    step: int
    loss: str
    seconds: float
    time: float
    staged_bytes: int


@dataclass(frozen=True, slots=True)
class Finished:
    """Training reached its last step and the checkpointer is closed.

    Attributes:
        held_out_loss: Loss on the held-out text as ``float.hex``.
        num_parameters: Elements of the model.
        full_checkpoint_bytes: Parameters and optimizer state, as one full checkpoint holds them.
        stats: What ``Checkpointer.stats()`` said about this rank, after ``close()``.
        digests: SHA-256 of every tensor and random state, by name.
    """

    held_out_loss: str
    num_parameters: int
    full_checkpoint_bytes: int
    stats: Mapping[str, float]
    digests: Mapping[str, str]


Record = Attached | StepDone | Finished

_KINDS: dict[str, type[Attached | StepDone | Finished]] = {
    kind.__name__: kind for kind in (Attached, StepDone, Finished)
}


def log_path(folder: Path, rank: int) -> Path:
    """Where one rank writes its records."""
    return folder / f"rank{rank}.jsonl"


class RecordWriter:
    """Writes records so that a reader, or the reader of a killed process, sees them at once."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("w", buffering=1, encoding="utf-8")

    def write(self, record: Record) -> None:
        """Append one line; it is with the operating system when this returns."""
        line = json.dumps({"event": type(record).__name__, **dataclasses.asdict(record)})
        self._file.write(line + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file; harmless when called twice."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class RecordReader:
    """Follows a file of records while it grows; the file need not exist yet."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def new(self) -> list[Record]:
        """Records whose lines were completed since the last call; a torn last line waits."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._offset)
            complete, newline, _ = file.read().rpartition(b"\n")
        self._offset += len(complete) + len(newline)
        return [_parse(line) for line in complete.splitlines()]


def _parse(line: bytes) -> Record:
    fields = json.loads(line)
    return _KINDS[fields.pop("event")](**fields)
