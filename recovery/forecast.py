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
from lowdiff.persistence.paths import RunFolder, default_staging_root
from lowdiff.persistence.records import StoredRecord
from lowdiff.persistence.sections import max_payload_bytes
from lowdiff.persistence.snapshots import check_shard
from lowdiff.recovery.damage import Finding, first_gap, judge
from lowdiff.recovery.load import empty_state
from lowdiff.recovery.optimizers import granularity, settle_kernels
from lowdiff.recovery.plan import RecoveryPlan, plan_recovery, usable_snapshots
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

#: Measured on one core: checksum and copy of a snapshot.
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
        base: Step of the snapshot it starts from.
        base_path: Folder of that snapshot.
        snapshot_bytes: Bytes of it.
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
    root = default_staging_root(Path(run)) if staging is None else Path(staging)
    own = options or ReplayOptions()
    if not is_url(run):
        return _forecast(RunFolder(Path(run)), root, step, own)
    with temporary_folder() as folder:
        fetch_history(ObjectStore(str(run)), folder, step, [root])
        return _forecast(folder, root, step, own)


def _forecast(folder: RunFolder, root: Path, step: int | None, options: ReplayOptions) -> Forecast:
    catalog = scan(folder, [root])
    plan, passed_over = _sound_plan(catalog, step)
    failures = [finding.message for finding in judge(folder, catalog)[0]]
    fence = catalog.incarnations[plan.incarnation].fence
    read = _read(plan, fence)
    seconds = (
        plan.base.bytes / _SNAPSHOT_BYTES_PER_SECOND
        + read.seconds
        + _stepping_seconds(plan, fence, options) * len(plan.reads)
    )
    lives = [plan.base.incarnation, *(planned.incarnation for planned in plan.steps)]
    return Forecast(
        step=plan.step,
        base=plan.base.step,
        base_path=str(plan.base.folder),
        snapshot_bytes=plan.base.bytes,
        differentials=len(plan.reads),
        differential_bytes=read.stored_bytes,
        shards=read.shards,
        ranks=tuple(dict.fromkeys(len(planned.sources) for planned in plan.reads)),
        incarnations=tuple(dict.fromkeys(lives)),
        elements=fence.layout.elements,
        workers=options.workers,
        predicted_seconds=seconds,
        memory_bytes=needed_bytes(plan.loaded_bytes),
        free_bytes=free_bytes(),
        findings=(*failures, *passed_over),
    )


def _sound_plan(catalog: Catalog, step: int | None) -> tuple[RecoveryPlan, list[str]]:
    """The plan from the newest base whose bytes hold, and what is wrong with newer ones."""
    passed_over: list[str] = []
    while True:
        try:
            plan = plan_recovery(catalog, step)
        except StepNotFound as error:
            raise _explained(catalog, error) from error
        try:
            for manifest in plan.base.manifests:
                check_shard(plan.base.folder, manifest)
        except DamagedFile as error:
            passed_over.append(f"{Finding.of(error).message}; an older snapshot serves instead")
            others = tuple(s for s in catalog.snapshots if s is not plan.base)
            catalog = replace(catalog, snapshots=others)
        else:
            return plan, passed_over


def _explained(catalog: Catalog, error: StepNotFound) -> StepNotFound:
    """With the file that lacks the first missing step, if there is one."""
    bases = [s.step for s in usable_snapshots(catalog) if error.step and s.step <= error.step]
    gap = first_gap(catalog, bases[-1], error.step) if bases and error.step else None
    if gap is None or gap.path is None:
        return error
    return StepNotFound(catalog.root, error.step, error.recoverable, f"{error.why} ({gap.message})")


def _read(plan: RecoveryPlan, fence: Fence) -> _Reading:
    """Read what a replay reads, and decode some of it."""
    codec = Codec(max_payload_bytes=max_payload_bytes(fence.layout))
    shards: Counter[str] = Counter()
    stored = 0
    decoded: list[float] = []
    sampled = range(0, len(plan.reads), max(1, len(plan.reads) // _DECODED))
    started = time.thread_time()
    for number, planned in enumerate(plan.reads):
        found = planned.shards
        for shard in found:
            shards["staging" if shard.staged else "local"] += 1
            stored += shard.record.header.body_bytes
        if number in sampled:
            decoded.append(min(_decode_seconds(found, codec) for _ in range(2)))
    # What the samples took is in it, too, but they are few, or nothing takes long.
    reading = time.thread_time() - started
    mean = sum(decoded) / max(1, len(decoded))
    return _Reading(dict(shards), stored, reading + mean * len(plan.reads))


def _decode_seconds(shards: Sequence[StoredRecord], codec: Codec) -> float:
    started = time.thread_time()
    for shard in shards:
        read_differential(shard, codec)
    return time.thread_time() - started


def _stepping_seconds(plan: RecoveryPlan, fence: Fence, options: ReplayOptions) -> float:
    """What the workers take for one step, if as many as there are units can share it."""
    if not plan.reads:
        return 0.0
    settle_kernels()
    codec = Codec(max_payload_bytes=max_payload_bytes(fence.layout))
    last = read_differential(plan.reads[-1].shards[0], codec)
    state = empty_state(plan.step, fence)
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
