"""How an incarnation begins: lock, agree, recover, fence, and only then stage (rule R4)."""

from __future__ import annotations

import logging
import os
import socket
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.amp.grad_scaler import GradScaler

from lowdiff.agreement import Ranks
from lowdiff.attached import Attached
from lowdiff.capture import ItemTracker, Stateful
from lowdiff.compressors.feedback import RotatingResidual
from lowdiff.environment import environment_of
from lowdiff.errors import ConfigError, LowDiffError, RunInUse, RunMismatch
from lowdiff.persistence.catalog import Catalog, scan
from lowdiff.persistence.codec import Codec
from lowdiff.persistence.differentials import read_differential
from lowdiff.persistence.durable import make_directory
from lowdiff.persistence.fences import create_run, new_run_id, read_run_id, write_fence
from lowdiff.persistence.locks import FileLock
from lowdiff.persistence.paths import StagingFolder
from lowdiff.persistence.staging import StagingLog
from lowdiff.persistence.writer_process import WriterProcess
from lowdiff.persistence.writer_settings import WriterSettings
from lowdiff.recovery.engine import recover_from
from lowdiff.recovery.plan import plan_recovery
from lowdiff.recovery.replay import ReplayOptions
from lowdiff.recovery.state import RecoveredState, inherit
from lowdiff.residuals import StagedResidual, read_residual
from lowdiff.restore import (
    check_match,
    load_gradients,
    load_items,
    load_optimizers,
    load_parameters,
)
from lowdiff.session import Session
from lowdiff.settings import Settings
from lowdiff.types import ITEM_BYTES, Fence, Layout

_logger = logging.getLogger(__name__)

_MIN_CHUNK_BYTES = 1 << 20
_MAX_CHUNK_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, eq=False)
class Opened:
    """A running session and what closing it needs.

    Attributes:
        random_states: Items to restore when the first step begins.
    """

    session: Session
    lock: FileLock
    ranks: Ranks
    staging: StagingFolder
    random_states: Mapping[str, bytes]


def training_group(attached: Attached) -> dist.ProcessGroup | None:
    """The group over which gradients are averaged.

    Raises:
        ConfigError: If several processes train without DDP.
    """
    if attached.ddp is not None:
        group: dist.ProcessGroup = attached.ddp.process_group
        return group
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        raise ConfigError(
            f"{dist.get_world_size()} processes train a model without DistributedDataParallel, so "
            "nobody averages its gradients; wrap it in DDP before attach"
        )
    return None


def _locked(settings: Settings, ranks: Ranks) -> FileLock:
    """Hold this rank's lock on the run; on return every rank holds its own."""
    lock = FileLock(settings.folder.lock(ranks.rank))
    error: LowDiffError | None = None
    make_directory(lock.path.parent)
    description = f"process {os.getpid()} on {socket.gethostname()} (rank {ranks.rank})"
    if not lock.acquire(description):
        _logger.warning("waiting up to %.0f s for %s", settings.lock_seconds, lock.holder())
        if not lock.acquire(description, timeout_seconds=settings.lock_seconds):
            error = RunInUse(settings.run, lock.holder(), settings.lock_seconds)
    try:
        ranks.raise_together(error)
    except LowDiffError:
        lock.release()
        raise
    return lock


def _agreed_catalog(settings: Settings, ranks: Ranks, imported: Path) -> Catalog:
    """The run's files as every rank sees them, after fetching what only others can see.

    Durable files become part of this rank's run folder; staged ones are needed only now.
    """
    folder = settings.folder
    known = read_run_id(folder) if folder.run_file.is_file() else None
    ids = {run_id for run_id in ranks.gather(known) if run_id is not None}
    if len(ids) > 1:
        raise RunMismatch(f"the ranks' folders {settings.run} belong to different runs")
    proposal = ranks.gather(new_run_id())[0]
    run_id = ids.pop() if ids else proposal
    create_run(folder, run_id)
    ranks.barrier()
    ranks.share_files(_visible(settings.run, "rank-*.json"), settings.run)
    ranks.share_files(_visible(settings.run, "rank-*.safetensors"), settings.run)
    ranks.share_files(_visible(settings.run, "*.seg"), settings.run)
    ranks.share_files(_visible(settings.staging / run_id, "*.chunk"), imported / run_id)
    return scan(folder, [settings.staging, imported])


