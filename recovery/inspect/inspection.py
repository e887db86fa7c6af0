"""A run's content in numbers; no payload is decoded and no state is built."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lowdiff.core.events import Code
from lowdiff.errors import DamagedFile, RunInUse
from lowdiff.persistence.files.lease import LEASE_SECONDS, LeaseSeen, look_at_lease
from lowdiff.persistence.files.locks import is_locked
from lowdiff.persistence.files.paths import RunFolder, StagingFolder, staging_to_read
from lowdiff.persistence.retention.plan import is_valid
from lowdiff.persistence.run.catalog import Catalog, scan
from lowdiff.persistence.run.frozen_parameters import check_constants
from lowdiff.persistence.run.owner import Owner
from lowdiff.persistence.run.records import shared_ranges
from lowdiff.persistence.staging.status import holds_state
from lowdiff.persistence.store.client import ObjectStore, is_url
from lowdiff.persistence.store.fetch import fetch_history, opened, temporary_folder
from lowdiff.recovery.damage import Finding, judge
from lowdiff.recovery.inspect.legs import looked_at
from lowdiff.recovery.inspect.missing import Died, MissingSteps, missing_steps
from lowdiff.recovery.plan import bytes_of, decisions, recoverable, spans_of, usable_snapshots
from lowdiff.types import Decision, Fence, Reached

#: What is no more than this is read whole, in about a second.
_SMALL_BYTES, _FEW_STEPS = 256 << 20, 20_000


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
    """Content of a run.

    Attributes:
        world_size: Ranks of the newest incarnation; 0 if none ever began.
        parameters: Number of trainable parameter tensors; tied ones count once.
        elements: Number of elements in them.
        snapshots: Steps of complete full snapshots on the run's history, ascending.
        differentials: None if there are none.
        recoverable: The newest unbroken range of steps; None if no step can be rebuilt.
        recoverable_ranges: All ranges, ascending.
        in_memory: Those of these steps whose state lies in memory, which a reboot ends: a dead trainer's
            replicas', what survivors saved, copies; None if there are none.
        bytes_per_step: Mean bytes of a differential, over all ranks; None without any.
        compressor: Name and settings; None if no incarnation ever began.
        optimizer: Class name, or a tuple of them if the run has several optimizers.
        incarnations: How often the run began or resumed; also those that died in attach.
        snapshot_bytes: Bytes of all complete snapshots.
        damaged: Number of files with bytes that fail a check.
        is_read: Whether every checksum was compared, as of small runs. Else tensors of snapshots are not read, nor the
            records of sealed segments, so that damage in them is not counted; `verify` finds it.
        pins: Steps that retention spares, by label.
        copies_of: Ranks on other nodes of whose steps this machine keeps copies.
        lost_tails: What was decided about lost steps on the run's history, oldest first.
        strategy: ``"log"``, ``"replica"`` or ``"survivors"``; None if no incarnation ever began.
        device: Kind of device that the newest incarnation trains on, and its torch; "" likewise.
        torch_version: See `device`.
        trainer: Who trains it now, as the lease describes it; "" if nobody seems to.
        written_at_unix_seconds: When the newest file of the run folder was written; None for a store.
        missing: Steps that were made and cannot be had, with reasons.
        damage: What is wrong with the damaged files, each with its path.
        staging_elsewhere: Where more steps may lie, in a place or on a machine that was not looked at; "" for nowhere.
    """

    run_id: str
    world_size: int
    parameters: int
    elements: int
    snapshots: tuple[int, ...]
    differentials: StoredDifferentials | None
    recoverable: StepRange | None
    recoverable_ranges: tuple[StepRange, ...]
    in_memory: StepRange | None
    bytes_per_step: float | None
    compressor: Mapping[str, Any] | None
    optimizer: str | tuple[str, ...] | None
    incarnations: int
    snapshot_bytes: int
    damaged: int
    pins: tuple[PinnedStep, ...]
    copies_of: tuple[int, ...] = ()
    lost_tails: tuple[Decision, ...] = ()
    strategy: str | None = None
    device: str = ""
    torch_version: str = ""
    trainer: str = ""
    written_at_unix_seconds: float | None = None
    missing: tuple[MissingSteps, ...] = ()
    damage: tuple[str, ...] = ()
    staging_elsewhere: str = ""
    is_read: bool = False

    def document(self) -> dict[str, Any]:
        """As JSON content."""
        return {**asdict(self), "lost_tails": [one.document() for one in self.lost_tails]}


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
    root = staging_to_read(staging)
    with opened(run, with_images=False) as folder:
        catalog = scan(folder, [root])
        stored = sum(snapshot.bytes for snapshot in catalog.snapshots) + sum(
            records.framed_bytes(first, last)
            for records in list(catalog.records.values())
            for first, last in records.ranges
        )
        num_steps = sum(map(len, catalog.records.values()))
        is_read = not is_url(run) and stored <= _SMALL_BYTES and num_steps <= _FEW_STEPS
        if is_read:
            catalog = looked_at(folder, root)
        lease = look_at_lease(folder.lease)  # a file: the scan refuses links and pipes
        found, memory = _recoverable(catalog)
        differentials = _differentials(catalog)
        fence = catalog.incarnations.get(max(catalog.incarnations, default=-1))
        failures = _failures(folder, catalog, fence, is_read=is_read)
        specs = () if fence is None else fence.layout.parameters
        names = () if fence is None else tuple(spec.class_name for spec in fence.optimizers)
        ranges = tuple(StepRange(first, last) for first, last in found)
        trainer = _trainer(folder, lease)
        died = None if trainer else _died(catalog, lease, root)
        return Inspection(
            run_id=catalog.run_id,
            world_size=0 if fence is None else fence.world_size,
            parameters=len(specs),
            elements=0 if fence is None else fence.layout.elements,
            snapshots=tuple(sorted({s.step for s in usable_snapshots(catalog)})),
            differentials=differentials,
            recoverable=ranges[-1] if ranges else None,
            recoverable_ranges=ranges,
            in_memory=None if memory is None else StepRange(*memory),
            bytes_per_step=None
            if differentials is None
            else differentials.bytes / differentials.count,
            compressor=None if fence is None else dict(fence.compressor),
            optimizer=None if not names else names[0] if len(names) == 1 else names,
            incarnations=len(folder.incarnations()),
            snapshot_bytes=sum(snapshot.bytes for snapshot in catalog.snapshots),
            damaged=len({failure.path for failure in failures}),
            pins=tuple(
                PinnedStep(pin.label, pin.step, is_void=not is_valid(spans_of(catalog), pin))
                for pin in catalog.pins
            ),
            copies_of=tuple(sorted({copy.rank for copy in catalog.copies})),
            lost_tails=decisions(catalog),
            strategy=None if fence is None else fence.strategy,
            device="" if fence is None else fence.environment.device,
            torch_version="" if fence is None else fence.environment.torch_version,
            trainer=trainer,
            written_at_unix_seconds=None if is_url(run) else _written_at(folder),
            missing=missing_steps(catalog, found, died),
            is_read=is_read,
            damage=tuple(failure.message for failure in failures),
            staging_elsewhere="" if died is None or died.is_gone or died.other else died.staging,
        )


def _failures(
    folder: RunFolder, catalog: Catalog, fence: Fence | None, *, is_read: bool
) -> list[Finding]:
    """Return what is damaged; tensors, also frozen ones, are looked at only where all is read."""
    failures, _ = judge(folder, catalog, check_all=is_read)
    if not folder.incarnations() and any((*folder.segments(), *folder.snapshots())):
        path = folder.root / "incarnations"
        what = f"{path} holds no fence, and what incarnations made is there: bring it back"
        failures.append(Finding(what, str(path)))
    if is_read and fence is not None and fence.constants:
        try:
            check_constants(folder, fence.constants)
        except DamagedFile as error:
            failures.append(Finding.of(error))
    return failures


def _trainer(folder: RunFolder, lease: LeaseSeen | None) -> str:
    """Describe who trains the run now; whoever died keeps the lease."""
    if lease is None or not lease.is_held:
        return ""
    is_alive = is_locked(folder.lock(0)) if lease.is_here else None
    if is_alive is None:  # on another machine, or the lock may not be read
        is_alive = lease.age_seconds <= LEASE_SECONDS
    return lease.holder if is_alive else ""


def _died(catalog: Catalog, lease: LeaseSeen | None, root: Path) -> Died | None:
    """Return how the newest trainer left the run, if it did not close it; `_trainer` is not there any more."""
    newest = max(catalog.incarnations, default=None)
    if newest is None or lease is None or not lease.is_held:
        return None
    reached = Reached.of(lease.remark)
    staging = catalog.incarnations[newest].staging
    ranks = {stage.rank for stage in catalog.staging if stage.incarnation == newest}
    seen = len(ranks) == catalog.incarnations[newest].world_size
    others = (
        Owner.read(stage)
        for stage in StagingFolder.all_of_run(root, catalog.run_id)
        if stage.incarnation == newest
    )
    return Died(
        committed=reached.step if reached is not None and reached.incarnation == newest else -1,
        staging="" if seen else staging,
        is_gone=root.resolve() == Path(staging),
        who=lease.holder,
        other="" if seen else next((owner.run for owner in others if owner is not None), ""),
    )


def _written_at(folder: RunFolder) -> float | None:
    listed = (folder.fences(), folder.snapshots(), folder.segments())
    times = []
    for path in (folder.lease, *(path for kind in listed for *_, path in kind)):
        with suppress(OSError):  # a live run's retention has removed it
            times.append(path.stat().st_mtime)
    return max(times, default=None)


def _recoverable(catalog: Catalog) -> tuple[list[tuple[int, int]], tuple[int, int] | None]:
    """Ranges of steps that can be rebuilt, and which of these from memory."""
    if not (catalog.copies or any(holds_state(stage) for stage in catalog.staging)):
        return recoverable(catalog), None
    # With torch, which nothing else here needs.
    from lowdiff.recovery.sources.chooser import plan_in_memory

    plan = None
    try:
        plan = plan_in_memory(catalog, None)
    except RunInUse as error:
        Code.REPLICA_MEMORY_IN_USE.warn(f"{error}; what replicas left in memory is not listed")
    memory = None if plan is None else plan.range
    return recoverable(catalog, memory), memory


def _differentials(catalog: Catalog) -> StoredDifferentials | None:
    whole: list[StepRange] = []
    size = staged = 0
    for span in spans_of(catalog):
        shards = [catalog.of(span.incarnation, rank) for rank in range(span.world_size)]
        for first, last in shared_ranges(
            shards, span.base + 1, 1 << 63 if span.last is None else span.last
        ):
            whole.append(StepRange(first, last))
            size += sum(records.framed_bytes(first, last) for records in shards)
            staged += len(set().union(*(r.only_staged(first, last) for r in shards)))
    if not whole:
        return None
    count = sum(steps.last - steps.first + 1 for steps in whole)
    return StoredDifferentials(whole[0].first, whole[-1].last, count, size, staged)


@dataclass(frozen=True, slots=True)
class Forecast:
    """Reading that a recovery would take.

    Attributes:
        step: Where it leads.
        base: Step of the snapshot it starts from, or of what replicas left in memory.
        base_path: Folder of that snapshot, or of the first rank's replica.
        in_memory: Whether it starts from memory, which a reboot ends.
        snapshot_bytes: Bytes of what it starts from.
        differentials: Number of steps to replay.
        differential_bytes: Stored bytes of them, over all ranks' shards.
        memory_bytes: Most memory it takes.
        free_bytes: Memory that is free now.
    """

    step: int
    base: int
    base_path: str
    in_memory: bool
    snapshot_bytes: int
    differentials: int
    differential_bytes: int
    memory_bytes: int
    free_bytes: int

    def document(self) -> dict[str, Any]:
        """As JSON content."""
        return asdict(self)


def forecast(
    run: str | Path, step: int | None = None, staging: str | Path | None = None
) -> Forecast:
    """Plan a recovery; reads no tensor, and compares no checksum of the snapshot.

    Args:
        run: The run folder, or the URL of its store, of which the needed part is fetched.
        step: Which step; None for the newest.
        staging: Where the run's staging memory lives, if it was set by hand.

    Raises:
        NotARun: If there is no run.
        StepNotFound: If the step cannot be rebuilt.
    """
    root = staging_to_read(staging)
    if not is_url(run):
        return _forecast(scan(RunFolder(Path(run)), [root]), step)
    with temporary_folder() as folder:
        fetch_history(ObjectStore(str(run)), folder, step)
        return _forecast(scan(folder, [root]), step)


def _forecast(catalog: Catalog, step: int | None) -> Forecast:
    # With torch, which nothing else here needs.
    from lowdiff.recovery.replay.sizing import free_bytes, needed_bytes
    from lowdiff.recovery.search import plan_best
    from lowdiff.recovery.sources.chooser import MemoryPlan

    plan = plan_best(catalog, step)
    if isinstance(plan, MemoryPlan):
        base, path = plan.common, plan.paths[0].parent
        size = sum(path.stat().st_size for path in plan.paths)
    else:
        base, path, size = plan.base.step, plan.base.folder, plan.base.bytes
    return Forecast(
        step=plan.step,
        base=base,
        base_path=str(path),
        in_memory=isinstance(plan, MemoryPlan),
        snapshot_bytes=size,
        differentials=len(plan.steps),
        differential_bytes=bytes_of(plan.steps),
        memory_bytes=needed_bytes(size),
        free_bytes=free_bytes(),
    )
