"""Settings that writer, replica and publisher receive on their command lines."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from lowdiff.persistence.files.detached_process import ProcessSettings
from lowdiff.persistence.files.paths import parse_staging_name
from lowdiff.persistence.format.framing import FileHeader, FileKind
from lowdiff.types import Retention

#: Bytes after which a segment is sealed: with a store, which receives whole segments, and without.
_OBJECT_BYTES, _SEGMENT_BYTES = 16 << 20, 256 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class WriterSettings(ProcessSettings):
    """Settings of a writer.

    Attributes:
        base_step: Step that this incarnation begins with.
        batch_size: Differentials per durable write (``b``).
        flush_seconds: Time after which a smaller batch is written.
        retention: Retention policy; None keeps everything.
        store: URL of the run in an object store; None without a store.
        store_timeout_seconds: How long to wait for the store once the trainer is gone.
        folder_timeout_seconds: How long to wait for the run folder once the trainer is gone.
        segment_seconds: Age at which a segment is sealed and goes to the store.
        logs_steps: Whether differentials are made durable, and not only images.
        adopts: Names of the dead incarnations' staging folders that this writer makes durable.
        continues: Whether this incarnation continues the one before. Otherwise, the run's history
            ends with the one before until this incarnation's first snapshot is complete.
    """

    base_step: int
    batch_size: int
    flush_seconds: float
    retention: Retention | None
    store: str | None = None
    store_timeout_seconds: float = 60.0
    folder_timeout_seconds: float = 600.0
    segment_seconds: float = 10.0
    logs_steps: bool = True
    continues: bool = True
    adopts: Sequence[str] = ()

    def serves(self, rank: int) -> bool:
        """Return whether this writer serves ``rank``: its own, or its share of ranks that are gone."""
        return rank == self.rank or (
            rank >= self.world_size and rank % self.world_size == self.rank
        )

    @property
    def ranks_to_adopt(self) -> frozenset[int]:
        """Return the ranks whose logs this writer makes durable besides its own, adopted or not."""
        stages = map(parse_staging_name, self.adopts)
        return frozenset(rank for _, rank, keeper in stages if keeper is None)

    @property
    def segment_bytes(self) -> int:
        """Return the size at which a segment is sealed."""
        return _SEGMENT_BYTES if self.store is None else _OBJECT_BYTES

    @property
    def segment_header(self) -> FileHeader:
        """Return the header of its segments; the first step is filled in for each segment."""
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
        """Parse the text of ``to_json``."""
        fields = json.loads(text)
        policy = fields.pop("retention")
        return cls(**fields, retention=None if policy is None else Retention(**policy))


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaSettings(ProcessSettings):
    """Settings of a replica.

    Attributes:
        image_every: Steps between images for the disk, equal on all ranks; 0 for none.
        keep_every: Steps between images that are kept for ever; 0 for none.
        waits: Whether the replica waits for the writer if the next image is due before the last is
            durable. Otherwise it goes on and leaves the next image out.
        imports: Modules of registered optimizers.
        optimizers: Module, qualified name and granularity of each registered optimizer of the run.
        scalar_state: Entries of their state that hold one number.
        import_path: Folders to search for these modules after all others: the trainer's own, in
            order. Empty if nothing is imported.
    """

    image_every: int
    keep_every: int
    waits: bool
    imports: tuple[str, ...] = ()
    optimizers: tuple[Sequence[str], ...] = ()
    scalar_state: tuple[str, ...] = ()
    import_path: tuple[str, ...] = ()

    def is_image_due(self, step: int) -> bool:
        """Return whether the disk gets an image of this step, on all ranks alike."""
        return any(every and step % every == 0 for every in (self.image_every, self.keep_every))

    @classmethod
    def from_json(cls, text: str) -> ReplicaSettings:
        """Parse the text of ``to_json``."""
        return cls(**json.loads(text))


@dataclass(frozen=True, slots=True, kw_only=True)
class PublisherSettings(ProcessSettings):
    """Settings of the process that publishes weights.

    Attributes:
        target, dtype, every, anchor_every, keep_anchors, durable: Of `lowdiff.types.Publisher`.
        has_names: Whether names are given, in `StagingFolder.publisher_names`.
        imports, optimizers, scalar_state, import_path: As of a replica.
    """

    target: str
    dtype: str | None
    every: int
    anchor_every: int
    keep_anchors: int
    durable: bool
    has_names: bool
    imports: tuple[str, ...] = ()
    optimizers: tuple[Sequence[str], ...] = ()
    scalar_state: tuple[str, ...] = ()
    import_path: tuple[str, ...] = ()

    @classmethod
    def from_json(cls, text: str) -> PublisherSettings:
        """Parse the text of ``to_json``."""
        return cls(**json.loads(text))