def _visible(folder: Path, pattern: str) -> list[tuple[str, Path]]:
    files = (p for p in folder.rglob(pattern) if p.is_file() and not p.is_symlink())
    return [(str(path.relative_to(folder)), path) for path in files]


def _recover(
    settings: Settings,
    attached: Attached,
    catalog: Catalog,
    ranks: Ranks,
    step: int | None,
) -> RecoveredState | None:
    """The state to start from, the same on every rank; None for a run without history."""
    if not catalog.snapshots and step is None:
        if catalog.incarnations:
            _logger.warning(
                "%s holds no complete snapshot: its trainer died before the first one was "
                "durable; starting from step 0",
                settings.run,
            )
        return None
    # Ranks may see a dead trainer's writer drain at different moments: rank 0's view decides.
    error: LowDiffError | None = None
    state: RecoveredState | None = None
    try:
        target = plan_recovery(catalog, step).step if ranks.rank == 0 else -1
    except LowDiffError as failure:
        error, target = failure, -1
    ranks.raise_together(error)
    target = ranks.gather(target)[0]
    try:
        check_match(attached, catalog.incarnations[max(catalog.incarnations)].fence)
        options = ReplayOptions(num_workers=_workers_per_rank(ranks))
        state = recover_from(catalog, target, options)
    except LowDiffError as failure:
        error = failure
    ranks.raise_together(error)
    return state


