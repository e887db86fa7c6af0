"""One incarnation of a run while it lives: from the optimizer's hooks to the staging log."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from lowdiff.commit.agreement import Agreement, RankNews
from lowdiff.commit.meter import Counters, Meter, Timed
from lowdiff.commit.schedule import Schedule, Why
from lowdiff.commit.staging import Staging
from lowdiff.commit.storage import Look, Trainer
from lowdiff.core import devices
from lowdiff.core.transforms import inside
from lowdiff.errors import UsageError
from lowdiff.model.tracked import Live
from lowdiff.model.watch import AttachedObjects
from lowdiff.step.ddp_hook import without_autocast
from lowdiff.step.gate import StepGate
from lowdiff.step.recorder import Recorder
from lowdiff.step.states import Sealed, State

#: Steps are of no use before a snapshot for one of these reasons is durable.
_WAITED_FOR = frozenset({Why.UNREPLAYABLE, Why.OTHER_RANK, Why.STAGING_RENEWED})
#: Another step's is as good, so these may be given up for a later one.
_REPEATED = frozenset({Why.INTERVAL, Why.RING})
#: What compiles the functions that are called next, if a compiled one called the present one. PyTorch
#: 2.6 does not tell.
_compiling_callback: Callable[[], object] = getattr(
    torch._C._dynamo.eval_frame, "get_eval_frame_callback", lambda: None
)


class Session:
    """Captures every step of one rank and stages it.

    `before_optimizer` and `after_optimizer` record a step, and `commit` seals it and hands it on. All states of
    the step are the recorder's. Large because `commit` is to be read as one page, with each of its parts
    behind it.

    Attributes:
        step: The step that ended last on this rank.
        committed_step: The newest step that this rank knows all ranks to hold; on an accelerator it may trail by two
            more than on a CPU.
        queue: Where steps are staged.
        storage: The processes that empty it.
        recorder: Records and seals steps.
        agreement: What the ranks know together.
        gate: Closed where training is to begin anew in this process.
    """

    def __init__(
        self,
        live: Live,
        recorder: Recorder,
        trainer: Trainer,
        staging: Staging,
        agreement: Agreement,
        schedule: Schedule,
    ) -> None:
        self.step = self._heard_step = self._base_step = live.base_step
        self.queue = staging.protection.queue
        self.storage = staging.protection.storage
        self.recorder = recorder
        self.agreement = agreement
        self.gate = StepGate()
        self._live = live
        self._trainer = trainer
        self._staging = staging
        self._schedule = schedule
        #: Behind the newest optimizer step, on its device.
        self._mark = devices.mark(live.attached.device)
        self._stream: torch.Stream | None = None
        self._is_stopping = False
        self._sealed = recorder.base()
        staging.stage_base(self._sealed)
        self._show()
        recorder.begin(self.step + 1)
        self._hooks = OptimizerHooks(live.attached.optimizers, self)
        recorder.guard.last_pre_hooks = self._hooks.pre_hook_ids
        self._objects = AttachedObjects(live.attached)

    @property
    def has_finished_step(self) -> bool:
        """Whether every optimizer stepped since the last commit, and the step can be committed."""
        return self.recorder.is_complete and not self._objects.has_refused

    @property
    def unfinished(self) -> str:
        """Which optimizers stepped since the last commit and which did not; empty where all or none did."""
        return self.recorder.step.unfinished(self._live.attached.optimizer_names)

    @property
    def has_storage_error(self) -> bool:
        """Whether durable writing fails."""
        return self._trainer.errors.any

    @property
    def counters(self) -> Counters:
        """What training did and waited for."""
        return self._trainer.counters

    @property
    def meter(self) -> Meter:
        """Measures it for the tuner."""
        return self._trainer.meter

    @property
    def is_on_host(self) -> bool:
        """Whether the model is on the CPU."""
        return self._live.attached.is_on_host

    @property
    def device(self) -> torch.device:
        """Where the model lives."""
        return self._live.attached.device

    @property
    def resting(self) -> Sealed | None:
        """The last step while its state is the live one; for any thread; see `Survivor`."""
        sealed, step = self._sealed, self.recorder.step
        is_open = step.state is State.OPEN and not step.has_stepped
        return sealed if is_open and step.number == sealed.differential.step + 1 else None

    def is_as_sealed(self) -> bool:
        """Whether a snapshot taken now would be one of the last step."""
        staging = self._staging
        keeps_items = staging.items(self.step) is not None
        is_sealed = self.recorder.is_as_sealed(with_items=not keeps_items)
        return is_sealed and staging.is_as_committed()

    def peek_news(self) -> tuple[RankNews, ...] | None:
        """Return the newest news that are here of all ranks, of the last two steps; for any thread."""
        return self.agreement.peek()

    @property
    def large_items(self) -> dict[str, int]:
        """Items of which a step logged more than 1 MiB, and the most bytes one did."""
        return dict(self._live.tracker.large_items)

    @property
    def committed_step(self) -> int:
        """See the class; for any thread."""
        return self._staging.reach.sure_step if self.agreement.is_alone else self._heard_step

    @property
    def num_pending(self) -> int:
        """How many steps have ended and are on their way from an accelerator; for any thread."""
        return self._staging.num_pending

    def start(self) -> None:
        """Tell the other ranks that this one is ready for its first step, as all of them are."""
        if not self.agreement.is_alone:
            self._tell()

    def before_optimizer(self, index: int, arguments: Sequence[Any]) -> None:
        """Read what an optimizer is about to consume; see `OptimizerHooks`."""
        recorder = self.recorder
        recorder.refuse_autocast(index)
        with self._timed(), without_autocast(self._live.attached.device):
            recorder.begin_call(index)
            self.hear()
            self.gate.enter()
            self._staging.wait_for_room()  # before gradients lie on the device once more
            if recorder.consume(index, arguments):
                step = recorder.step
                self._staging.stage_ahead(step.number, recorder.reducer, len(step.earlier))
            self._staging.hold()  # last: the host waits for gradients before, and for no snapshot

    def after_optimizer(self, index: int) -> None:
        """Look at what an optimizer has just updated; see `OptimizerHooks`."""
        with self._timed():
            self._mark = devices.mark(self.device)
            self._stream = devices.stream_of(self.device) if self._mark is not None else None
            self.recorder.end(index)

    def _timed(self) -> Timed:
        counters = self._trainer.counters
        return counters.timed(counters.training_thread_seconds)

    def hear(self, timeout_seconds: float | None = None) -> tuple[RankNews, ...]:
        """Wait, once, for what all ranks said after the last commit; then that step is committed.

        Returns:
            What they said, in rank order; nothing of a single process.

        Raises:
            RankLost: If a rank ended.
            RanksDiverged: If ``on_error="raise"`` and ranks are not alike; on all ranks.
            UsageError: If a rank is at another step.
        """
        agreement = self.agreement
        heard, is_new = agreement.hear(timeout_seconds)
        if is_new:
            self._staging.hear(heard)
            rebased = {news.has_rebased for news in heard}
            if len(rebased) > 1:  # a snapshot exists only with every rank's share
                self._schedule.ask(Why.OTHER_RANK)
            snapshot = agreement.joint_snapshot(heard)
            self._staging.reach.close(snapshot)
            if True in rebased:
                self.recorder.proofs.reopen()
            if agreement.health.compare(self.step, heard, self.recorder.watch.digests):
                self._schedule.ask(Why.RANKS_APART)
            else:
                self.agree_on(min(n.staged if n.gap <= snapshot else n.sure for n in heard))
                if not self.queue.logs_steps:  # a replica applies what is committed
                    self._show()
        agreement.health.check()
        return heard

    def commit(self) -> None:
        """Stage the step that just ended; what is on its way from an accelerator is staged as soon as it is here.

        At most two steps are on their way at a time. What staging meets there is raised by a later commit.

        Raises:
            WriterFailed: If ``on_error="raise"`` and the writer reports trouble.
            RanksDiverged: If ``on_error="raise"`` and their parameters differ; on all ranks.
            StorageError: If staging memory is exhausted.
            RunInUse: If another machine took over the run; on all ranks.
            UsageError: If something took the place of what was attached.
            UnsupportedOptimizer: If the step of a registered optimizer does not replay.
        """
        try:
            self._commit()
        finally:
            self.gate.leave()
            devices.go_first(self._stream)  # what was queued here reads what the next body writes

    def _commit(self) -> None:
        devices.follow(self._mark)  # a body may run on a stream of the user's
        with self._timed():
            self._staging.make_room()
        look = self.keep_staging()
        if self.agreement.is_alone:
            self._staging.reach.close(look.writer.durable_snapshot)
        with self._timed():
            heard = self._agree()
            sealed = self._seal()
            look = self._staging.stage(sealed, look)
            has_gap = self._advance(sealed, heard)
        is_preempted = self.agreement.is_preempted
        # All ranks know these alike, whatever else one of them needs a snapshot for.
        if self._schedule.cadence.is_kept(self.step) or (is_preempted and not self._is_stopping):
            self._hear_of_all_steps()
        self._is_stopping = is_preempted
        why = self._schedule.settle(
            self.step, heard, look, rebases=has_gap, is_preempted=is_preempted
        )
        if why is not None:
            self._staging.snapshot(
                sealed,
                look,
                waits=why in _WAITED_FOR,
                is_due=why is not Why.RING,
                trails=why in _REPEATED,
            )
        self._trainer.meter.step_done(max(0, self.committed_step - self.queue.durable_step))
        self._show()

    def _hear_of_all_steps(self) -> None:
        """Have all ranks stage what is on its way, and hear of it; all call it behind the same step.

        Else a snapshot of this very step, which takes another one's place in memory, would be put off until they have.
        """
        if self.queue.logs_steps or not self.queue.most_late:
            return  # no image takes another one's place
        self._staging.wait_for_steps(0)
        if not self.agreement.is_alone:
            self.agreement.settle(self.hear())
            self._tell()
            self.hear()
        self._show()

    def _agree(self) -> tuple[RankNews, ...]:
        """Follow the news as all ranks do, or refuse the step; returns the news."""
        agreement, heard = self.agreement, self.hear()
        self._objects.check()
        self.recorder.proofs.settle(self.step + 1)
        # Another trainer may have taken over the run while this process slept in the step.
        agreement.refuse_lost_run(heard)
        if agreement.acts_after(self.step):
            if any(news.is_preempted for news in heard) and not agreement.was_told_to_stop:
                self.preempt()
            failing = [rank for rank, news in enumerate(heard) if news.has_storage_error]
            if agreement.is_alone and self._trainer.errors.any:
                failing = [self._live.rank]
            self._trainer.errors.hear(failing)
        self._schedule.cadence.follow(self.step, heard)
        return heard

    def _seal(self) -> Sealed:
        recorder, number = self.recorder, self.recorder.step.number
        recorder.look_outside()
        with without_autocast(self._live.attached.device):
            sealed = recorder.seal(
                thorough=self._schedule.is_audited(number),
                follows_snapshot=number - 1 in (self._base_step, self.queue.images.step)
                or self._schedule.cadence.is_due(number - 1),
            )
        return sealed

    def _advance(self, sealed: Sealed, heard: Sequence[RankNews]) -> bool:
        """Take the step for ended, begin the next one, and tell the other ranks.

        Returns:
            Whether a step has turned out since the last commit to be recovered only by a snapshot.
        """
        self._sealed, self.step = sealed, sealed.differential.step
        has_gap = self._staging.reach.take_news() or sealed.rebases
        self.recorder.step.stage()
        self.agreement.settle(heard)
        self.recorder.begin(self.step + 1)
        if self.agreement.is_alone:
            if has_gap:
                self.recorder.proofs.reopen()
        else:
            self._staging.keep_up(self.step)
            self._tell(has_rebased=has_gap)
        return has_gap

    def _tell(self, *, has_rebased: bool = False) -> None:
        """Tell the other ranks how this one stands after the step that ended last.

        They act on it a whole step later, so it goes by a look of its own.
        """
        look = self.queue.attend()
        sealed = self._sealed
        interval, batch = self._schedule.cadence.wish()
        news = RankNews(
            incarnation=self._live.incarnation,
            step=self.step,
            is_preempted=self.agreement.was_told_to_stop,
            has_lost_run=self.agreement.has_lost_run,
            has_storage_error=self._trainer.errors.any,
            has_rebased=has_rebased,
            staged=self._staging.reach.step,
            sure=self._staging.reach.sure_step,
            gap=self._staging.reach.last_gap,
            snapshot=look.writer.durable_snapshot,
            interval=interval,
            batch=batch,
            stepped=sealed.stepped,
            consumed=sealed.consumed,
            own=sealed.own,
            other=sealed.other,
            watched=sealed.watched,
            **self._staging.news(self.step, look),
        )
        self.agreement.tell(news)

    def keep_staging(self) -> Look:
        """Start dead processes anew, and look at storage; make staging anew where somebody removed it.

        Then a full snapshot follows.

        Returns:
            The newest look.

        Raises:
            StorageError: If it cannot be made.
        """
        with self._timed():
            look = self.queue.attend()
        if self._staging.is_gone(look) and not self.agreement.has_lost_run:
            self._staging.renew(self.step)
            self._show()
            if self.agreement.is_alone:  # several ranks take it once all have heard of it
                self._schedule.ask(Why.STAGING_RENEWED)
            look = self.queue.attend()
        return look

    def settle(self, timeout_seconds: float | None = None) -> None:
        """Wait until every step that has ended is staged; a single process takes the snapshot that one of them needs.

        Args:
            timeout_seconds: How long at most; None: as long as it takes.

        Raises:
            LowDiffError: What `commit` may raise.
        """
        staging = self._staging
        staging.settle(timeout_seconds)
        has_time, has_gap = timeout_seconds is None, staging.reach.last_gap >= 0
        if has_time and has_gap and self.agreement.is_alone and self.is_as_sealed():
            staging.snapshot(self._sealed, self.queue.attend(), waits=True)
            self._show()

    def end_within(self, seconds: float) -> float:
        """Let nobody wait for storage for longer than some seconds from now; returns when they are over."""
        self._trainer.deadline = time.monotonic() + seconds
        return self._trainer.deadline

    def snapshot(self, *, required: bool) -> None:
        """Stage a snapshot of the last step.

        Args:
            required: Whether to wait for the memory that it takes; else it may be owed.

        Raises:
            StorageError: If it is required and there is no memory for it.
        """
        self._staging.snapshot(self._sealed, self.queue.attend(), required=required)

    def secure(self, *, takes_live: bool) -> int:
        """Have the newest committed step become durable as training ends; returns it.

        Args:
            takes_live: Whether the live state serves where nothing else holds that step.
        """
        self._show()
        queue = self.queue
        if takes_live and not (queue.makes_images or queue.logs_steps or self.resting is None):
            # On an accelerator only the live state can be a snapshot, if nothing has moved it since.
            is_newest, is_ready = self.committed_step == self.step, self.is_storage_ready()
            if is_newest and is_ready and self.is_as_sealed():
                self.snapshot(required=False)
        return queue.secure(self.committed_step)

    def is_storage_ready(self) -> bool:
        """Whether a snapshot of the last step would not stop training."""
        return self.queue.is_ready_for_snapshot(self.step, self.queue.attend())

    def agree_on(self, step: int) -> None:
        """Take a step for committed: all ranks hold it."""
        self._heard_step = max(self._heard_step, step)

    def preempt(self) -> None:
        """Prepare for a near end, and tell the other ranks with the next news; for any thread."""
        self.agreement.stop()
        self.storage.writer.write_through()

    def leave(self) -> None:
        """Remove the optimizer hooks, and touch nothing else: the process has only a copy of it."""
        self._hooks.remove()

    def die(self, *, kills_processes: bool) -> None:
        """End as a process does that is killed: what is on its way is gone, and staging stays; see `Storage.die`."""
        self._staging.drop()
        self.storage.die(kills_processes=kills_processes)

    def detach(self) -> None:
        """Remove the optimizer hooks and give back what gradients and news were exchanged with."""
        self._staging.drop()
        self._hooks.remove()
        self._objects.remove()
        self.recorder.reducer.close()
        self.queue.images.release()
        self.agreement.close()

    def _show(self) -> None:
        is_preempted = self.agreement.is_preempted
        self._staging.show(self.committed_step, preempted=is_preempted)
        self.agreement.note(self._live.incarnation, self.committed_step)


class OptimizerHooks:
    """Hooks of one session in its optimizers.

    Attributes:
        pre_hook_ids: Optimizer -> id of our pre-hook, behind which no other may come.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], session: Session) -> None:
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self.pre_hook_ids: list[int] = []
        for index, optimizer in enumerate(optimizers):
            before = optimizer.register_step_pre_hook(partial(_before, session, index))
            self.pre_hook_ids.append(before.id)
            after = optimizer.register_step_post_hook(partial(_after, session, index))
            # First of all: what the user's hooks write, replay lacks, so it must not count as the
            # optimizer's own work.
            hooks = optimizer._optimizer_step_post_hooks
            assert isinstance(hooks, OrderedDict)
            hooks.move_to_end(after.id, last=False)
            self._handles += [before, after]

    def remove(self) -> None:
        """Take the hooks out."""
        for handle in self._handles:
            handle.remove()
        self._handles = []


def _before(
    session: Session,
    index: int,
    _: torch.optim.Optimizer,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> None:
    where = inside(session.device)
    # torch.compile goes on without compiling what raises while it is traced, but it still
    # compiles what that calls: the update itself, and any function that is called here.
    if torch.compiler.is_compiling() or _compiling_callback() not in (None, False):
        raise UsageError(
            "optimizer.step() runs inside torch.compile, whose arithmetic replay does not "
            "repeat; compile the model alone, or mark the function that calls "
            "optimizer.step() with torch.compiler.disable"
        )
    if where:
        raise UsageError(
            f"optimizer.step() runs inside {where}, where nothing can record the step; compute "
            "gradients there, and call optimizer.step() outside"
        )
    if torch.is_inference_mode_enabled():
        raise UsageError(
            "optimizer.step() runs under torch.inference_mode(), where PyTorch makes optimizer state "
            "whose writes nobody can notice; call it outside, or under torch.no_grad()"
        )
    session.before_optimizer(index, [*args, *kwargs.values()])


def _after(session: Session, index: int, *_: object) -> None:
    session.after_optimizer(index)
