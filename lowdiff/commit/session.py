"""One incarnation of a run while it lives: from the optimizer's hooks to the staging log."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from crc32c import crc32c

from lowdiff.commit.health import Health
from lowdiff.commit.image import Live
from lowdiff.commit.news import News, RankNews
from lowdiff.commit.queue import Stager
from lowdiff.commit.run_lock import RunLock, StagingArea
from lowdiff.errors import StorageError, UsageError
from lowdiff.model.ranks import Ranks
from lowdiff.model.watch import AttachedObjects, Seen, Watch
from lowdiff.persistence.format.differentials import encode_scalars, sections_of
from lowdiff.persistence.format.framing import RecordKind
from lowdiff.persistence.format.values import encode
from lowdiff.protocols import Reducer
from lowdiff.settings import Settings
from lowdiff.step.ddp_hook import hook_of, without_autocast
from lowdiff.step.grad_scaling import Scaling
from lowdiff.step.optimizer_hooks import StepCapture
from lowdiff.step.proofs import Proofs
from lowdiff.types import Differential, Payload, Written

_logger = logging.getLogger(__name__)

#: Steps after which frozen parameters are read whole: the first of a life, and those of snapshots.
_AUDITED_FIRST = 3
#: So much is read in about a millisecond.
_CHEAP_BYTES = 16 << 20


class Session:
    """Captures every step of one rank and stages it."""

    def __init__(
        self,
        *,
        live: Live,
        settings: Settings,
        incarnation: int,
        step: int,
        reducer: Reducer,
        items: Mapping[str, bytes],
        stager: Stager,
        staging: StagingArea,
        lock: RunLock,
        scaling: Scaling,
        ranks: Ranks,
        proofs: Proofs,
        optimizer_steps: int,
    ) -> None:
        self.step = step
        self.committed_step = step
        self.stager = stager
        self._staging = staging
        self._lock = lock
        self.reducer = reducer
        self._live = live
        self._attached = attached = live.attached
        self._settings = settings
        self._incarnation = incarnation
        self._rank, self._world_size = live.rank, live.world_size
        self._residual = live.residual
        self._tracker = live.tracker
        self._averages = live.averages
        self._watch = Watch(
            attached,
            live.averages.named_tensors(),
            live.rank,
            live.world_size,
            is_live=settings.watch == "live",
        )
        self._news = News(ranks.group, live.world_size)
        self._heard: tuple[RankNews, ...] | None = None
        self.health = Health(
            [spec.name for spec in attached.layout.parameters],
            ranks,
            raises=settings.on_error == "raise",
        )
        self.scaling = scaling
        ddp = attached.ddp
        hook = None if ddp is None else hook_of(ddp)
        told = hook if live.world_size > 1 else None
        self._proofs = proofs
        self._capture = StepCapture(
            attached,
            reducer,
            live.residual,
            scaling,
            live.averages,
            self._watch,
            proofs,
            told,
            optimizer_steps,
        )
        frozen_bytes = sum(tensor.nbytes for tensor in attached.frozen_parameters().values())
        trained_bytes = sum(spec.nbytes for spec in attached.layout.parameters)
        affordable = max(trained_bytes, _CHEAP_BYTES)
        self._reads_frozen = settings.watch == "live" and frozen_bytes <= affordable
        self._seen = Seen((), {}, Written())
        self._consumed = self._stepped = 0
        self._has_rebased = self._wants_snapshot = False
        self._base_step = step
        self._unstaged: Differential | None = None
        self._is_half_made = False
        self._is_signalled = False
        self._all_preempted = self._is_prepared = False
        self._is_taken_over = False
        self._heeded_step = -1
        self._tried_snapshot_step = -1
        self._warned: set[str] = set()
        self._committed_held = attached.held()
        live.tracker.start(items)
        self._stage_base()
        self.stager.show(step, step)
        self._begin()
        self._capture.install(
            lambda: self.stager.timed("training_thread_seconds"), self.hear, self._stage_ahead
        )
        self._objects = AttachedObjects(attached)

    def start(self) -> None:
        """Tell the other ranks that this one is ready for its first step, as all of them are."""
        self._news.tell(self._own_news())

    @property
    def has_finished_step(self) -> bool:
        """Whether every optimizer stepped since the last commit, and the step can be committed."""
        return self._capture.has_finished and not self._objects.has_refused

    def _stage_ahead(self) -> None:
        """An optimizer's gradients were read, and are still what it will use."""
        with self._unless_gone():
            self.stager.stage_ahead(self.step + 1, self.reducer, len(self._capture.earlier))

    def hear(self, timeout_seconds: float | None = None) -> tuple[RankNews, ...]:
        """What all ranks said after the last commit; waits for it once, before the next step.

        Raises:
            RankLost: If a rank ended.
            RanksDiverged: If ``on_error="raise"`` and ranks are not alike; on all ranks.
            UsageError: If a rank is at another step.
        """
        alone = self._world_size == 1
        # A single process waits for nobody, and looks at itself again when it commits: another
        # trainer may have taken over the run while it slept in the step.
        if self._heard is None or alone:
            heard = (self._own_news(),) if alone else self._news.hear(timeout_seconds)
            self._heard = heard
            rebased = {news.has_rebased for news in heard}
            # A snapshot exists only with every rank's share.
            self._wants_snapshot |= len(rebased) > 1
            if True in rebased:
                self._proofs.reopen()
            if self.health.part(self.step, heard, self._watch.digests):
                self._wants_snapshot = True
            else:
                # Every rank holds the step before, so it is committed.
                self.committed_step = self.step
                if not alone and self._settings.has_replica:
                    # A replica applies what is committed.
                    self.stager.show(self.step, self.committed_step, preempted=self.is_preempted)
        self.health.check()
        return self._heard

    def commit(self) -> None:
        """Stage the step that just ended; an accelerator is waited for.

        Raises:
            WriterFailed: If ``on_error="raise"`` and the writer reports trouble.
            RanksDiverged: If ``on_error="raise"`` and their parameters differ; on all ranks.
            StorageError: If staging memory is exhausted.
            RunInUse: If another machine took over the run; on all ranks.
            UsageError: If something took the place of what was attached.
            UnsupportedOptimizer: If the step of a registered optimizer does not replay.
        """
        if self._attached.device.type != "cpu":  # a body may run on a stream of the user's
            torch.accelerator.synchronize(self._attached.device)
        self.keep_staging()
        with self.stager.timed("training_thread_seconds"):
            heard = self.hear()
            self._objects.check()
            self._proofs.settle(self.step + 1)
            self._is_taken_over |= any(news.has_lost_run for news in heard)
            if self._is_taken_over:
                raise self._lock.taken_over()
            self._heed(heard)
            self.stager.cadence.heed(self.step, heard)
            self._capture.look_outside()
            # Making it consumes what changed: a commit that failed to stage it must find it again.
            if self._unstaged is None:
                with without_autocast(self._attached.device):
                    self._unstaged = self._make_differential()
            is_changed = self._capture.changed_outside
            rebases = is_changed or self._proofs.has_late_state
            why = self._why_rebased() if is_changed else ""
            for name, size in self._tracker.large_items.items():
                cost = f"{size / 1e6:.1f} MB in every step that changes it"
                self._warn_once(f"{name} changed, which costs {cost}")
            self._stage(self._unstaged, rebases=rebases)
            self._unstaged = None
            self.step += 1
            self._all_preempted |= any(news.is_preempted for news in heard)
            self._has_rebased = rebases
            self._begin()
            self._news.tell(self._own_news())
        if rebases:
            self._rebase(why)
        elif self._is_snapshot_due(heard):
            self._tried_snapshot_step = self.step
            self.stager.cadence.snapshot_taken(self.step)
            self.snapshot()
        self.stager.step_done(self.step, self.committed_step, preempted=self.is_preempted)

    def keep_staging(self) -> None:
        """Make staging anew where somebody removed it; a full snapshot follows.

        Raises:
            StorageError: If it cannot be made.
        """
        if not self.stager.is_gone or self.is_taken_over:
            return
        try:
            self._renew_staging()
        except (OSError, StorageError):  # whoever removes files may not have finished
            self._renew_staging()

    def _renew_staging(self) -> None:
        self.stager.end_processes()
        self._staging.make_anew()
        self._residual.move(self._staging.folder.residual)
        self.stager.begin_anew(self.step)
        self.stager.show(self.step, self.committed_step, preempted=self.is_preempted)
        # Several ranks take it once all have heard of it.
        self._wants_snapshot |= self._world_size == 1

    @contextmanager
    def _unless_gone(self) -> Iterator[None]:
        """Bear that staging was removed meanwhile: the next commit makes it anew."""
        try:
            yield
        except StorageError:
            if not self.stager.is_gone:
                raise

    def _stage(self, differential: Differential, *, rebases: bool) -> None:
        with self._unless_gone():
            self.stager.stage(
                RecordKind.DIFFERENTIAL,
                differential.step,
                encode_scalars(differential),
                sections_of(differential),
                rebases=rebases,
            )

    @property
    def is_preempted(self) -> bool:
        """Whether a rank was told to stop soon; turns true at the same commit on all ranks."""
        return self._all_preempted or (self._world_size == 1 and self._is_signalled)

    @property
    def is_taken_over(self) -> bool:
        """Whether another machine has taken over the run, as far as this rank knows."""
        return self._is_taken_over or self._lock.is_lost()

    def preempt(self) -> None:
        """Prepare for a near end and tell the other ranks with the next exchange; any thread."""
        self._is_signalled = True
        self.stager.writer.write_through()

    def _heed(self, heard: tuple[RankNews, ...]) -> None:
        """Act on what ranks told each other in this step, once if the commit is repeated."""
        if self._heeded_step < self.step:
            self._heeded_step = self.step
            if any(news.is_preempted for news in heard) and not self._is_signalled:
                self.preempt()
            self.stager.heed([rank for rank, news in enumerate(heard) if news.is_in_trouble])

    def _why_rebased(self) -> str:
        step, num_steps = self.step + 1, len(self._capture.earlier) + 1
        if not self._capture.is_loggable:
            return (
                f"loop bodies make more optimizer steps (step {step}: {num_steps}) than staging memory "
                "is set aside for; such a step costs a full snapshot"
            )
        return (
            "parameters, optimizer state or their average were changed outside optimizer.step() "
            f"and update_parameters() around step {step} (load_state_dict, clamping, an EMA "
            "swap?), or its commit was interrupted; such a step costs a full snapshot"
        )

    def _rebase(self, why: str) -> None:
        """The step cannot be replayed: only a snapshot of it can be recovered."""
        if why:
            self._warn_once(why)
        self.snapshot()
        if self._settings.backpressure == "block":
            with self._unless_gone():
                self.stager.wait_for_snapshot()

    @property
    def large_items(self) -> dict[str, int]:
        """Items of which a step logged more than 1 MiB, and the most bytes one did."""
        return dict(self._tracker.large_items)

    def _warn_once(self, text: str) -> None:
        kind = text.partition(" ")[0]
        if kind not in self._warned:
            self._warned.add(kind)
            _logger.warning("rank %d: %s. This is said once", self._rank, text)

    def _make_differential(self) -> Differential:
        """Read the step that just ended.

        Raises:
            UsageError: If this was broken off where it can be done once only, with several ranks.
        """
        step = self.step + 1
        if self._is_half_made and self._world_size > 1:
            # The others' records of it are whole, so they would take no snapshot instead of it.
            raise UsageError(
                f"commit() of step {step} was broken off on this rank, and what it had read is gone: "
                "call close() and end all ranks; the next attach goes on from the step before"
            )
        # First, because the user's objects may raise: nothing has been consumed then.
        is_thorough = self._is_thorough(step)
        items = self._tracker.changed(thorough=is_thorough)
        # The rest can be done once only; after an interrupt there, the step is its snapshot.
        self._capture.changed_outside |= self._is_half_made
        self._is_half_made = True
        steps = self._capture.optimizer_steps()
        held = self._committed_held = self._attached.held()
        self._residual.advance()
        self.scaling.end_step()
        averages, replayable = self._averages.commit()
        self._capture.changed_outside |= not replayable
        seen = self._seen = self._watch.at_commit(step, averages)
        earlier = self._capture.earlier
        if self._world_size > 1:
            calls = [*(call.optimizers for call in earlier), steps]
            self._stepped = sum(
                any(call[i].stepped for call in calls) << i for i in range(len(steps))
            )
            self._consumed = crc32c(
                encode([[o.stepped, o.consumed, o.after] for call in calls for o in call])
            )
        self._residual.copy(step)
        made = self._differential(
            step,
            optimizers=steps,
            absent=tuple(sorted(self._capture.absent)),
            held=tuple(held),
            payload=self.reducer.payload(),
            items=items,
            digests=seen.digests,
            averages=seen.averages,
            written=seen.written,
            earlier=earlier,
        )
        self._is_half_made = False
        return made

    def _differential(self, step: int, **parts: Any) -> Differential:
        return Differential(
            step=step,
            incarnation=self._incarnation,
            rank=self._rank,
            world_size=self._world_size,
            residual=self._residual.mark(),
            **parts,
        )

    def _is_thorough(self, step: int) -> bool:
        """Whether to read frozen parameters whole that nothing says were written.

        At every step where they are no larger than what trains, as a target network is, or small.
        """
        return (
            self._reads_frozen
            or step - self._base_step <= _AUDITED_FIRST
            or self.stager.cadence.is_due(step)
        )

    def _begin(self) -> None:
        step = self.step + 1
        self._capture.begin(step)
        self.reducer.begin(self._incarnation << 40 | step)
        self._heard = None

    def _own_news(self) -> RankNews:
        """What this rank tells the others of the step that it has committed last."""
        stager, cadence = self.stager, self.stager.cadence
        interval, batch = cadence.wish()
        return RankNews(
            incarnation=self._incarnation,
            step=self.step,
            is_preempted=self._is_signalled,
            has_lost_run=self._lock.is_lost(),
            is_in_trouble=stager.trouble.is_there,
            owes_snapshot=stager.owes_snapshot,
            can_snapshot=stager.is_ready_for_snapshot(self.step),
            has_rebased=self._has_rebased,
            interval=interval,
            batch=batch,
            stepped=self._stepped,
            consumed=self._consumed,
            own=self._seen.own,
            other=self._seen.other,
            watched=self._seen.watched,
        )

    def _stage_base(self) -> None:
        """Name the residual this incarnation starts from, should it die in its first step."""
        self._residual.copy(self.step, is_first=True)
        base = self._differential(self.step, optimizers=(), absent=(), held=(), payload=Payload(()))
        self.stager.stage(RecordKind.BASE, self.step, encode_scalars(base), ())

    def _is_snapshot_due(self, heard: tuple[RankNews, ...]) -> bool:
        wants, self._wants_snapshot = self._wants_snapshot, False
        is_due = self.stager.cadence.is_due(self.step) or wants
        if self._settings.has_replica:
            # The replica makes the images for the disk. On CUDA its arithmetic may differ in the
            # last place, so it begins anew with the trainer's state as often.
            drifts = self._attached.device.type != "cpu" and is_due
            # Nothing but an image outlives the machine, and that may be taken away soon.
            is_last = self.is_preempted and not self._is_prepared
            self._is_prepared |= is_last
            is_due = is_last or drifts or wants
        return is_due or self._can_catch_up(heard)

    def _can_catch_up(self, heard: tuple[RankNews, ...]) -> bool:
        """Whether to take a snapshot that a rank owes; it exists only with every rank's shard."""
        if self._world_size == 1:
            return self.stager.owes_snapshot and self.stager.is_ready_for_snapshot(self.step)
        # The news are from before the last commit's snapshot, which may be the one owed.
        return (
            self._tried_snapshot_step < self.step - 1
            and any(news.owes_snapshot for news in heard)
            and all(news.can_snapshot for news in heard)
        )

    def snapshot(self, *, required: bool = False) -> None:
        """Stage a snapshot of the current step, unless that was the last one staged.

        Raises:
            StorageError: If it is required and there is no memory for it.
        """
        if self.stager.snapshot_step != self.step:
            held, groups = self._committed_held, self._capture.committed_groups
            with nullcontext() if required else self._unless_gone():
                self.stager.stage_snapshot(
                    self.step, partial(self._live.shard, held, groups), required=required
                )

    def is_as_committed(self) -> bool:
        """Whether the live state is still that of the last commit."""
        return (
            self._capture.is_as_committed()
            and self._watch.is_as_committed()
            and self._averages.is_as_committed
            and self._tracker.is_as_committed()
        )

    def leave(self) -> None:
        """Remove the optimizer hooks, and touch nothing else: the process has only a copy of it."""
        self._capture.remove()

    def detach(self) -> None:
        """Remove the optimizer hooks and give back what gradients were exchanged with."""
        self._capture.remove()
        self._objects.remove()
        self.reducer.close()
