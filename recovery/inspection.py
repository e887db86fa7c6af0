"""What a run holds, in numbers; no payload is decoded and no state is built."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lowdiff.persistence.catalog import Catalog, scan
from lowdiff.persistence.fetching import fetch_all, temporary_folder
from lowdiff.persistence.framing import HEADER_BYTES, padded
from lowdiff.persistence.object_store import ObjectStore, is_url
from lowdiff.persistence.paths import RunFolder, default_staging_root
from lowdiff.persistence.retention_plan import is_valid
from lowdiff.recovery.plan import recoverable, spans_of, usable_snapshots


@dataclass(frozen=True, slots=True)
class StepRange:
    """Steps from ``first`` to ``last``, both inclusive."""

    first: int
    last: int


@dataclass(frozen=True, slots=True)
class StoredDifferentials:
    """The differentials of the run's history of which every rank's shard is there.

    Attributes:
        first: First step.
        last: Last step, inclusive. There may be gaps; ``Inspection.recoverable_ranges`` tells.
        count: Number of steps.
        bytes: Bytes over all ranks, framing included; encoded, unless they are only in staging.
        staged: Number of steps of which some shard is in staging only, not yet on disk.
    """

    first: int
    last: int
    count: int
    bytes: int
    staged: int


@dataclass(frozen=True, slots=True)
class PinnedStep:
    """A pin.

    Attributes:
        is_void: Whether the run has gone back before the step since, so that it is lost.
    """

    label: str
    step: int
    is_void: bool


@dataclass(frozen=True, slots=True)
class Inspection:
    """What a run holds.

    Attributes:
        world_size: Ranks of the newest incarnation; 0 if none ever began.
        parameters: Number of trainable parameter tensors; tied ones count once.
        elements: Number of elements in them.
        snapshots: Steps of complete full snapshots on the run's history, ascending.
        differentials: None if there are none.
        recoverable: The newest unbroken range of steps; None if no step can be rebuilt.
        recoverable_ranges: All ranges, ascending.
        bytes_per_step: Mean bytes of a differential, over all ranks; None without any.
        compressor: Name and settings; None if no incarnation ever began.
        optimizer: Class name, or a tuple of them if the run has several optimizers.
        incarnations: How often the run began or resumed.
        snapshot_bytes: Bytes of all complete snapshots.
        damaged: Number of files with bytes that fail a check; `verify` names them.
        pins: Steps that retention spares, by label.
    """

    run_id: str
    world_size: int
    parameters: int
    elements: int
    snapshots: tuple[int, ...]
    differentials: StoredDifferentials | None
    recoverable: StepRange | None
    recoverable_ranges: tuple[StepRange, ...]
    bytes_per_step: float | None
    compressor: Mapping[str, Any] | None
    optimizer: str | tuple[str, ...] | None
    incarnations: int
    snapshot_bytes: int
    damaged: int
    pins: tuple[PinnedStep, ...]

    def document(self) -> dict[str, Any]:
        """As JSON content."""
        return asdict(self)


def inspect(run: str | Path, staging: str | Path | None = None) -> Inspection:
    """List what a run holds.

    Args:
        run: The run folder, or the URL of its store. Of a store everything but the snapshots'
            tensors is read, into a temporary folder (``TMPDIR``).
        staging: Where the run's staging memory lives, if it was set by hand.

    Raises:
        NotARun: If the folder or store holds no run.
        StoreError: If the store does not answer.
    """
    root = default_staging_root(Path(run)) if staging is None else Path(staging)
    if not is_url(run):
        return _inspect(RunFolder(Path(run)), root)
    with temporary_folder() as folder:
        fetch_all(ObjectStore(str(run)), folder, shards=False)
        return _inspect(folder, root)


def _inspect(folder: RunFolder, staging: Path) -> Inspection:
    catalog = scan(folder, [staging])
    # A step may be in both tiers, and the catalog lists staging first.
    return _summary(catalog, scan(folder) if catalog.staging else catalog)


def _summary(catalog: Catalog, durable: Catalog) -> Inspection:
    newest = catalog.incarnations.get(max(catalog.incarnations, default=-1))
    fence = None if newest is None else newest.fence
    specs = () if fence is None else fence.layout.parameters
    names = () if fence is None else tuple(spec.class_name for spec in fence.optimizers)
    ranges = tuple(StepRange(first, last) for first, last in recoverable(catalog))
    differentials = _differentials(catalog, durable)
    return Inspection(
        run_id=catalog.run_id,
        world_size=0 if fence is None else fence.world_size,
        parameters=len(specs),
        elements=0 if fence is None else fence.layout.elements,
        snapshots=tuple(sorted({s.step for s in usable_snapshots(catalog)})),
        differentials=differentials,
        recoverable=ranges[-1] if ranges else None,
        recoverable_ranges=ranges,
        bytes_per_step=None if differentials is None else differentials.bytes / differentials.count,
        compressor=None if fence is None else dict(fence.compressor),
        optimizer=None if not names else names[0] if len(names) == 1 else names,
        incarnations=len(catalog.incarnations),
        snapshot_bytes=sum(snapshot.bytes for snapshot in catalog.snapshots),
        damaged=len({error.path for error in catalog.damage}),
        pins=tuple(
            PinnedStep(pin.label, pin.step, is_void=not is_valid(spans_of(catalog), pin))
            for pin in catalog.pins
        ),
    )


def _differentials(catalog: Catalog, durable: Catalog) -> StoredDifferentials | None:
    steps: list[int] = []
    size = staged = 0
    for span in spans_of(catalog):
        keys = [(span.incarnation, rank) for rank in range(span.world_size)]
        shards = [catalog.records.get(key, {}) for key in keys]
        on_disk = [durable.records.get(key, {}) for key in keys]
        for step in filter(span.owns, sorted(set(shards[0]).intersection(*shards[1:]))):
            steps.append(step)
            staged += any(step not in records for records in on_disk)
            for there, here in zip(on_disk, shards, strict=True):
                header = there.get(step, here[step]).record.header
                size += HEADER_BYTES + padded(header.body_bytes)
    if not steps:
        return None
    return StoredDifferentials(steps[0], steps[-1], len(steps), size, staged)
