"""The face of lowdiff: what a training script holds."""

from __future__ import annotations

import atexit
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, Dataset
from typing_extensions import Self

from lowdiff.attach.begin import Opened
from lowdiff.attach.close import finish, release, settle_soon
from lowdiff.attach.found import Asked
from lowdiff.attach.open import meeting, open_session
from lowdiff.attach.together import Wish
from lowdiff.commit.meter import writer_document
from lowdiff.commit.session import Session
from lowdiff.compressors import Dense
from lowdiff.compressors.dense import mean
from lowdiff.core.events import Code, inform
from lowdiff.errors import ConfigError, UsageError
from lowdiff.loop.dataloader import ResumableLoader, StatefulEpochs
from lowdiff.loop.fetches import Body
from lowdiff.loop.pinning import keep_step
from lowdiff.loop.plain_loader import PlainLoader, is_plain_loader
from lowdiff.loop.preemption import SignalWatch, ends_by_sigterm, refuse_foreign_descriptor
from lowdiff.loop.schedulers import warn_of_schedulers_left_out
from lowdiff.loop.steps import DetachedLoop, LoopState, TrainingLoop
from lowdiff.model.binding import (
    Attached,
    alike_on,
    bare_optimizers,
    describe,
    of_all_ranks,
    with_draws,
)
from lowdiff.model.items import Stateful
from lowdiff.model.ranks import Ranks
from lowdiff.model.replicas import replicas_of
from lowdiff.persistence.files.paths import user_path
from lowdiff.persistence.staging.budget import DoesNotFit
from lowdiff.persistence.store.client import is_url
from lowdiff.persistence.writer.handle import WaitingWriter
from lowdiff.protect import chosen, strategy_of, usual_for, usual_without_memory
from lowdiff.protocols import Compressor
from lowdiff.recovery.state import LOOP_STATE
from lowdiff.settings import Settings, cadence, module_names
from lowdiff.step.ddp_hook import Average, HookState, registered
from lowdiff.step.fsdp_hook import average_as_hsdp, register_group_hooks
from lowdiff.tuner.policy import Tuning
from lowdiff.types import Publisher, Retention, whole_number

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def stats_of(opened: Opened) -> dict[str, Any]:
    """Counters, positions and histograms of this rank; for any thread."""
    session = opened.session
    queue, storage = session.queue, session.storage
    return {
        "rank": opened.ranks.rank,
        "staging": str(opened.staging.folder.root),
        **session.counters.document(),
        **writer_document(storage.writer.read_status()),
        **{
            name: value
            for sink in opened.protection.sinks
            for name, value in sink.figures().items()
        },
        **({} if storage.publisher is None else storage.publisher.figures()),
        "durable_step": queue.durable_step,
        "snapshot_step": queue.images.staged_step,
        "committed_step": session.committed_step,
        "pending_steps": session.num_pending,
        "diverged_ranks": list(session.agreement.health.ranks_apart),
        "large_items": session.large_items,
        "writer_pid": storage.writer.pid,
        "writer_restarts": storage.writer.restarts,
    }


#: The live Checkpointer of each run folder.
_attached: dict[str, Checkpointer] = {}
#: In a forked child: those of its parents. Kept, because what they hold would wait for threads that
#: are not here when it is freed.
_of_parents: list[Checkpointer] = []

#: Set where the training function is entered again in this process after it failed: the writer of the next attach.
_in_place: ContextVar[WaitingWriter | None] = ContextVar("lowdiff_in_place", default=None)

_IN_CHILD = (
    "this Checkpointer belongs to the process that this one was forked from; only that one may use "
    "it. To checkpoint here, attach a new Checkpointer to another run"
)


