"""What a writer process is told: settings on its command line, later a byte on its stdin."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from lowdiff.persistence.files.detached_process import ProcessSettings
from lowdiff.persistence.format.framing import FileHeader, FileKind
from lowdiff.persistence.retention.plan import Retention

#: Nothing more will be staged.
END = b"."
#: From now on each step is to be durable as soon as it is staged, also in a batch that is not full.
WRITE_THROUGH = b"!"

#: How long a segment grows: with a store, which gets whole segments only, and without.
_OBJECT_BYTES, _SEGMENT_BYTES = 16 << 20, 256 << 20

#: The largest batch that a writer can be told of, by a word whose one byte is the power of two.
MAX_TOLD_BATCH_SIZE = 1 << 12


def batch_size_word(batch_size: int) -> bytes:
    """Return the word for a batch size that is a power of two, up to ``MAX_TOLD_BATCH_SIZE``."""
    level = batch_size.bit_length() - 1
    assert 1 << level == batch_size <= MAX_TOLD_BATCH_SIZE
    return bytes([level])


def told_batch_size(said: bytes) -> int | None:
    """Return the last batch size among some words; None if there is none."""
    levels = [word for word in said if 1 << word <= MAX_TOLD_BATCH_SIZE]
    return 1 << levels[-1] if levels else None


@dataclass(frozen=True, slots=True, kw_only=True)
class WriterSettings(ProcessSettings):
    """All a writer needs to know.

    Attributes:
        base_step: The step that this life begins with.
        batch_size: Differentials per durable write (``b``).
        flush_seconds: A shorter batch is written after so long.
        retention: What is kept; None keeps all.
        store: URL of the run in an object store, if it is to be there as well.
        store_patience_seconds: How long a store may stay away once the trainer is gone.
        folder_patience_seconds: How long the run folder may.
        segment_seconds: How long a segment grows before it is sealed and goes to the store.
        has_replica: Whether a replica applies the differentials (LowDiff+), so that only images
            are made durable.
        adopts: Names of the staging folders of dead incarnations that this writer makes durable.
        continues: Whether this life goes on from the one before it; otherwise that one is the
            run's history until this one's first snapshot is complete.
    """

    base_step: int
    batch_size: int
    flush_seconds: float
    retention: Retention | None
    store: str | None = None
    store_patience_seconds: float = 60.0
    folder_patience_seconds: float = 600.0
    segment_seconds: float = 10.0
    has_replica: bool = False
    continues: bool = True
    adopts: Sequence[str] = ()

    def serves(self, rank: int) -> bool:
        """Whether what ``rank`` left is this writer's: its own, and its share of ranks that are no more."""
        return rank == self.rank or (
            rank >= self.world_size and rank % self.world_size == self.rank
        )

    @property
    def segment_bytes(self) -> int:
        """A segment that is longer is sealed."""
        return _SEGMENT_BYTES if self.store is None else _OBJECT_BYTES

    @property
    def segment_header(self) -> FileHeader:
        """Of its segments, but for the step each begins with."""
        return FileHeader(
            FileKind.SEGMENT,
            self.run_id,
            self.incarnation,
            self.rank,
            self.world_size,
            sequence=0,
        )

    @classmethod
    def from_json(cls, text: str) -> WriterSettings:
        """What ``to_json`` made."""
        fields = json.loads(text)
        policy = fields.pop("retention")
        return cls(**fields, retention=None if policy is None else Retention(**policy))


class Orders:
    """What the trainer says through the pipe to stdin. One thread reads it.

    Attributes:
        batch_size: Differentials per durable write.
        write_through: Whether a batch that is not full is written at once.
        trainer_gone: Set when nothing more will be staged; for any thread.
    """

    def __init__(self, settings: WriterSettings) -> None:
        self._trainer_pid = settings.trainer_pid
        self.batch_size = settings.batch_size
        self.write_through = False
        self.trainer_gone = threading.Event()
        os.set_blocking(sys.stdin.fileno(), False)

    def read(self) -> bool:
        """Take in what was said; whether the trainer said that nothing more comes, or died."""
        if not self.trainer_gone.is_set():
            try:
                said = os.read(sys.stdin.fileno(), 64) or END
            except BlockingIOError:
                said = b""
            if WRITE_THROUGH in said:
                self.write_through = True
            self.batch_size = told_batch_size(said) or self.batch_size
            # Forked DataLoader workers may hold the pipe open after the trainer's death.
            if END in said or os.getppid() != self._trainer_pid:
                self.trainer_gone.set()
        return self.trainer_gone.is_set()
