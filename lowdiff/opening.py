"""How an incarnation begins: lock, agree, recover, fence, and only then stage (rule R4)."""

from __future__ import annotations

import logging
import os
import socket
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch.distributed as dist
from torch.amp.grad_scaler import GradScaler

from lowdiff.agreement import Ranks
from lowdiff.attached import Attached
from lowdiff.averages import Averages, LiveAverage, find_averages, followed_names
from lowdiff.capture import LARGE_ITEM_BYTES, ItemTracker, Stateful, check_stateful
from lowdiff.compressors.feedback import RotatingResidual
from lowdiff.environment import environment_of
from lowdiff.errors import ConfigError, RunInUse, RunMismatch
from lowdiff.persistence.catalog import Catalog, scan
from lowdiff.persistence.constants import write_constants
from lowdiff.persistence.durable import make_directory
from lowdiff.persistence.fences import create_run, new_run_id, read_run_id, write_fence
from lowdiff.persistence.locks import FileLock
from lowdiff.persistence.paths import StagingFolder
from lowdiff.persistence.staging import StagingLog
from lowdiff.persistence.writer_process import WriterProcess
from lowdiff.persistence.writer_settings import WriterSettings
from lowdiff.remote import fetch_from_store, run_in_store
from lowdiff.residuals import StagedResidual
from lowdiff.resuming import Start, class_of, load_start, recover_together
from lowdiff.session import Session
from lowdiff.settings import Settings
from lowdiff.snapshot import constant_images
from lowdiff.stager import Stager
from lowdiff.types import ITEM_BYTES, Fence

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
    description = f"process {os.getpid()} on {socket.gethostname()} (rank {ranks.rank})"
    try:
        with ranks.together():
            make_directory(lock.path.parent)
            if not lock.acquire(description):
                _logger.warning("waiting up to %.0f s for %s", settings.lock_seconds, lock.holder())
                if not lock.acquire(description, timeout_seconds=settings.lock_seconds):
                    raise RunInUse(settings.run, lock.holder(), settings.lock_seconds)
    except BaseException:
        lock.release()
        raise
    return lock


def _agreed_catalog(
    settings: Settings, ranks: Ranks, imported: Path, restore: str, step: int | None
) -> Catalog:
    """The run's files as every rank sees them, after fetching what only others or a store have.

    Durable files become part of this rank's run folder; staged ones are needed only now.
    """
    folder = settings.folder
    with ranks.together():
        known = read_run_id(folder) if folder.run_file.is_file() else None
    ids = {run_id for run_id in ranks.gather(known) if run_id is not None}
    if len(ids) > 1:
        raise RunMismatch(f"the ranks' folders {settings.run} belong to different runs")
    remote_id = run_in_store(settings, ranks)
    if ids and remote_id not in (None, *ids):
        raise RunMismatch(
            f"{settings.store} holds another run than {settings.run}; give each run its own URL"
        )
    proposal = ranks.gather(new_run_id())[0]
    run_id = remote_id or (ids.pop() if ids else proposal)
    with ranks.together():
        create_run(folder, run_id)
        _wait_for_writers(settings, run_id)
    ranks.share_files(_visible(settings.staging / run_id, "*.chunk"), imported / run_id)
    _share_run(settings, ranks)
    if remote_id is not None:
        roots = [settings.staging, imported]
        fetch_from_store(settings, ranks, step, roots, fences_only=restore == "none")
        _share_run(settings, ranks)
    with ranks.together():
        return scan(folder, [settings.staging, imported])


def _share_run(settings: Settings, ranks: Ranks) -> None:
    for pattern in ("rank-*.json", "*.safetensors", "*.seg"):
        ranks.share_files(_visible(settings.run, pattern), settings.run)


def _wait_for_writers(settings: Settings, run_id: str) -> None:
    """Let the writers of dead trainers finish: until then files still appear and are collected.

    A writer that cannot finish, because the disk is full, is not waited for longer: its records
    are read from staging.
    """
    for stage in StagingFolder.all_of_run(settings.staging, run_id):
        lock = FileLock(stage.writer_lock)
        if lock.acquire(f"process {os.getpid()}", timeout_seconds=settings.lock_seconds):
            lock.release()
        else:
            _logger.warning("%s still works on %s; going on", lock.holder(), stage.root)


def _visible(folder: Path, pattern: str) -> list[tuple[str, Path]]:
    files = (p for p in folder.rglob(pattern) if p.is_file() and not p.is_symlink())
    return [(str(path.relative_to(folder)), path) for path in files]


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
    averages = find_averages(stateful, attached)
    with ranks.together():
        check_stateful(stateful)
        readers = {name: thing.state_dict for name, thing in stateful.items()} | {
            name: partial(average.outline, attached.layout) for name, average in averages.items()
        }
        tracker = ItemTracker(attached.constants, readers, attached.device)
    lock = _locked(settings, ranks)
    try:
        with tempfile.TemporaryDirectory(prefix="lowdiff-") as imported:
            catalog = _agreed_catalog(settings, ranks, Path(imported), restore, step)
            state = None
            if restore != "none":
                state = recover_together(settings, attached, catalog, ranks, step)
            with ranks.together():
                start = load_start(
                    settings, attached, stateful, averages, tracker, catalog, ranks, state, restore
                )
        return _begin(settings, attached, stateful, averages, tracker, catalog, ranks, lock, start)
    except BaseException:
        lock.release()
        raise


