"""Settings that the writer and the replica get on their command lines."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from lowdiff.persistence.files.detached_process import ProcessSettings
from lowdiff.persistence.format.framing import FileHeader, FileKind
from lowdiff.types import Retention

#: How long a segment grows: with a store, which gets whole segments only, and without.
_OBJECT_BYTES, _SEGMENT_BYTES = 16 << 20, 256 << 20


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
    def ranks_to_adopt(self) -> frozenset[int]:
        """Ranks whose logs this writer makes durable beside its own, adopted by now or not."""
        return frozenset(int(name.rpartition("r")[2]) for name in self.adopts)

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


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaSettings(ProcessSettings):
    """All a replica needs to know.

    Attributes:
        image_every: Steps between images for the disk, all ranks alike; 0 for none.
        keep_every: The same for images that are kept for ever; 0 for none.
        waits: Whether it waits for the writer where the next image is due and the last one is not
            durable yet; else it goes on, and that image is left out.
        imports: Modules of registered optimizers.
        optimizers: Module, qualified name and granularity of each such optimizer of the run.
        scalar_state: Entries of their state that hold one number.
        import_path: Where they are looked for after everything else: the trainer's own folders, in
            order. Empty where nothing is imported.
    """

    image_every: int
    keep_every: int
    waits: bool
    imports: tuple[str, ...] = ()
    optimizers: tuple[Sequence[str], ...] = ()
    scalar_state: tuple[str, ...] = ()
    import_path: tuple[str, ...] = ()

    def is_image_due(self, step: int) -> bool:
        """Whether the disk gets an image of this step, on all ranks alike."""
        return any(every and step % every == 0 for every in (self.image_every, self.keep_every))

    @classmethod
    def from_json(cls, text: str) -> ReplicaSettings:
        """What ``to_json`` made."""
        return cls(**json.loads(text))