class Checkpointer:
    """Checkpoints every step of a training run.

    ::

        checkpointer = lowdiff.Checkpointer("runs/gpt", compressor=PowerSGD(matrix_rank=4))
        step = checkpointer.attach(ddp_model, optimizer, scheduler=scheduler)
        for step in checkpointer.steps(until=10_000):
            ...  # forward, backward, optimizer.step(), scheduler.step()
        checkpointer.close()

    Large because it is the face of the whole: every public call is a method here.

    Args:
        run: Folder of the run; created if it is not there. All ranks give the same path, which
            may be a shared folder or each node's own.
        compressor: How gradients are compressed, e.g. ``PowerSGD(matrix_rank=4)``. Lossy compression
            changes training, so it is always asked for by name. None is LowDiff+: training is left
            as it is, and a replica process applies every step to a copy in memory.
        strategy: How steps are protected. ``"log"``, with a compressor: every step is kept.
            ``"replica"``, without one: a process applies every step to a copy in memory. ``"survivors"``,
            without one: no gradient and no parameter is kept per step; after a failure the ranks that live save the state
            (docs/survivors.md), and where all die at once training goes back to the last full
            snapshot. None: ``"log"`` with a compressor, else ``"replica"``.
        reproducible: Without compression and with three ranks or more: add gradients in rank
            order, so that a resumed run has the bits of an uninterrupted one.
        optimizer_steps: How many steps each optimizer may make in one loop body. With ``"any"``, which
            needs training without a compressor, all of a body are committed together when it ends
            (PPO, SAC): *step* counts bodies, a crash goes back to the last committed one, and a body
            left by ``break`` is committed by ``commit()`` alone. ``attach`` logs how many steps staging
            memory holds; a body with more of them costs a full snapshot.
        snapshot_every: Steps between full snapshots; ``"auto"``, with a compressor: as the tuner
            finds best.
        batch_size: Differentials per durable write, or ``"auto"``; fewer are written five seconds
            after the first of them. A crash of processes loses no committed step whatever it is; the
            loss of the machine's power at most ``2 * batch_size``. Without a compressor it has no
            effect, and that bound is ``2 * snapshot_every``.
        staging: Folder for logs that survive the process; by default ``/dev/shm/lowdiff-UID``, in
            memory (tmpfs), which nobody else may read. Where that has no room, give a folder on a
            disk of this machine. A folder given here, if it is there already, must be this user's,
            no symbolic link, and not writable by others; what lowdiff makes in it nobody else can
            read.
        store: URL of an object store, e.g. ``"s3://bucket/runs/gpt"``, that gets a copy of all
            that is durable, so that the run survives its nodes. Credentials come from the
            environment. Needs ``lowdiff[object-store]``.
        retention: How many of the newest snapshots to keep, with their differentials, or a
            ``lowdiff.Retention``; None keeps every step of the run.
        backpressure: What happens once as many steps are not durable as the loss of power may
            cost, or staging memory is full, because storage is slow or out of order.
            ``"block"``: training waits, and ``stats()`` counts for how long. ``"degrade"``:
            training goes on and gives up the bound on power failures; if staging fills up, the
            oldest steps that are not durable are dropped, and a full snapshot is taken once
            storage is back.
        residual: What a crash of processes leaves of a compressor's error feedback. ``"exact"``:
            that of the very step, so the continued run has the bits of an uninterrupted one; it
            takes three times the parameters' bytes of staging memory on each rank. ``"snapshot"``:
            that of the last full snapshot, as after the loss of a node; the recovered state is as
            exact, the continuation is not bit-identical, and staging needs no room for it.
            ``"replicated"``, with ``copies``: as ``"exact"``, and each step's residual is also sent to
            the other nodes while the network is idle, so that the same holds after the loss of a node
            (docs/peers.md); it takes as much memory again for each rank that is kept, and once the
            parameters' bytes for what is under way.
        on_error: ``"warn"``: storage trouble is a warning, and training goes on; so are ranks whose
            parameters or hyper-parameters differ, and steps at the end of the history that do not
            replay, before which ``attach`` then goes on. ``"raise"``: storage trouble and ranks that
            differ are errors, at the same commit on every rank; steps that do not replay are an
            error of ``attach``.
        watch: ``"live"``: every step looks whether something else than the optimizer wrote to a
            parameter (clamping, weight normalisation, averages swapped in and out) and logs what it
            finds as values, so that the step stays exact; on an accelerator such a step costs a full
            snapshot. ``"recovery"``: only a checksum is logged, a
            third of the reading; no write is noticed while training runs, and recovery ends at the
            last step before such a write.
        tuning: What ``"auto"`` goes by: expected failures, and limits.
        imports: Without a compressor: names of the modules that call ``lowdiff.register_optimizer`` for
            the attached optimizers, so that the replica process knows them. With one it has no effect.
        hang_seconds: With strategy ``"survivors"``: after how long without a step ranks that wait for
            each other hang; None: after 20 times the median step, and at least 60 s. On CPUs lowdiff does
            not see that a rank waits for a collective which the loop itself started with ``async_op=True``.
        on_hang: What happens then, once the state is saved or cannot be: ``"save"`` waits on, ``"exit"``
            ends the process with status 1, so that its launcher starts anew.
        copies: On how many nodes everything that a rank stages lies in memory, its own included: the loss
            of any ``copies - 1`` nodes then takes no step that was replicated (docs/peers.md). 1: on its
            own alone.
        node: Names the node of this rank, where its machine and its staging folder do not tell: nodes
            that fail together, say.
        publish: A ``lowdiff.Publisher``: a process of its own publishes the weights of every step, for those who
            serve them (docs/publish.md). Rank 0's counts.
        lost_steps: What ``attach`` does about steps that no recovery brings back, lost with a node or with power.
            ``"redo"``: it goes on from the newest step that there is. ``"predict"``: it predicts the parameters of
            the step that training had come to, and goes on from there **inexactly**, if ``validate`` finds them
            better than the newest ones that there are (docs/lost_tail.md).
        validate: With ``"predict"``: takes the model, without DDP, and returns its loss on what is held out. Called on
            all ranks, without gradients, several times in ``attach``; the mean over the ranks counts.

    It belongs to the process that attached it. In a process forked from that one, leaving the
    ``with`` block and ``close()`` do nothing, and all else is a UsageError; attach another
    Checkpointer there, to another run.

    Raises:
        ConfigError: If a value cannot work.
    """

    def __init__(
        self,
        run: str | Path,
        *,
        compressor: Compressor | None = None,
        strategy: str | None = None,
        reproducible: bool = False,
        optimizer_steps: int | str = 1,
        snapshot_every: int | str = 100,
        batch_size: int | str = 16,
        staging: str | Path | None = None,
        store: str | None = None,
        retention: int | Retention | None = 2,
        backpressure: str = "block",
        residual: str = "exact",
        on_error: str = "warn",
        watch: str = "live",
        tuning: Tuning | None = None,
        imports: Sequence[str] = (),
        hang_seconds: float | None = None,
        on_hang: str = "save",
        copies: int = 1,
        node: str | None = None,
        publish: Publisher | None = None,
        lost_steps: str = "redo",
        validate: Callable[[torch.nn.Module], float] | None = None,
    ) -> None:
        if is_url(run):
            raise ConfigError(
                f"run={run!r}: the run folder is on a disk; give Checkpointer(FOLDER, store={run!r})"
            )
        protector = chosen(strategy, compressor)
        self._settings = Settings(
            run=user_path("run", run).absolute(),
            compressor=protector.compressor(compressor, reproducible=reproducible),
            strategy=protector.name,
            is_usual=strategy is None and compressor is None,
            **cadence(snapshot_every, batch_size, tuning),
            staging=None if staging is None else user_path("staging", staging).absolute(),
            store=store,
            retention=Retention(retention) if isinstance(retention, int) else retention,
            backpressure=backpressure,
            residual=residual,
            on_error=on_error,
            watch=watch,
            imports=module_names(imports),
            optimizer_steps=optimizer_steps,
            hang_seconds=hang_seconds,
            on_hang=on_hang,
            copies=copies,
            node=node,
            publish=publish,
            lost_steps=lost_steps,
            validate=validate,
        )
        strategy_of(self._settings).refuse(self._settings)
        #: For ``ddp.register_comm_hook(checkpointer.hook_state, lowdiff.comm_hook)``.
        self.hook_state = HookState()
        self._state = LoopState()
        self._opened: Opened | None = None
        #: How the hook averages where no compressor does.
        self._average: Average | None = None
        self._is_of_parent = False
        self._loop: TrainingLoop | None = None
        self._detached: DetachedLoop | None = None
        self._loaders: dict[str, ResumableLoader | StatefulEpochs] = {}
        self._plain_loaders: dict[str, PlainLoader] = {}
        self._attach_seconds = 0.0
        self._signals: SignalWatch | None = None
        self._was_preempted = False
        self._final_stats: dict[str, Any] = {}

    def attach(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        *,
        replicate: DeviceMesh | None = None,
        restore: str = "all",
        restore_from: str | Path | None = None,
        step: int | None = None,
        **stateful: Stateful | DataLoader[Any],
    ) -> int:
        """Take charge of a model and its optimizers; restore them if the run has history.

        Call it on every rank, after wrapping the model in DDP or sharding it, and building optimizer
        and scheduler, before the first backward pass. Registers DDP's communication hook, or FSDP's
        all-reduce hook, and hooks around ``optimizer.step``. On return the base of the run is durable,
        and in the store if there is one and it answers.

        Args:
            model: The model; if there are several processes, in ``DistributedDataParallel``, or with
                parameters that are sharded over all of them (docs/sharded.md).
            optimizer: The optimizer, or all of them.
            replicate: Where the copies of a sharded model are: the dimension of a 2-D mesh whose ranks hold
                the same shards. The model is sharded over the other one alone,
                ``fully_shard(module, mesh=mesh["shard"])``, and lowdiff averages gradients over
                ``replicate=mesh["rep"]``, through its compressor if it has one. Error feedback then takes
                the shard's size, in the parameters' dtype. Without a compressor the result has the bits of
                native HSDP. With one, parameters that a backward pass does not use get zeros as gradients
                where PyTorch can do that (``set_reduce_scatter_unused_params``), and must all be used where
                it cannot.
            restore: ``"all"``; ``"model"`` takes only weights and buffers and starts at step 0, where the same call
                has not begun so before: then it goes on with what it began; ``"none"`` starts afresh and leaves
                the history behind. What these give up is a warning (``LD318``).
            restore_from: Folder of another run, which all ranks see: its weights and buffers are taken, and counted
                from step 0, where this run has no history. Where it has, that is restored.
            step: Restore this step instead of the newest, or with ``restore="model"`` start anew with its
                weights; later ones become void. With ``restore_from``, the step of that run.
            stateful: Further objects with ``state_dict`` and ``load_state_dict``: schedulers,
                samplers, scalers. A plain ``DataLoader`` over a map-style dataset as well: it stays as
                it is, and a resumed run goes on after the last consumed batch of its epoch. The same
                names on every start.

        Returns:
            Number of completed steps: 0 for a new run.

        Raises:
            ConfigError: If something attached cannot be checkpointed.
            RunInUse: If another live trainer holds the run.
            RunMismatch: If the run's history belongs to another model or optimizer.
            StepNotFound: If ``step`` cannot be recovered.
            DamagedFile: If the run's newest incarnation cannot be read, and no ``step`` is given.
            StoreError: If the store does not answer, and the run folder has no history.
            UsageError: If it is attached already, or another library has set a wakeup file descriptor.
        """
        if self._current is not None:
            raise UsageError(
                "this Checkpointer is attached already; close() it first. Several modules of one "
                "training go into one torch.nn.ModuleDict, attached with all their optimizers"
            )
        started = time.perf_counter()
        with meeting(model) as ranks:
            with ranks.together():
                wish = self._wish(restore, restore_from, step)
                attached = describe(model, bare_optimizers(optimizer))
            attached = of_all_ranks(attached, ranks)
            with ranks.together():
                self._settings = usual_for(self._settings, on_host=attached.is_on_host)
                self._close_earlier()
                refuse_foreign_descriptor()
                attached = self._hooked(attached, replicate, ranks)
                loaders, others = self._plain_loaders_of(stateful, attached.model)
                alike = alike_on(attached, ranks.rank)
            attached = with_draws(attached, ranks, alike)
            for loader in self._loaders.values():
                if isinstance(loader, ResumableLoader):
                    loader.share(ranks.rank, ranks.world_size)
            objects = {**self._loaders, **others, **loaders, LOOP_STATE: self._state}
            is_hooked = attached.replicas is not None or (
                attached.ddp is not None and ranks.world_size > 1
            )
            hook = self.hook_state if is_hooked else None
            asked = Asked(self._settings, wish, hook, _in_place.get())
            try:
                opened = open_session(asked, attached, objects, ranks)
            except DoesNotFit as error:
                with ranks.together():
                    self._settings = usual_without_memory(self._settings, error, ranks.rank)
                asked = replace(asked, settings=self._settings)
                opened = open_session(asked, attached, objects, ranks)
        self._opened, self._detached = opened, None
        self._plain_loaders = loaders
        _attached[self._key] = self
        try:
            for plain in loaders.values():
                plain.hook()
            self._average = self._average_of(attached, ranks)
            compresses = strategy_of(self._settings).logs_steps
            averages = attached.replicas is not None and not compresses
            self.hook_state.open(
                self._session.recorder.reducer,
                [*attached.parameters.values()],
                indices=[*attached.parameters],
                average=self._average if averages else None,
                exchanges=opened.protection.exchanges,
                ddp=attached.ddp,
            )
            self._loop = TrainingLoop(attached, self._session, opened.random_states)
            self._was_preempted = False
            self._signals = SignalWatch(self._session.preempt)
            opened.protection.watch(ends_by_signal=ends_by_sigterm())
            atexit.register(self._close, failed=True)  # a script may end without close()
        except BaseException:
            self._session.storage.stop()
            self._session.storage.writer.stop()
            self._let_go(opened)
            raise
        warn_of_schedulers_left_out(attached.optimizers, others.values(), ranks.rank)
        self._attach_seconds = time.perf_counter() - started
        self._say(
            "attached",
            f"{self._settings.run} goes on after step {self._session.step}",
            step=self._session.step,
            seconds=self._attach_seconds,
        )
        return self._session.step

    def _wish(self, restore: str, restore_from: str | Path | None, step: int | None) -> Wish:
        """What `attach` is told to restore.

        Raises:
            ConfigError: If its arguments do not go together.
        """
        other = None
        if restore_from is not None:
            if is_url(restore_from):
                raise ConfigError(
                    f"restore_from={restore_from!r}: give a folder; `lowdiff recover {restore_from} --as-run FOLDER` "
                    "brings the run's newest step there"
                )
            other = user_path("restore_from", restore_from).absolute()
            if os.path.realpath(other) == self._key:
                raise ConfigError(
                    f'restore_from={restore_from!r} is this run itself; restore="model" takes its own weights'
                )
        return Wish(restore, None if step is None else whole_number("step", step), other)

    def dataloader(
        self,
        data: Dataset[Any] | DataLoader[Any],
        *,
        batch_size: int | None = None,
        **options: Any,
    ) -> ResumableLoader | StatefulEpochs:
        """A DataLoader whose position is part of every step; call it before ``attach``.

        ::

            loader = checkpointer.dataloader(dataset, batch_size=32, num_workers=2)
            checkpointer.attach(ddp_model, optimizer)
            while loader.epoch < 10:
                for batch in loader:
                    ...
                    checkpointer.commit()

        Args:
            data: Map-style dataset, the same on every rank; ranks share its samples out. Or a
                ``StatefulDataLoader`` of torchdata, whose own position and sampler are kept; it
                resumes with the same number of ranks and workers.
            batch_size: Samples per batch and rank, of a dataset.
            options: ``shuffle``, ``drop_last``, ``seed`` and those of PyTorch's ``DataLoader``, of
                a dataset.

        Raises:
            UsageError: After ``attach``, which restores the position.
            ConfigError: If the data or an option cannot be resumed.
        """
        if self._current is not None:
            raise UsageError("call dataloader(...) before attach(...), which restores its position")
        loader: ResumableLoader | StatefulEpochs
        if isinstance(data, DataLoader):
            if batch_size is not None or options:
                raise ConfigError("a loader has its batch_size and options already; pass only it")
            loader = StatefulEpochs(data, self._body_begins, self._body)
        else:
            loader = ResumableLoader(
                data,
                batch_size=batch_size,
                before_batch=self._body_begins,
                body=self._body,
                **options,
            )
        self._loaders[f"dataloader{len(self._loaders)}"] = loader
        return loader

    def epoch_of(self, loader: DataLoader[Any]) -> int:
        """Return how many epochs of an attached ``DataLoader`` are over, in all incarnations of the run.

        ::

            checkpointer.attach(ddp_model, optimizer, loader=loader)
            for epoch in range(checkpointer.epoch_of(loader), 10):
                sampler.set_epoch(epoch)
                for batch in loader:
                    ...
                    checkpointer.commit()

        An epoch is an ``iter(loader)`` that ended, or that the loop left after a step. Those begun while
        gradients are off (evaluations), or while another one is in progress, do not count.

        Raises:
            UsageError: If the loader was not attached.
        """
        return self._plain_loader(loader).epoch

    def batch_of(self, loader: DataLoader[Any] | ResumableLoader | StatefulEpochs) -> int:
        """Return how many batches of its epoch a loader has handed out: where a loop's count of them begins.

        ::

            for epoch in range(checkpointer.epoch_of(loader), 10):
                start = checkpointer.batch_of(loader)
                for i, batch in enumerate(loader, start=start):
                    ...
                    checkpointer.commit()

        It is 0 but for the first epoch of a resumed run, which goes on behind the batches that are consumed.

        Args:
            loader: An attached ``DataLoader``, or what ``checkpointer.dataloader`` returned.

        Raises:
            UsageError: If the loader is neither.
        """
        own = next((own for own in self._loaders.values() if own is loader), None)
        known = (
            self._plain_loader(loader) if own is None else own
        )  # asked for its truth, it asks for a length
        known.count.is_known = True
        return known.consumed

    def _plain_loader(self, loader: object) -> PlainLoader:
        """The positions of an attached loader.

        Raises:
            UsageError: If it was not attached.
        """
        for plain in self._plain_loaders.values():
            if plain.loader is loader:
                return plain
        raise UsageError(
            "this loader was not attached; call attach(model, optimizer, loader=loader) first. A "
            "StatefulDataLoader counts through checkpointer.dataloader(loader)"
        )

    def _plain_loaders_of(
        self, objects: Mapping[str, Any], model: torch.nn.Module
    ) -> tuple[dict[str, PlainLoader], dict[str, Stateful]]:
        """Return the plain DataLoaders among attached objects, and the rest.

        Raises:
            ConfigError: If one cannot be resumed, or is there twice.
        """
        loaders: dict[str, PlainLoader] = {}
        for name, thing in objects.items():
            if not is_plain_loader(thing):
                if isinstance(thing, DataLoader):
                    raise ConfigError(
                        f"{name} is a {type(thing).__name__} with a state of its own, which lacks its generator and the "
                        "moment at which a resumed epoch begins; loop over what checkpointer.dataloader(loader) "
                        "returns, called before attach, which keeps both"
                    )
                continue
            if any(thing is other.loader for other in loaders.values()):
                raise ConfigError(f"{name} is attached by another name as well; attach it once")
            loaders[name] = PlainLoader(thing, self._body_begins, self._body, model)
        return loaders, {name: thing for name, thing in objects.items() if name not in loaders}

    def clip_grad_norm_(
        self, parameters: torch.Tensor | Iterable[torch.Tensor], max_norm: float, **options: Any
    ) -> torch.Tensor:
        """``torch.nn.utils.clip_grad_norm_`` with its options, which tells the log the coefficient.

        PyTorch's own works as well: see docs/compressors.md for what this one spares and adds.
        Returns the total norm before clipping, shape ``[]``.
        """
        if self._current is None and self._detached is not None:
            return torch.nn.utils.clip_grad_norm_(parameters, max_norm, **options)
        return self._session.recorder.scaling.clip_grad_norm_(parameters, max_norm, **options)

    def steps(self, until: int) -> Iterator[int]:
        """Yield ``completed, ..., until - 1``; each body makes one step, committed when it ends.

        A body that is left by ``break`` after its step is committed by what comes next: another
        ``steps()``, ``commit()`` or ``close()``. With a loader: ``zip(steps(until), loader)``, in
        this order, because a batch counts to the step at whose commit it was fetched.

        Args:
            until: Number of completed steps to stop at.

        Yields:
            The number of completed steps: the body with ``step`` makes step ``step + 1``.

        Raises:
            UsageError: If a body called ``commit()`` or ``close()`` and did not leave the loop.
        """
        return self._training_loop.steps(whole_number("until", until))

    def commit(self) -> None:
        """End a step by hand, in loops that do not use ``steps()``.

        Call it once after ``optimizer.step()`` and ``scheduler.step()``, also when a gradient
        scaler skipped the optimizer.

        Raises:
            WriterFailed: If ``on_error="raise"`` and durable writing is in trouble.
            RanksDiverged: If ``on_error="raise"`` and ranks do not hold the same parameters.
            StorageError: If staging memory is exhausted.
            RunInUse: If another machine took over the run.
            RankLost: If another rank ended.
        """
        self._training_loop.commit()

    @property
    def state(self) -> LoopState:
        """A dict for what the loop carries from step to step, logged in steps that change it.

        ::

            checkpointer.attach(model, optimizer)
            if "batch" not in checkpointer.state:
                checkpointer.state["batch"] = get_batch()

        A batch that was fetched ahead, hidden states, the best loss, an epoch: tensors, numbers,
        strings, lists, tuples and dicts of them. Each rank has its own; ``attach`` restores it. Tensors
        come back on the CPU.
        """
        return self._state

    @property
    def preempted(self) -> bool:
        """Whether SIGTERM or SIGUSR1 came to any rank since ``attach``.

        ::

            for step in checkpointer.steps(until=10_000):
                ...
                if checkpointer.preempted:
                    break
            checkpointer.close()

        The signal alone ends nothing, but at once, even while a collective blocks the main
        thread, the tail of the log is made durable, and from then on each step as it is staged.
        A handler that was there before is called as ever. With several ranks this turns true on
        all of them at the same commit, one step after the signal, so that all leave the loop
        together; with one it does so at once.
        """
        opened = self._current
        if opened is not None and opened.session.agreement.is_preempted:
            self._was_preempted = True
        return self._was_preempted

    def stats(self) -> dict[str, Any]:
        """Counters of this rank since ``attach``; still there after ``close()``; for any thread.

        docs/operations.md says what each key is: counters (``steps``, ``durable_bytes``,
        ``waiting_seconds``, ``retries``, ``dropped_steps``, ...), positions (``committed_step``,
        ``durable_step``), ``writer_error``, ``preempted``, and histograms
        (``stall_seconds``, ``step_bytes``, ``lag_steps``, ``batch_seconds``).
        """
        opened = self._current
        if opened is None:
            return dict(self._final_stats)
        own = {"attach_seconds": self._attach_seconds, "preempted": self.preempted}
        return stats_of(opened) | own

    def keep(self, step: int | None = None, *, label: str | None = None) -> int:
        """Pin a step, which it returns: retention spares it until ``lowdiff gc --unpin LABEL``.

        Call it on one rank or on all; where every node has a run folder of its own, on all.

        Args:
            step: Which; None for the newest that this rank knows to be committed on all.
            label: Letters, digits, ``_``, ``-`` and ``.``; by default ``step-N``. Given again, it
                moves.

        Raises:
            StepNotFound: If the step is not there any more, or not yet; without a compressor, if there is
                no full snapshot of it.
            ConfigError: If the label is no name for a file.
            UsageError: If it is not attached.
            RunInUse: If old files were being removed all the time that ``attach`` would wait for
                another trainer. The loop may go on, and pin again later.
        """
        opened = self._current
        if opened is None:
            raise UsageError("call attach(model, optimizer) first")
        return keep_step(self._settings, opened, step, label)

    @contextmanager
    def pause_watch(self) -> Iterator[None]:
        """Take no time in the body for a hang, where `hang_seconds` counts; without effect otherwise.

        ::

            with checkpointer.pause_watch():
                evaluate()  # on one rank, while those of other nodes wait in a barrier
        """
        if self._opened is None:
            yield
        else:
            with self._opened.protection.pause():
                yield

    def close(self) -> None:
        """Commit a finished step, make everything durable and let go of the run.

        While an exception is being handled nothing is committed: the next ``attach`` resumes
        from the last committed step. Calling it again does nothing, and neither does calling it in
        a forked process.
        """
        self._close(failed=sys.exc_info()[0] is not None)

    def detach(self) -> None:
        """Let go of the run and of the training, which goes on without checkpoints.

        Call it on every rank in the same body. Nothing more is committed, not even a step that has
        been made. What is committed becomes durable; storage that is in trouble costs a warning and
        10 to 20 s. Hooks, locks and signal handlers go as at ``close()``, and so does staging
        memory where the model is as it was committed; else it stays until the next ``attach``
        or ``lowdiff gc``. DDP averages gradients as it does without lowdiff; what a compressor
        still owes is dropped.

        A loop over ``steps()`` goes on and counts; ``commit()`` counts and commits nothing,
        ``clip_grad_norm_`` clips, and ``keep()`` is a UsageError. ``attach`` may follow, and
        restores the last committed step. Calling it again, or when nothing is attached, does nothing.

        ::

            try:
                optimizer.step()
            except lowdiff.LowDiffError:
                checkpointer.detach()  # rather lose checkpoints than training time

        Raises:
            UsageError: In a process that was forked from the one that attached it.
        """
        opened = self._current
        if opened is None:
            return
        assert self._loop is not None
        self._detached = self._loop.detach()
        self._end(opened, failed=sys.exc_info()[0] is not None, detaches=True)

    def __enter__(self) -> Self:
        """Return itself; ``attach`` does the work."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close; commits nothing when leaving with an exception."""
        self._close(failed=kind is not None)

    def _close(self, *, failed: bool) -> None:
        if self._opened is None or self._is_of_parent:
            return
        self._end(self._opened, failed=failed)

    def _break_off(self) -> None:
        """Leave staging as it is and let go of the rest, for an `attach` that follows in this process.

        Nothing is waited for: the writer goes on by itself, as after the end of its trainer. May be called
        again after an exception that came in the middle.
        """
        opened = self._opened
        if opened is None or self._is_of_parent:
            return
        opened.protection.save_after_failure("training begins anew in this process")
        settle_soon(opened.session)
        opened.session.meter.end("failed")
        opened.session.die(kills_processes=False)
        self._let_go(opened)

    def _end(self, opened: Opened, *, failed: bool, detaches: bool = False) -> None:
        if failed and _in_place.get() is not None:
            opened.session.gate.leave()
            return  # until the other ranks have heard of the failure as well: see `break_off`
        try:
            if failed:
                opened.protection.save_after_failure("the training ended with an error")
            opened.protection.end_watch()
            if self._loop is not None and not (failed or detaches):
                self._loop.ends()
            finish(opened, failed=failed, detaches=detaches)
            self._say("closed", f"{self._settings.run} is closed", step=opened.session.step)
        except (
            KeyboardInterrupt,
            SystemExit,
        ):  # a second Ctrl-C: its processes go on by themselves
            opened.session.die(kills_processes=False)
            raise
        finally:
            with suppress(Exception):  # what went wrong before says more
                self._final_stats = self.stats()
            if detaches:
                assert self._average is not None
                self.hook_state.detach(self._average)
            self._let_go(opened)

    def _hooked(self, attached: Attached, replicate: DeviceMesh | None, ranks: Ranks) -> Attached:
        """Register the hook in which gradients are averaged over ranks.

        Raises:
            ConfigError: If ``replicate`` does not say where the copies of this model are.
            UnsupportedModel: If FSDP calls no hook for a parameter.
        """
        if attached.ddp is not None:
            self.hook_state = registered(attached.ddp, self.hook_state)
        if replicate is None:
            return attached
        layout, parameters = attached.layout, attached.parameters
        replicas = replicas_of(replicate, layout, parameters, ranks.rank)
        register_group_hooks(
            attached.model,
            parameters,
            lambda index: layout.parameters[index].tensor,
            self.hook_state,
            compresses=strategy_of(self._settings).logs_steps,
        )
        return replace(attached, replicas=replicas)

    def _average_of(self, attached: Attached, ranks: Ranks) -> Average:
        compressor = self._settings.compressor
        is_reproducible = isinstance(compressor, Dense) and compressor.reproducible
        if attached.replicas is None:
            return partial(mean, group=ranks.training_group, reproducible=is_reproducible)
        return partial(average_as_hsdp, group=attached.replicas.group, reproducible=is_reproducible)

    @property
    def _key(self) -> str:
        return os.path.realpath(self._settings.run)

    def _close_earlier(self) -> None:
        """A notebook's cell run again, say: its old Checkpointer holds the run."""
        earlier = _attached.get(self._key)
        if earlier is not None and earlier._opened is not None:
            Code.EARLIER_CLOSED.warn(
                f"{self._settings.run} is still attached in this process; that Checkpointer is "
                "closed, without committing what it had not",
            )
            earlier._break_off() if _in_place.get() else earlier._close(failed=True)

    def _let_go(self, opened: Opened) -> None:
        """Take back what ``attach`` registered, as far as it came."""
        atexit.unregister(self._close)
        if self._signals is not None:
            self._signals.close()
            self._signals = None
        opened.protection.end_watch()
        self.hook_state.close(opened.session.recorder.reducer)
        if self._loop is not None:
            self._loop.remove()
            self._loop = None
        release(opened)
        self._opened = None
        if _attached.get(self._key) is self:
            del _attached[self._key]

    def _say(self, event: str, text: str, **fields: Any) -> None:
        assert self._opened is not None
        inform(text, event=event, rank=self._opened.ranks.rank, **fields)

    @property
    def _current(self) -> Opened | None:
        """Return what is attached and runs, if anything is; every public call passes here.

        Raises:
            UsageError: In a process that was forked from the one that attached it.
        """
        if self._is_of_parent:
            raise UsageError(_IN_CHILD)
        return self._opened

    @property
    def _session(self) -> Session:
        opened = self._current
        if opened is None:
            raise UsageError("call attach(model, optimizer) first")
        return opened.session

    @property
    def _training_loop(self) -> TrainingLoop | DetachedLoop:
        if self._current is None and self._detached is not None:
            return self._detached
        if self._loop is None:
            raise UsageError("call attach(model, optimizer) first")
        return self._loop

    def _body_begins(self) -> None:
        if self._loop is not None and not self._is_of_parent:
            self._loop.body_begins()

    def _body(self) -> Body:
        is_here = self._loop is not None and not self._is_of_parent
        return self._loop.body if self._loop is not None and is_here else Body()

    def _forked(self) -> None:
        """In a forked child: touch nothing that is the parent's, and hook nothing here.

        Staging memory and the writer's pipe are shared with the parent; process groups, locks and
        leases are its own.
        """
        self._is_of_parent = True
        self.hook_state.leave(_IN_CHILD)
        if self._opened is not None:
            self._opened.session.leave()
        if self._loop is not None:
            self._loop.remove(_IN_CHILD)


