"""What a recovery would do, before it does it: base, differentials, tiers, bytes, time, memory."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from lowdiff.errors import DamagedFile, StepNotFound
from lowdiff.layout import torch_dtype
from lowdiff.persistence.catalog import Catalog, scan
from lowdiff.persistence.codec import Codec
from lowdiff.persistence.differentials import read_differential
from lowdiff.persistence.fetching import fetch_history, temporary_folder
from lowdiff.persistence.object_store import ObjectStore, is_url
from lowdiff.persistence.paths import RunFolder, default_staging_root
from lowdiff.persistence.snapshots import check_shard
from lowdiff.recovery.damage import Finding, first_gap, judge
from lowdiff.recovery.optimizers import granularity, settle_kernels
from lowdiff.recovery.plan import RecoveryPlan, plan_recovery, usable_snapshots
from lowdiff.recovery.replay import ReplayOptions
from lowdiff.recovery.sizing import BLOCK_ELEMENTS, free_bytes, needed_bytes, seconds_per_element
from lowdiff.types import Fence

#: Measured on one core: checksum and copy of a snapshot; decoding of stored differentials.
_SNAPSHOT_BYTES_PER_SECOND, _STORED_BYTES_PER_SECOND = 1.0e9, 0.35e9


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
    shards: Counter[str] = Counter()
    stored = 0
    for planned in plan.reads:
        for shard in planned.shards:
            shards["staging" if shard.staged else "local"] += 1
            stored += shard.record.header.body_bytes
    seconds = (
        plan.base.bytes / _SNAPSHOT_BYTES_PER_SECOND
        + stored / _STORED_BYTES_PER_SECOND / options.workers
        + _step_seconds(plan, fence, options) * len(plan.reads) / options.workers
    )
    lives = [plan.base.incarnation, *(planned.incarnation for planned in plan.steps)]
    return Forecast(
        step=plan.step,
        base=plan.base.step,
        base_path=str(plan.base.folder),
        snapshot_bytes=plan.base.bytes,
        differentials=len(plan.reads),
        differential_bytes=stored,
        shards=dict(shards),
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


def _step_seconds(plan: RecoveryPlan, fence: Fence, options: ReplayOptions) -> float:
    """Processor time of one step of all optimizers, each tried on a block of its own."""
    if not plan.reads:
        return 0.0
    settle_kernels()
    first = read_differential(plan.reads[0].shards[0], Codec())
    specs = {spec.name: spec for spec in fence.layout.parameters}
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    total = 0.0
    for spec, done in zip(fence.optimizers, first.optimizers, strict=True):
        for names, hyper in zip(spec.groups, done.consumed, strict=True):
            numel = sum(specs[name].numel for name in names)
            if numel and granularity(spec) == "element":
                size = options.block_elements or BLOCK_ELEMENTS
                dtype = torch_dtype(specs[names[0]].dtype)
                total += numel * seconds_per_element(spec, hyper, dtype, size)
    torch.set_num_threads(before)
    return total
