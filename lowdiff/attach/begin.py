"""The parts of an incarnation, made once its fence is durable: staging, writer, queue, recorder, session."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial

import torch.distributed as dist
from torch.amp.grad_scaler import GradScaler

from lowdiff.attach.memory import Memory
from lowdiff.attach.publish import publisher_of
from lowdiff.attach.resume import Start
from lowdiff.commit.agreement import Agreement, Health
from lowdiff.commit.meter import Meter
from lowdiff.commit.queue import LogQueue, Queue, SnapshotQueue
from lowdiff.commit.replica_queue import ReplicaQueue, replica_settings
from lowdiff.commit.run_lock import RunLock, StagingArea
from lowdiff.commit.schedule import Cadence, Schedule
from lowdiff.commit.session import Session
from lowdiff.commit.sinks import Sink
from lowdiff.commit.staging import Staging
from lowdiff.commit.standby import Standby, all_items
from lowdiff.commit.storage import Storage, Trainer
from lowdiff.compressors.collectives import own_group
from lowdiff.compressors.feedback import RotatingResidual
from lowdiff.compressors.grouped import GroupedReducer
from lowdiff.core.events import Code
from lowdiff.model.averages import Averages
from lowdiff.model.binding import Attached
from lowdiff.model.items import Stateful, name_large_items
from lowdiff.model.ranks import Ranks
from lowdiff.model.tracked import Given, Live
from lowdiff.peers.copies import Copies
from lowdiff.peers.residuals import KeptResidual, Outgoing, Plan
from lowdiff.peers.spans import Spans
from lowdiff.peers.wards import ReplicaWard, SentWard, Ward
from lowdiff.persistence.files.durable import write_file
from lowdiff.persistence.files.paths import StagingFolder
from lowdiff.persistence.staging.log import StagingLog
from lowdiff.persistence.staging.settings import WriterSettings
from lowdiff.persistence.staging.status import holds_state
from lowdiff.persistence.writer.handle import WaitingWriter, WriterProcess
from lowdiff.protocols import Reducer
from lowdiff.recovery.publish.handle import PublisherProcess
from lowdiff.recovery.replica.handle import ReplicaProcess
from lowdiff.settings import Settings
from lowdiff.step.ddp_hook import HookState
from lowdiff.step.gradients import Gradients, RecordedGradients, Scaling
from lowdiff.step.proofs import Proofs
from lowdiff.step.recorder import Recorder
from lowdiff.step.residual import CopiedResidual, StagedResidual
from lowdiff.survivors.survivor import Survivor
from lowdiff.tuner.measured import Past
from lowdiff.types import Fence

#: Steps after which frozen parameters are read whole: the first of a life, and those of snapshots.
_AUDITED_FIRST = 3
#: So much is read in about a millisecond.
_CHEAP_BYTES = 16 << 20


@dataclass(frozen=True, slots=True, eq=False)
class Opened:
    """A running session and what closing it needs.

    Attributes:
        settings: Of the run.
        meter: Measures it for the tuner.
        survivor: Saves the state after a failure; None with another strategy.
        random_states: Items to restore when the first step begins.
        copies: On other nodes; None where there are none.
    """

    settings: Settings
    session: Session
    lock: RunLock
    staging: StagingArea
    ranks: Ranks
    meter: Meter
    random_states: Mapping[str, bytes]
    survivor: Survivor | None
    copies: Copies | None


def begin(
    settings: Settings,
    given: Given,
    ranks: Ranks,
    hook: HookState | None,
    fence: Fence,
    start: Start,
    memory: Memory,
    lock: RunLock,
    past: Past,
    left: Sequence[StagingFolder],
    waiting: WaitingWriter | None,
) -> Opened:
    """Make staging, writer and session; on return the base is durable on every rank."""
    if any(ranks.gather(any(map(holds_state, left)))) and settings.logs_steps:
        # Of a life that may never have begun, on whichever machine: only a snapshot after it makes
        # its memory void.
        start = replace(start, needs_snapshot=True)
    if settings.copies > 1:  # a copy begins with an image, as that of every rank
        start = replace(start, needs_snapshot=True)
    folder = StagingFolder.of(settings.staging_root, fence.run_id, fence.incarnation, ranks.rank)
    with ExitStack() as undo, ThreadPoolExecutor(1) as beside:
        # Staging folders go again, unless an incarnation begins with them.
        unused = undo.enter_context(ExitStack())
        # Here one rank may fail that others do not: its disk or memory is full, say.
        with ranks.together():
            area = _area(settings, fence, folder, undo, unused)
            publisher = publisher_of(settings, fence, folder, given.attached.module)
            if publisher is not None:
                undo.callback(publisher.stop)
            # A process takes half a second to start: memory is taken meanwhile.
            starting = beside.submit(
                WriterProcess, _writer_settings(settings, ranks, fence, start, left), waiting
            )
            undo.callback(_stop_started, starting)
            scaling = Scaling(_hook_scaler(given.attached, given.stateful))
            residual = _residual(settings, given.attached, folder, scaling)
            if start.residual:
                residual.load(start.residual)
            live = Live(
                attached=given.attached,
                tracker=given.tracker,
                residual=residual,
                averages=Averages(given.averages, given.attached),
                shares_constants=fence.constants != "",
                incarnation=fence.incarnation,
                rank=ranks.rank,
                world_size=ranks.world_size,
            )
            standby = _standby(settings, live, folder, memory)
            wards = _wards(settings, live, fence, memory, undo, unused)
            trainer = Trainer(folder, settings, ranks.rank, ranks.world_size)
            storage, queue = _queue(trainer, live, fence, memory, starting, publisher, undo)
            meter = Meter(folder, trainer.counters)
            elements = sum(spec.numel for spec in fence.layout.parameters)
            meter.note({**past.facts, "elements": float(elements)})
            cadence = Cadence(trainer, storage.writer, meter.recorder)
            cadence.begin(start.step, past)
            live.tracker.start(start.items, is_under_way=start.step > 0 and ranks.rank == 0)
        # All ranks make each process group at once, and wait there for one that failed before.
        copies = _copies(trainer, live, wards, ranks, memory, undo)
        recorder = _recorder(settings, live, fence, ranks, hook, scaling, memory)
        sinks: list[Sink] = [sink for sink in (standby, copies) if sink is not None]
        # The base names the residual; from then on the memory of the life before is not needed, and goes.
        unused.pop_all()
        with ranks.together():
            session = Session(
                live,
                recorder,
                trainer,
                storage,
                queue,
                Staging(area, trainer, storage, queue, live, meter.recorder, sinks),
                _agreement(settings, live, ranks, lock),
                Schedule(
                    cadence,
                    queue,
                    is_alone=ranks.world_size == 1,
                    audited_until=_audited_until(settings, live, start.step),
                ),
                meter,
                start.step,
            )
            undo.callback(session.detach)
            survivor = None if standby is None else Survivor(live, session, standby, folder)
            _make_base_durable(settings, session, fence, start)
        if memory.node.others:
            with ranks.together():
                if copies is not None:
                    copies.wait_for_base(start.step)
            with ranks.together():  # no rank can fail to begin any more
                if memory.node.first == ranks.rank:
                    write_file(settings.folder.begun(fence.incarnation), b"")
        meter.note(past.attached())
        session.start()
        if ranks.rank == 0:
            name_large_items(given.tracker)
        undo.pop_all()
    return Opened(settings, session, lock, area, ranks, meter, start.items, survivor, copies)


def _writer_settings(
    settings: Settings, ranks: Ranks, fence: Fence, start: Start, left: Sequence[StagingFolder]
) -> WriterSettings:
    return WriterSettings(
        run=str(settings.run),
        staging_root=str(settings.staging_root),
        run_id=fence.run_id,
        incarnation=fence.incarnation,
        rank=ranks.rank,
        world_size=ranks.world_size,
        base_step=start.step,
        trainer_pid=os.getpid(),
        batch_size=settings.batch_size,
        flush_seconds=settings.flush_seconds,
        retention=settings.retention,
        store=settings.store,
        logs_steps=settings.logs_steps,
        continues=start.continues,
        adopts=[stage.root.name for stage in left],
    )


def _stop_started(starting: Future[WriterProcess]) -> None:
    """Stop a writer that was started, if it came up; if not, its error is known."""
    if starting.exception() is None:
        starting.result().stop()


def _standby(
    settings: Settings, live: Live, folder: StagingFolder, memory: Memory
) -> Standby | None:
    """Make what survivors need, if anything would be lost without them.

    Where steps are staged on one node, they outlive every process. A node that is lost takes its part of
    them along, and without it no rank has the whole state but those that live.
    """
    if live.attached.is_sharded:
        return None  # nobody else has the shards of a rank
    if settings.strategy == "survivors":
        return Standby(folder, live, memory.node, memory.image_bytes)
    return Standby(folder, live, memory.node, 0) if memory.node.others else None


def _area(
    settings: Settings, fence: Fence, folder: StagingFolder, undo: ExitStack, unused: ExitStack
) -> StagingArea:
    area = StagingArea(folder, settings.folder, fence.life)
    unused.callback(folder.remove)
    undo.callback(area.release)
    return area


def _wards(
    settings: Settings,
    live: Live,
    fence: Fence,
    memory: Memory,
    undo: ExitStack,
    unused: ExitStack,
) -> list[Ward]:
    """Begin to keep what ranks on other nodes stage."""
    wards = []
    for rank in memory.peers.wards if settings.copies > 1 else ():
        folder = StagingFolder.copy_of(
            settings.staging_root, fence.run_id, fence.incarnation, rank, live.rank
        )
        area = _area(settings, fence, folder, undo, unused)
        wards.append(_ward(settings, live, fence, memory, area, undo))
    return wards


def _copies(
    trainer: Trainer,
    live: Live,
    wards: Sequence[Ward],
    ranks: Ranks,
    memory: Memory,
    undo: ExitStack,
) -> Copies | None:
    """Have other nodes keep what this rank stages."""
    peers, settings = memory.peers, trainer.settings
    if settings.copies == 1 or ranks.training_group is None:
        return None
    group = own_group(ranks.training_group)
    outgoing = None
    if settings.replicates_residual and peers.keepers:
        outgoing = Outgoing(live.residual, Plan(Spans(), len(peers.keepers), live.rank))
    copies = Copies(
        group,
        peers.keepers,
        wards,
        partial(all_items, live),
        sends_all=peers.sends_all,
        waits=not trainer.degrades,
        counters=trainer.counters,
        outgoing=outgoing,
    )
    undo.callback(copies.close, removes=False)
    return copies


def _ward(
    settings: Settings,
    live: Live,
    fence: Fence,
    memory: Memory,
    area: StagingArea,
    undo: ExitStack,
) -> Ward:
    if settings.strategy == "survivors":
        return Ward(area, live, None)
    log = _log(area.folder, fence, memory)
    if settings.logs_steps:
        layout, residual = live.residual.layout, None
        if settings.replicates_residual:
            residual = KeptResidual(area.folder.residual, layout)
        return Ward(area, live, log, residual)
    replica = _replica(settings, live, log, makes_images=False)
    undo.callback(replica.stop)
    kind = SentWard if area.folder.rank in memory.peers.sent else ReplicaWard
    return kind(area, live, log, replica)


def _replica(
    settings: Settings, live: Live, log: StagingLog, *, makes_images: bool
) -> ReplicaProcess:
    specs, world_size = live.attached.specs, live.world_size
    return ReplicaProcess(
        replica_settings(settings, log, world_size, makes_images=makes_images, specs=specs)
    )


def _log(folder: StagingFolder, fence: Fence, memory: Memory) -> StagingLog:
    return StagingLog(
        folder,
        run_id=fence.run_id,
        world_size=fence.world_size,
        chunk_bytes=memory.chunk_bytes,
        cap_bytes=memory.log_bytes,
    )


def _queue(
    trainer: Trainer,
    live: Live,
    fence: Fence,
    memory: Memory,
    starting: Future[WriterProcess],
    publisher: PublisherProcess | None,
    undo: ExitStack,
) -> tuple[Storage, Queue]:
    """Make the processes of a rank whose writer starts, and the queue that they empty."""
    settings, writer = trainer.settings, starting.result()
    if settings.strategy == "survivors":
        storage = Storage(writer)
        return storage, SnapshotQueue(trainer, storage)
    log = _log(trainer.folder, fence, memory)
    if settings.logs_steps:
        storage = Storage(writer, None, publisher)
        return storage, LogQueue(log, trainer, storage)
    makes_images = live.attached.is_on_host
    replica = _replica(settings, live, log, makes_images=makes_images)
    undo.callback(replica.stop)
    storage = Storage(writer, replica, publisher)
    return storage, ReplicaQueue(log, trainer, storage, replica, makes_images=makes_images)


def _recorder(
    settings: Settings,
    live: Live,
    fence: Fence,
    ranks: Ranks,
    hook: HookState | None,
    scaling: Scaling,
    memory: Memory,
) -> Recorder:
    attached = live.attached
    peers = () if settings.strategy == "survivors" else memory.peers.made
    replicas = attached.replicas
    reducer: Reducer
    if replicas is not None and settings.logs_steps:
        of_group = [dist.get_group_rank(replicas.group, peer) for peer in peers]
        bound = settings.compressor.bind(
            attached.exchanged, live.residual, replicas.group, of_group
        )
        reducer = GroupedReducer(bound, replicas.part, dict(zip(peers, of_group, strict=True)))
    else:
        group = ranks.training_group
        reducer = settings.compressor.bind(attached.layout, live.residual, group, peers)
    is_replayed = settings.strategy != "survivors"
    recorded = RecordedGradients(attached, hook, reducer, scaling, live.residual)
    return Recorder(
        live,
        reducer,
        recorded if is_replayed else Gradients(attached, hook),
        scaling,
        Proofs(attached, fence, ranks, is_replayed=is_replayed),
        watches=settings.watch if is_replayed else "",
        most_calls=memory.optimizer_steps,
        is_replayed=is_replayed,
        peers=peers,
    )


def _agreement(settings: Settings, live: Live, ranks: Ranks, lock: RunLock) -> Agreement:
    names = [spec.name for spec in live.attached.layout.parameters]
    return Agreement(ranks, lock, Health(names, ranks, raises=settings.on_error == "raise"))


def _audited_until(settings: Settings, live: Live, step: int) -> float:
    """Return the last step at which frozen parameters are read whole, though no snapshot is due.

    At every step where they are no larger than what trains, as a target network is, or small.
    """
    frozen_bytes = sum(tensor.nbytes for tensor in live.attached.frozen_parameters().values())
    trained_bytes = sum(spec.nbytes for spec in live.attached.layout.parameters)
    is_cheap = frozen_bytes <= max(trained_bytes, _CHEAP_BYTES)
    return math.inf if settings.watch == "live" and is_cheap else step + _AUDITED_FIRST


def _make_base_durable(settings: Settings, session: Session, fence: Fence, start: Start) -> None:
    """See that G3 holds from the return of attach: what it starts from is durable by then."""
    queue = session.queue
    if start.needs_snapshot or not queue.logs_steps:
        session.snapshot(required=True)
    # After a snapshot, adoption is not waited for: a replica's memory stays until this rank
    # has trained, so until no rank can fail to begin.
    if start.needs_snapshot:
        queue.wait_for_snapshot(queue.attend())
    elif start.continues and queue.logs_steps:
        queue.wait_for_adoption()
    if settings.store is not None and (start.needs_snapshot or queue.logs_steps):
        is_rebased = start.needs_snapshot and fence.incarnation > 0
        step = -1 if is_rebased else start.step
        queue.wait_for_store(step)


def _residual(
    settings: Settings, attached: Attached, folder: StagingFolder, scaling: Scaling
) -> RotatingResidual:
    """Return the error-feedback residual where it is to lie: in staging if it outlives a crash."""
    kept = settings.compressor.residual_layout(attached.exchanged)
    if not kept.parameters or settings.residual == "snapshot":
        return RotatingResidual.zeros(kept, attached.device, scaling)
    if attached.is_on_host:
        return StagedResidual(folder.residual, kept, scaling)
    return CopiedResidual(folder.residual, kept, attached.device, scaling)


def _hook_scaler(attached: Attached, stateful: Mapping[str, Stateful]) -> GradScaler | None:
    """The gradient scaler whose scale the gradients in DDP's or FSDP's hook carry, if there is one.

    One made with ``enabled=False`` has no scale.
    """
    if attached.ddp is None and attached.replicas is None:
        return None
    attached_scalers = [thing for thing in stateful.values() if isinstance(thing, GradScaler)]
    scalers = [scaler for scaler in attached_scalers if scaler.is_enabled()]
    if len(scalers) > 1:
        Code.SEVERAL_SCALERS.warn(
            f"{len(scalers)} gradient scalers are attached, and the gradients' hook cannot tell whose "
            "gradients it gets: error feedback goes by the scale of the first; use one scaler for "
            "all losses",
        )
    return next(iter(scalers), None)