@contextmanager
def restarting_in_place() -> Iterator[None]:
    """Enter a training function again and again in the body, after failures; for `lowdiff.integrations`.

    Leaving ``with checkpointer:`` by an exception then does nothing: whoever knows that all ranks have heard of the
    failure calls `break_off`. Each ``attach`` takes a writer that `prepare_writer` started before.
    """
    writer = WaitingWriter()
    token = _in_place.set(writer)
    try:
        yield
    finally:
        break_off()
        _in_place.reset(token)
        writer.close()


def prepare_writer() -> None:
    """Have a writer wait for the next ``attach``, if none does; within `restarting_in_place`."""
    writer = _in_place.get()
    assert writer is not None
    writer.prepare()


def end_steps(timeout_seconds: float) -> None:
    """Let no optimizer begin a step any more, and wait until the step that began is committed; for any thread.

    Otherwise an exception that another thread raises in the main thread could come while parameters change, and no
    rank had the state of a whole step.
    """
    for checkpointer in list(_attached.values()):
        if checkpointer._opened is not None:
            checkpointer._opened.session.gate.close(timeout_seconds)


def break_off() -> None:
    """Let go of every run that this process holds, where a training function was left by an exception."""
    for checkpointer in list(_attached.values()):
        checkpointer._break_off()