def _workers_per_rank(ranks: Ranks) -> int:
    """Ranks on one machine share its cores."""
    here = socket.gethostname()
    neighbours = ranks.gather(here).count(here)
    return max(1, len(os.sched_getaffinity(0)) // neighbours)


def _residual_of(
    settings: Settings, catalog: Catalog, state: RecoveredState, layout: Layout, rank: int
) -> list[torch.Tensor | None]:
    """One old rank's residual at the state's step: exact from staging or its snapshot.

    After the loss of staging it is the snapshot's, which is older; training then continues from
    the exact state with a slightly different error feedback, and says so.
    """
    newest = catalog.incarnations[max(catalog.incarnations)]
    for number in (newest.number, state.fence.incarnation):
        stored = catalog.records.get((number, rank), {}).get(state.step)
        if stored is None:
            continue
        mark = read_differential(stored, Codec()).residual
        staging = StagingFolder.of(settings.staging, catalog.run_id, number, rank)
        found = mark and read_residual(staging.residual, layout, mark)
        if found:
            return list(found)
    if state.base_step != state.step and state.residuals[rank]:
        _logger.warning(
            "rank %d: the error-feedback residual of step %d is lost with its staging memory; "
            "using that of snapshot %d: the state is exact, the continuation is not bit-identical",
            rank,
            state.step,
            state.base_step,
        )
    return [state.residuals[rank].get(spec.name) for spec in layout.parameters]


def _inherited_residual(
    settings: Settings, catalog: Catalog, state: RecoveredState, layout: Layout, ranks: Ranks
) -> list[torch.Tensor | None]:
    """This rank's residual; with another world size, the mean over the old ranks."""
    old_ranks = len(state.residuals)
    if old_ranks == ranks.world_size:
        return _residual_of(settings, catalog, state, layout, ranks.rank)
    columns = zip(
        *(_residual_of(settings, catalog, state, layout, rank) for rank in range(old_ranks)),
        strict=True,
    )
    means: list[torch.Tensor | None] = []
    for column in columns:
        found = [residual for residual in column if residual is not None]
        # Averaged gradients divide by the world size, so the mean keeps what is owed in total.
        means.append(torch.stack(found).sum(0) / old_ranks if found else None)
    return means


def open_session(
    settings: Settings,
    attached: Attached,
    stateful: Mapping[str, Stateful],
    *,
    restore: str,
    step: int | None,
) -> Opened:
    """Begin an incarnation on every rank together.

    Raises:
        RunInUse: If a live trainer holds the run.
        RunMismatch: If its history belongs to another model or optimizer.
        StepNotFound: If ``step`` cannot be recovered.
    """
    ranks = Ranks(training_group(attached))
    tracker = ItemTracker(attached.constants, stateful, attached.device)
    lock = _locked(settings, ranks)
    try:
        with tempfile.TemporaryDirectory(prefix="lowdiff-") as imported:
            catalog = _agreed_catalog(settings, ranks, Path(imported))
            state = None
            if restore != "none":
                state = _recover(settings, attached, catalog, ranks, step)
            start = _start(settings, attached, stateful, tracker, catalog, ranks, state, restore)
        return _begin(settings, attached, stateful, tracker, catalog, ranks, lock, start)
    except BaseException:
        lock.release()
        raise


@dataclass(frozen=True, slots=True, eq=False)
class _Start:
    """Where an incarnation begins.

    Attributes:
        continues: Whether its history is part of the run's history from here on.
    """

    step: int
    continues: bool
    residual: list[torch.Tensor | None]
    items: Mapping[str, bytes]


def _start(
    settings: Settings,
    attached: Attached,
    stateful: Mapping[str, Stateful],
    tracker: ItemTracker,
    catalog: Catalog,
    ranks: Ranks,
    state: RecoveredState | None,
    restore: str,
) -> _Start:
    """Load what is to be restored into the live objects."""
    if state is None:
        return _Start(0, False, [], tracker.read())
    items = inherit(state.items, ranks.world_size)[ranks.rank]
    if restore == "model":
        load_parameters(state, attached)
        load_items(items, attached.constants, {})
        return _Start(0, False, [], tracker.read())
    residual = _inherited_residual(settings, catalog, state, attached.layout, ranks)
    load_parameters(state, attached)
    load_optimizers(state, attached)
    load_gradients(state, attached)
    load_items(items, attached.constants, stateful)
    return _Start(state.step, True, residual, items)


def _begin(
    settings: Settings,
    attached: Attached,
    stateful: Mapping[str, Stateful],
    tracker: ItemTracker,
    catalog: Catalog,
    ranks: Ranks,
    lock: FileLock,
    start: _Start,
) -> Opened:
    """Fence on every rank; then staging, writer and session."""
    incarnation = max(ranks.gather(catalog.num_incarnations))
    parent = max(catalog.incarnations, default=None) if start.continues else None
    compressor = settings.compressor
    write_fence(
        settings.folder,
        Fence(
            run_id=catalog.run_id,
            incarnation=incarnation,
            parent=parent,
            base_step=start.step,
            rank=ranks.rank,
            world_size=ranks.world_size,
            environment=environment_of(attached.device),
            layout=attached.layout,
            optimizers=attached.specs,
            compressor={"name": compressor.name, "settings": dict(compressor.settings())},
            names=attached.names,
        ),
    )
    ranks.barrier()  # nobody stages before every rank's fence is durable
    staging = StagingFolder.of(settings.staging, catalog.run_id, incarnation, ranks.rank)
    staging.root.mkdir(mode=0o700, parents=True)
    if attached.device.type == "cpu":
        residual: RotatingResidual = StagedResidual(staging.residual, attached.layout)
    else:
        residual = RotatingResidual.zeros(attached.layout, attached.device)
    if start.residual:
        residual.load(start.residual)
    model_bytes = sum(p.numel * ITEM_BYTES[p.dtype] for p in attached.layout.parameters)
    log = StagingLog(
        staging,
        run_id=catalog.run_id,
        world_size=ranks.world_size,
        chunk_bytes=min(max(model_bytes // 8, _MIN_CHUNK_BYTES), _MAX_CHUNK_BYTES),
        cap_bytes=4 * model_bytes + _MAX_CHUNK_BYTES,
    )
    writer = WriterProcess(
        WriterSettings(
            run=str(settings.run),
            staging_root=str(settings.staging),
            run_id=catalog.run_id,
            incarnation=incarnation,
            rank=ranks.rank,
            world_size=ranks.world_size,
            base_step=start.step,
            trainer_pid=os.getpid(),
            batch_size=settings.batch_size,
            flush_seconds=settings.flush_seconds,
            keep_snapshots=settings.retention,
        )
    )
    session = Session(
        attached=attached,
        settings=settings,
        incarnation=incarnation,
        rank=ranks.rank,
        world_size=ranks.world_size,
        step=start.step,
        reducer=compressor.bind(attached.layout, residual, ranks.training_group),
        residual=residual,
        tracker=tracker,
        items=start.items,
        log=log,
        writer=writer,
        scaler=next((s for s in stateful.values() if isinstance(s, GradScaler)), None),
    )
    if not start.continues:
        session.snapshot()
        session.wait_for_snapshot()  # G3 holds from the return of attach
    ranks.barrier()
    return Opened(session, lock, ranks, staging, start.items)
