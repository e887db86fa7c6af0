"""What a recovery would do, before it does it: base, differentials, tiers, bytes, time, memory."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from lowdiff.errors import DamagedFile, StepNotFound
from lowdiff.layout import torch_dtype
from lowdiff.persistence.catalog import Catalog, scan
from lowdiff.persistence.codec import Codec
from lowdiff.persistence.differentials import read_differential
from lowdiff.persistence.fetching import fetch_history, temporary_folder
from lowdiff.persistence.object_store import ObjectStore, is_url
from lowdiff.persistence.paths import RunFolder, staging_to_read
from lowdiff.persistence.records import StoredRecord
from lowdiff.persistence.sections import max_payload_bytes
from lowdiff.persistence.snapshots import check_shard
from lowdiff.recovery.damage import Finding, first_gap, judge
from lowdiff.recovery.engine import plan_best
from lowdiff.recovery.in_memory import MemoryPlan, plan_in_memory, with_steps_in_memory
from lowdiff.recovery.load import empty_state
from lowdiff.recovery.optimizers import granularity, settle_kernels
from lowdiff.recovery.plan import PlannedStep, RecoveryPlan, plan_recovery, usable_snapshots
from lowdiff.recovery.replay import ReplayOptions, plan_units
from lowdiff.recovery.sizing import (
    BLOCK_ELEMENTS,
    SECONDS_PER_UNIT,
    free_bytes,
    needed_bytes,
    step_seconds,
)
from lowdiff.recovery.state import OptimizerState
from lowdiff.types import Block, Fence

#: Measured on two cores of a virtual machine, of a snapshot that is not in the page cache: 0.7 to 0.9e9.
_SNAPSHOT_BYTES_PER_SECOND = 1.0e9
#: Differentials that are decoded to see how long that takes.
_DECODED = 3
#: Of a parameter that its optimizer cannot step by blocks, as many rows are tried.
_TRIED_ELEMENTS = 1 << 18


@dataclass(frozen=True, slots=True)
class Forecast:
    """What a recovery would do.

    Attributes:
        step: Where it leads.
        base: Step of the snapshot it starts from, or of what replicas left in memory.
        base_path: Folder of that snapshot, or of the first rank's replica.
        in_memory: Whether it starts from memory, which a reboot ends.
        snapshot_bytes: Bytes of what it starts from.
        differentials: Number of steps to replay.
        differential_bytes: Stored bytes of them, over all ranks' shards.
        shards: Tier (``"staging"`` or ``"local"``) -> number of shards to read from it.
        ranks: World sizes met on the way, in order.
        incarnations: Incarnations met on the way, in order.
        elements: Elements of the model.
        workers: Threads that would replay.
        predicted_seconds: On this machine, if it is idle and the files are in the page cache.
        memory_bytes: Most memory it takes.
        free_bytes: Memory that is free now.
        findings: What is damaged or missing in the run; none of it lies on this way.
    """

    step: int
    base: int
    base_path: str
    in_memory: bool
    snapshot_bytes: int
    differentials: int
    differential_bytes: int
    shards: dict[str, int]
    ranks: tuple[int, ...]
    incarnations: tuple[int, ...]
    elements: int
    workers: int
    predicted_seconds: float
    memory_bytes: int
    free_bytes: int
    findings: tuple[str, ...]

    def document(self) -> dict[str, Any]:
        """As JSON content."""
        return asdict(self)


@dataclass(frozen=True, slots=True, eq=False)
class _Way:
    """A plan, wherever it starts.

    Attributes:
        bytes: What is read of the base, which takes as much memory.
        lives: Of the base and of each step.
        reads: Differentials, in order.
    """

    step: int
    base: int
    path: Path
    in_memory: bool
    bytes: int
    lives: tuple[int, ...]
    reads: tuple[PlannedStep, ...]

    @classmethod
    def of_snapshot(cls, plan: RecoveryPlan) -> _Way:
        """From the disk."""
        base = plan.base
        return cls(
            step=plan.step,
            base=base.step,
            path=base.folder,
            in_memory=False,
            bytes=base.bytes,
            lives=(base.incarnation, *(planned.incarnation for planned in plan.steps)),
            reads=plan.steps,
        )

    @classmethod
    def of_replicas(cls, plan: MemoryPlan) -> _Way:
        """From what replicas left; it is mapped, but each page that a step writes is copied."""
        size = sum(path.stat().st_size for path in plan.paths)
        return cls(
            step=plan.step,
            base=plan.common,
            path=plan.paths[0].parent,
            in_memory=True,
            bytes=size,
            lives=(plan.incarnation, *(planned.incarnation for planned in plan.steps)),
            reads=plan.steps,
        )


@dataclass(frozen=True, slots=True)
class _Reading:
    """What reading the differentials came to.

    Attributes:
        shards: As in `Forecast`.
        stored_bytes: Over all ranks' shards.
        seconds: Processor time of the one thread that reads and decodes all of them.
    """

    shards: dict[str, int]
    stored_bytes: int
    seconds: float


def forecast(
    run: str | Path,
    step: int | None = None,
    *,
    staging: str | Path | None = None,
    options: ReplayOptions | None = None,
) -> Forecast:
    """Plan a recovery, check what it would read, and predict its cost; builds no state.

    Args:
        run: The run folder, or the URL of its store, of which the needed part is fetched.
        step: Which step; None for the newest.
        staging: Where the run's staging memory lives, if it was set by hand.
        options: Workers and block size.

    Raises:
        NotARun: If there is no run.
        StepNotFound: If the step cannot be rebuilt; names the file or the rank that lacks it.
    """
    root = staging_to_read(staging)
    own = options or ReplayOptions()
    if not is_url(run):
        return _forecast(RunFolder(Path(run)), root, step, own)
    with temporary_folder() as folder:
        fetch_history(ObjectStore(str(run)), folder, step, [root])
        return _forecast(folder, root, step, own)


def _forecast(folder: RunFolder, root: Path, step: int | None, options: ReplayOptions) -> Forecast:
    catalog = scan(folder, [root])
    memory = plan_best(catalog, step)
    way, passed_over = (
        _sound_way(catalog, step) if memory is None else (_Way.of_replicas(memory), [])
    )
    failures = [finding.message for finding in judge(folder, catalog)[0]]
    fence = catalog.incarnations[way.lives[-1]].fence
    read = _read(way.reads, fence)
    seconds = (
        way.bytes / _SNAPSHOT_BYTES_PER_SECOND
        + read.seconds
        + _stepping_seconds(way, fence, options) * len(way.reads)
    )
    return Forecast(
        step=way.step,
        base=way.base,
        base_path=str(way.path),
        in_memory=way.in_memory,
        snapshot_bytes=way.bytes,
        differentials=len(way.reads),
        differential_bytes=read.stored_bytes,
        shards=read.shards,
        ranks=tuple(dict.fromkeys(len(planned.sources) for planned in way.reads)),
        incarnations=tuple(dict.fromkeys(way.lives)),
        elements=fence.layout.elements,
        workers=options.workers,
        predicted_seconds=seconds,
        memory_bytes=needed_bytes(way.bytes),
        free_bytes=free_bytes(),
        findings=(*failures, *passed_over),
    )


def _sound_way(catalog: Catalog, step: int | None) -> tuple[_Way, list[str]]:
    """The way from the newest base whose bytes hold, and what is wrong with newer ones."""
    passed_over: list[str] = []
    while True:
        try:
            plan = plan_recovery(catalog, step)
        except StepNotFound as error:
            raise _explained(catalog, error, passed_over) from error
        try:
            for manifest in plan.base.manifests:
                check_shard(plan.base.folder, manifest)
        except DamagedFile as error:
            passed_over.append(Finding.of(error).message)
            others = tuple(s for s in catalog.snapshots if s is not plan.base)
            catalog = replace(catalog, snapshots=others)
        else:
            served = (f"{what}; an older snapshot serves instead" for what in passed_over)
            return _Way.of_snapshot(plan), list(served)


def _explained(catalog: Catalog, error: StepNotFound, passed_over: Sequence[str]) -> StepNotFound:
    """With the snapshots that are damaged, the file that lacks the first missing step, and memory."""
    bases = [s.step for s in usable_snapshots(catalog) if error.step and s.step <= error.step]
    gap = first_gap(catalog, bases[-1], error.step) if bases and error.step else None
    more = [*passed_over, *([gap.message] if gap is not None and gap.path is not None else [])]
    memory = plan_in_memory(catalog, None)
    ranges = with_steps_in_memory(error.recoverable, None if memory is None else memory.range)
    why = f"{error.why} ({'; '.join(more)})" if more else error.why
    return StepNotFound(catalog.root, error.step, ranges, why)


def _read(reads: Sequence[PlannedStep], fence: Fence) -> _Reading:
    """Read what a replay reads, and decode some of it."""
    codec = Codec(max_payload_bytes=max_payload_bytes(fence.layout))
    shards: Counter[str] = Counter()
    stored = 0
    decoded: list[float] = []
    sampled = range(0, len(reads), max(1, len(reads) // _DECODED))
    started = time.thread_time()
    for number, planned in enumerate(reads):
        found = planned.shards
        for shard in found:
            shards["staging" if shard.staged else "local"] += 1
            stored += shard.record.header.body_bytes
        if number in sampled:
            decoded.append(min(_decode_seconds(found, codec) for _ in range(2)))
    # What the samples took is in it, too, but they are few, or nothing takes long.
    reading = time.thread_time() - started
    mean = sum(decoded) / max(1, len(decoded))
    return _Reading(dict(shards), stored, reading + mean * len(reads))


def _decode_seconds(shards: Sequence[StoredRecord], codec: Codec) -> float:
    started = time.thread_time()
    for shard in shards:
        read_differential(shard, codec)
    return time.thread_time() - started


def _stepping_seconds(way: _Way, fence: Fence, options: ReplayOptions) -> float:
    """What the workers take for one step, if as many as there are units can share it."""
    if not way.reads:
        return 0.0
    settle_kernels()
    codec = Codec(max_payload_bytes=max_payload_bytes(fence.layout))
    last = read_differential(way.reads[-1].shards[0], codec)
    state = empty_state(way.step, fence)
    state.optimizers = [OptimizerState(list(done.consumed), {}) for done in last.optimizers]
    units = plan_units(state, fence, options)
    group_of = {
        name: g
        for spec in fence.optimizers
        for g, names in enumerate(spec.groups)
        for name in names
    }

    @cache
    def tried(optimizer: int, group: int, dtype: str, shape: tuple[int, ...]) -> float:
        hyper = last.optimizers[optimizer].consumed[group]
        return step_seconds(fence.optimizers[optimizer], hyper, torch_dtype(dtype), shape)

    def seconds(optimizer: int, block: Block) -> float:
        spec = fence.layout.parameters[block.parameter]
        of = optimizer, group_of[spec.name], spec.dtype
        if granularity(fence.optimizers[optimizer]) == "element":
            # A line through two sizes: models have parameters of many.
            size, least = options.block_elements or BLOCK_ELEMENTS, tried(*of, (64,))
            return least + max(0.0, tried(*of, (size,)) - least) / size * (block.stop - block.start)
        shape = _at_most(spec.shape)
        return tried(*of, shape) * spec.numel / max(1, math.prod(shape))

    total = sum(
        SECONDS_PER_UNIT + sum(seconds(unit.optimizer, block) for block in unit.blocks)
        for unit in units
    )
    return total / max(1, min(options.workers, len(units)))


def _at_most(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape with fewer rows, if it is too large to be tried."""
    row = math.prod(shape[1:])
    return (max(1, min(shape[0], _TRIED_ELEMENTS // max(1, row))), *shape[1:]) if shape else shape