def begin_body(checkpointer: Checkpointer) -> None:
    """Restore the generators of the last commit, if this process did not yet; for `lowdiff.integrations`.

    For frameworks whose loop is not ours: called where the first body begins, before its batch is fetched.
    """
    checkpointer._body_begins()


def ignore_checkpoint(checkpointer: Checkpointer, given: object, instead: str) -> None:
    """Warn that a checkpoint of a framework is not loaded; for `lowdiff.integrations`.

    Args:
        checkpointer: Whose run is resumed.
        given: What the script named, as it named it.
        instead: How to begin a new run from it.
    """
    Code.CHECKPOINT_IGNORED.warn(
        f"{given} is not loaded: the run {checkpointer._settings.run} goes on after its own last step. To begin "
        f"another run from that checkpoint, {instead}",
        given=str(given),
    )


def name_uncalled_hooks() -> None:
    """Warn of functions that Accelerate would call to save something; for `lowdiff.integrations`."""
    Code.HOOKS_NOT_CALLED.warn(
        "functions of accelerator.register_save_state_pre_hook write into a folder of save_state(), and are not called at "
        "lowdiff's steps: what they save besides weights (an average, say) is not in a step. Give an object with "
        "state_dict() and load_state_dict() to accelerator.register_for_checkpointing, before LowDiffRun: an AveragedModel "
        "is replayed, and of another one each step logs what changed"
    )


def _after_fork_in_child() -> None:
    for checkpointer in _attached.values():
        checkpointer._forked()
    _of_parents.extend(_attached.values())
    _attached.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)