def _begin(
    settings: Settings,
    attached: Attached,
    stateful: Mapping[str, Stateful],
    averages: Mapping[str, LiveAverage],
    tracker: ItemTracker,
    catalog: Catalog,
    ranks: Ranks,
    lock: FileLock,
    start: Start,
) -> Opened:
    """Fence on every rank; then staging, writer and session."""
    incarnation = max(ranks.gather(catalog.num_incarnations))
    parent = max(catalog.incarnations, default=None) if start.continues else None
    compressor = settings.compressor
    with ranks.together():
        constants = write_constants(settings.folder, constant_images(attached))
    if len(set(ranks.gather(constants))) > 1:
        constants = ""  # DDP was told to leave them as they are: every rank stores its own
    with ranks.together():  # nobody stages before every rank's fence is durable
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
                stateful={name: class_of(thing) for name, thing in stateful.items()},
                averages=followed_names(averages, attached.layout),
                constants=constants,
            ),
        )
    staging = StagingFolder.of(settings.staging, catalog.run_id, incarnation, ranks.rank)
    with ExitStack() as undo:
        with ranks.together():
            session = _session(
                settings,
                attached,
                stateful,
                averages,
                tracker,
                ranks,
                staging,
                start,
                constants,
                undo,
            )
            if start.needs_snapshot:
                session.snapshot(required=True)
                session.stager.wait_for_snapshot()  # G3 holds from the return of attach
            if settings.store is not None:
                session.stager.wait_for_store(start.step)
        undo.pop_all()
    if ranks.rank == 0:
        _name_large_items(tracker)
    return Opened(session, lock, ranks, staging, start.items)


def _session(
    settings: Settings,
    attached: Attached,
    stateful: Mapping[str, Stateful],
    averages: Mapping[str, LiveAverage],
    tracker: ItemTracker,
    ranks: Ranks,
    staging: StagingFolder,
    start: Start,
    constants: str,
    undo: ExitStack,
) -> Session:
    """This rank's staging, writer and session; ``undo`` learns how to take them back."""
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
        run_id=staging.run_id,
        world_size=ranks.world_size,
        chunk_bytes=min(max(model_bytes // 8, _MIN_CHUNK_BYTES), _MAX_CHUNK_BYTES),
        cap_bytes=4 * model_bytes + _MAX_CHUNK_BYTES,
    )
    writer = WriterProcess(
        WriterSettings(
            run=str(settings.run),
            staging_root=str(settings.staging),
            run_id=staging.run_id,
            incarnation=staging.incarnation,
            rank=ranks.rank,
            world_size=ranks.world_size,
            base_step=start.step,
            trainer_pid=os.getpid(),
            batch_size=settings.batch_size,
            flush_seconds=settings.flush_seconds,
            keep_snapshots=settings.retention,
            store=settings.store,
        )
    )
    undo.callback(writer.stop)
    session = Session(
        attached=attached,
        settings=settings,
        incarnation=staging.incarnation,
        rank=ranks.rank,
        world_size=ranks.world_size,
        step=start.step,
        reducer=settings.compressor.bind(attached.layout, residual, ranks.training_group),
        residual=residual,
        tracker=tracker,
        items=start.items,
        stager=Stager(log, writer, settings, ranks.rank),
        scaler=_hook_scaler(attached, stateful),
        averages=Averages(averages, attached),
        shares_constants=constants != "",
    )
    undo.callback(session.detach)
    return session


def _name_large_items(tracker: ItemTracker) -> None:
    large = {name: size for name, size in tracker.sizes().items() if size > LARGE_ITEM_BYTES}
    if large:
        _logger.info(
            "a step logs these whole if it changes them: %s",
            ", ".join(f"{name} ({size / 1e6:.1f} MB)" for name, size in large.items()),
        )


def _hook_scaler(attached: Attached, stateful: Mapping[str, Stateful]) -> GradScaler | None:
    """The gradient scaler whose scale the compressed gradients carry, if there is one.

    DDP's hook runs before the scaler divides. Without DDP gradients are compressed when the
    optimizer steps, where only a fused optimizer still sees them scaled.
    """
    fused = any(group.get("fused") for o in attached.optimizers for group in o.param_groups)
    if attached.ddp is None and not fused:
        return None
    return next((s for s in stateful.values() if isinstance(s, GradScaler)), None)
