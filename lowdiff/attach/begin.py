"""The parts of an incarnation, made once its fence is durable: staging, writer, queue, recorder, session."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace

import torch.distributed as dist
from torch.amp.grad_scaler import GradScaler

from lowdiff.attach.found import Asked, Found
from lowdiff.attach.resume import Start
from lowdiff.commit.agreement import Agreement, Health
from lowdiff.commit.protection import Protection
from lowdiff.commit.run_lock import RunLock, StagingArea
from lowdiff.commit.schedule import Cadence, Schedule
from lowdiff.commit.session import Session
from lowdiff.commit.staging import Staging
from lowdiff.commit.storage import Trainer
from lowdiff.compressors.feedback import RotatingResidual
from lowdiff.compressors.grouped import GroupedReducer
from lowdiff.core import devices
from lowdiff.core.events import Code
from lowdiff.core.sums import sums_on
from lowdiff.model.averages import Averages
from lowdiff.model.binding import Attached
from lowdiff.model.items import Stateful, name_large_items
from lowdiff.model.ranks import Ranks
from lowdiff.model.tracked import Given, Live
from lowdiff.persistence.files.durable import write_file
from lowdiff.persistence.files.paths import StagingFolder
from lowdiff.persistence.staging.settings import WriterSettings
from lowdiff.persistence.staging.status import holds_state
from lowdiff.persistence.writer.handle import WriterProcess
from lowdiff.protect import strategy_of
from lowdiff.protect.beginning import Beginning, held_area
from lowdiff.protect.memory import Memory
from lowdiff.protect.publish import publisher_of
from lowdiff.protocols import Reducer
from lowdiff.settings import Settings
from lowdiff.step.gradients import Gradients, RecordedGradients, Scaling
from lowdiff.step.proofs import Proofs
from lowdiff.step.recorder import Recorder
from lowdiff.step.residual import CopiedResidual, StagedResidual
from lowdiff.types import Fence

#: Steps after which frozen parameters are read whole: the first of a life, and those of snapshots.
_AUDITED_FIRST = 3
#: So much is read in about a millisecond.
_CHEAP_BYTES = 16 << 20


@dataclass(frozen=True, slots=True, eq=False)
class Incarnation:
    """What an incarnation is to be, once its fences are durable.

    Attributes:
        fence: This rank's.
        start: What it starts from.
        memory: What it may use.
    """

    fence: Fence
    start: Start
    memory: Memory


@dataclass(frozen=True, slots=True, eq=False)
class Opened:
    """A running session and what closing it needs.

    Attributes:
        settings: Of the run.
        session: Captures and stages every step.
        protection: What takes the steps.
        lock: On the run.
        staging: This rank's folder in staging memory.
        ranks: Those that train together.
        random_states: Items to restore when the first step begins.
    """

    settings: Settings
    session: Session
    protection: Protection
    lock: RunLock
    staging: StagingArea
    ranks: Ranks
    random_states: Mapping[str, bytes]


def begin(
    asked: Asked, given: Given, ranks: Ranks, found: Found, incarnation: Incarnation
) -> Opened:
    """Make staging, writer and session; on return the base is durable on every rank."""
    settings, strategy = asked.settings, strategy_of(asked.settings)
    fence, start, memory = incarnation.fence, incarnation.start, incarnation.memory
    # Of a life that may never have begun, on whichever machine: only a snapshot after it makes its memory void.
    is_haunted = any(ranks.gather(any(map(holds_state, found.left)))) and strategy.logs_steps
    if is_haunted or settings.copies > 1:  # a copy begins with an image, as that of every rank
        start = replace(start, needs_snapshot=True)
    folder = StagingFolder.of(settings.staging_root, fence.run_id, fence.incarnation, ranks.rank)
    with ExitStack() as undo, ThreadPoolExecutor(1) as beside:
        # Staging folders go again, unless an incarnation begins with them.
        unused = undo.enter_context(ExitStack())
        # Here one rank may fail that others do not: its disk or memory is full, say.
        with ranks.together():
            area = held_area(folder, settings.folder, fence.life, undo, unused)
            publisher = publisher_of(settings, fence, folder, given.attached.module)
            if publisher is not None:
                undo.callback(publisher.stop)
            # A process takes half a second to start: memory is taken meanwhile.
            starting = beside.submit(
                WriterProcess, _writer_settings(settings, found, fence, start), asked.waiting
            )
            undo.callback(_stop_started, starting)
            scaling = Scaling(_hook_scaler(given.attached, given.stateful))
            residual = _residual(settings, given.attached, folder, scaling)
            if start.residual:
                residual.load(start.residual)
            device = given.attached.device
            live = Live(
                attached=given.attached,
                tracker=given.tracker,
                residual=residual,
                averages=Averages(given.averages, given.attached),
                shares_constants=fence.constants != "",
                incarnation=fence.incarnation,
                base_step=start.step,
                rank=ranks.rank,
                world_size=ranks.world_size,
                sums=sums_on(device) if devices.sums_there(device) else None,
            )
            trainer = Trainer(folder, settings, ranks.rank, ranks.world_size)
            protection = strategy.protect(
                Beginning(trainer, live, fence, memory, starting, publisher, undo, unused)
            )
            undo.callback(protection.close, removes=False)
            meter = trainer.meter
            elements = sum(spec.numel for spec in fence.layout.parameters)
            meter.note({**found.past.facts, "elements": float(elements)})
            cadence = Cadence(trainer, protection.storage.writer, meter.recorder)
            cadence.begin(start.step, found.past)
            live.tracker.start(start.items, is_under_way=start.step > 0 and ranks.rank == 0)
        # All ranks make each process group at once, and wait there for one that failed before.
        protection.join(ranks)
        recorder = _recorder(asked, live, ranks, scaling, incarnation)
        # The base names the residual; from then on the memory of the life before is not needed, and goes.
        unused.pop_all()
        with ranks.together():
            session = Session(
                live,
                recorder,
                trainer,
                Staging(area, trainer, live, protection),
                _agreement(settings, live, ranks, found.lock),
                Schedule(
                    cadence,
                    protection.queue,
                    is_alone=ranks.world_size == 1,
                    audited_until=_audited_until(settings, live, start.step),
                ),
            )
            undo.callback(session.detach)
            protection.begin(session)
            _make_base_durable(settings, session, fence, start)
        if memory.node.others:
            with ranks.together():
                protection.wait_for_base(start.step)
            with ranks.together():  # no rank can fail to begin any more
                if memory.node.first == ranks.rank:
                    write_file(settings.folder.begun(fence.incarnation), b"")
        meter.note(found.past.attached())
        session.start()
        if ranks.rank == 0:
            name_large_items(given.tracker)
        undo.pop_all()
    return Opened(settings, session, protection, found.lock, area, ranks, start.items)


def _writer_settings(
    settings: Settings, found: Found, fence: Fence, start: Start
) -> WriterSettings:
    return WriterSettings(
        run=str(settings.run),
        staging_root=str(settings.staging_root),
        run_id=fence.run_id,
        incarnation=fence.incarnation,
        rank=fence.rank,
        world_size=fence.world_size,
        base_step=start.step,
        trainer_pid=os.getpid(),
        batch_size=settings.batch_size,
        flush_seconds=settings.flush_seconds,
        retention=settings.retention,
        store=settings.store,
        logs_steps=strategy_of(settings).logs_steps,
        continues=start.continues,
        adopts=[stage.root.name for stage in found.left],
    )


def _stop_started(starting: Future[WriterProcess]) -> None:
    """Stop a writer that was started, if it came up; if not, its error is known."""
    if starting.exception() is None:
        starting.result().stop()


def _recorder(
    asked: Asked, live: Live, ranks: Ranks, scaling: Scaling, incarnation: Incarnation
) -> Recorder:
    settings, attached, strategy = asked.settings, live.attached, strategy_of(asked.settings)
    memory, replicas = incarnation.memory, live.attached.replicas
    peers = memory.peers.made
    reducer: Reducer
    if replicas is not None and strategy.logs_steps:
        of_group = [dist.get_group_rank(replicas.group, peer) for peer in peers]
        bound = settings.compressor.bind(
            attached.exchanged, live.residual, replicas.group, of_group
        )
        reducer = GroupedReducer(bound, replicas.part, dict(zip(peers, of_group, strict=True)))
    else:
        group = ranks.training_group
        reducer = settings.compressor.bind(attached.layout, live.residual, group, peers)
    gradients = Gradients(attached, asked.hook)
    if strategy.is_replayed:
        departs = strategy.keeps_gradients and devices.comes_late(attached.device)
        gradients = RecordedGradients(
            attached, asked.hook, reducer, scaling, live.residual, departs=departs
        )
    return Recorder(
        live,
        reducer,
        gradients,
        scaling,
        Proofs(attached, incarnation.fence, ranks, is_replayed=strategy.is_replayed),
        watches=settings.watch if strategy.is_replayed else "",
        most_calls=memory.optimizer_steps,
        is_replayed=strategy.is_replayed,
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
