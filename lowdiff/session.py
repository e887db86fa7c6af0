"""One incarnation of a run while it lives: from the optimizer's hooks to the staging log."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

from lowdiff.capture import restore_random_states
from lowdiff.digests import Digester
from lowdiff.divergence import Divergence
from lowdiff.errors import UsageError
from lowdiff.hook import hook_of, without_autocast
from lowdiff.persistence.differentials import encode_scalars
from lowdiff.persistence.framing import RecordKind
from lowdiff.persistence.snapshots import ImageTensor
from lowdiff.protocols import Reducer
from lowdiff.rolling import Rolling
from lowdiff.run_lock import RunLock
from lowdiff.scaling import Scaling
from lowdiff.settings import Settings
from lowdiff.snapshot import Live
from lowdiff.stager import Stager
from lowdiff.step_capture import StepCapture
from lowdiff.types import Differential, Digest, Payload

#: What a rank tells all others on the back of the gradients' exchange.
_PREEMPTED = 1
_IN_TROUBLE = 2
_OWES_SNAPSHOT = 4
_READY_FOR_SNAPSHOT = 8
_LOST_RUN = 16

_logger = logging.getLogger(__name__)

#: Steps whose gradients are counted against what was exchanged: the first, and then a few.
_AUDITED_FIRST = 3
_AUDITED_EVERY = 64


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
        lock: RunLock,
        scaling: Scaling,
    ) -> None:
        self.step = step
        self.committed_step = step
        self.stager = stager
        self._lock = lock
        self.reducer = reducer
        self._live, self._copies = live, live.copies
        self._attached = attached = live.attached
        self._settings = settings
        self._incarnation = incarnation
        self._rank, self._world_size = live.rank, live.world_size
        self._residual = live.residual
        self._tracker = live.tracker
        self._averages = live.averages
        self._rolling: Rolling | None = None
        if settings.snapshot == "rolling":
            self._rolling = Rolling(live, stager, settings)
        self._digester = Digester(attached.layout)
        raises = settings.on_error == "raise"
        self.divergence = Divergence(attached, self._digester, live.rank, raises=raises)
        self.scaling = scaling
        ddp = attached.ddp
        hook = None if ddp is None else hook_of(ddp)
        if hook is not None and ddp is not None and ddp.find_unused_parameters:
            hook.residual = live.residual
        told = hook if live.world_size > 1 else None
        self._capture = StepCapture(attached, reducer, live.residual, scaling, live.averages, told)
        self._pieces = self._digester.pieces_of(live.rank, live.world_size)
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
            lambda: self.stager.timed("differential_seconds"), self._before_step, self._stage_ahead
        )

    def forward_begins(self) -> None:
        """A forward pass that a backward pass will follow begins."""
        self._capture.forward_begins()

    @property
    def has_finished_step(self) -> bool:
        """Whether every optimizer stepped since the last commit."""
        return self._capture.has_finished

    def _before_step(self) -> None:
        """An optimizer is about to overwrite what may still be copied."""
        self._copies.hold()
        # On an accelerator gradients have come only once the host has read them.
        if not self._copies.lag and self._capture.has_exchanged:
            self._note_commit()

    def _stage_ahead(self) -> None:
        """An optimizer's gradients were read, and are still what it will use."""
        if not self._copies.lag:  # else the record of the step before comes first
            self.stager.stage_ahead(self.step + 1, self.reducer)

    def _note_commit(self) -> None:
        """Every rank sent its gradients of this step, so every rank had committed the one before."""
        # A single process knows what it has staged; others may have theirs still under way.
        lag = self._copies.lag and self._world_size > 1
        self.committed_step = max(self.committed_step, self.step - lag)
        if self._world_size > 1 and self._settings.has_replica:
            # A replica applies what is committed.
            self.stager.show(self.step, self.committed_step, preempted=self.is_preempted)

    def commit(self) -> None:
        """Stage the step that just ended; where an accelerator made it, at the next call.

        Raises:
            WriterFailed: If ``on_error="raise"`` and the writer reports trouble.
            RanksDiverged: If ``on_error="raise"`` and their parameters differ; on all ranks.
            StorageError: If staging memory is exhausted.
            RunInUse: If another machine took over the run; on all ranks.
        """
        self.finish_copies()
        with self.stager.timed("differential_seconds"):
            notes = self.reducer.heard()
            if notes or self._world_size == 1:
                self._note_commit()
            self._is_taken_over |= any(note & _LOST_RUN for note in notes or (self._note(),))
            if self._is_taken_over:
                raise self._lock.taken_over()
            self._heed(notes)
            self.stager.cadence.heed(self.step, notes)
            self._capture.look_outside()
            # Making it consumes what changed: a commit that failed to stage it must find it again.
            if self._unstaged is None:
                with without_autocast(self._attached.device):
                    self._make_differential()
            rebases = self._capture.changed_outside
        if self._rolling is not None:
            self._rolling.copy(self.step + 1, self._committed_held)
        self._copies.then(partial(self._stage, rebases=rebases))
        with self.stager.timed("differential_seconds"):
            self.step += 1
            self._all_preempted |= any(note & _PREEMPTED for note in notes)
            self._begin()
        if rebases:
            self._rebase()
        elif self._rolling is not None and self._rolling.finish(self.step):
            self._tried_snapshot_step = self.step
        elif self._is_snapshot_due(notes):
            self._tried_snapshot_step = self.step
            self.stager.cadence.snapshot_taken(self.step)
            self.snapshot()
        self.stager.step_done(self.step, self.committed_step, preempted=self.is_preempted)

    def finish_copies(self) -> None:
        """Stage what an accelerator had still to hand over of the last commit, once it is there."""
        if self._copies.lag:
            with self.stager.timed("differential_seconds"):
                self._copies.wait()
            self._copies.finish()
            self._copies.follow()

    def _stage(self, *, rebases: bool) -> None:
        differential = self._unstaged
        assert differential is not None
        with self.stager.timed("differential_seconds"):
            self._warn_about_large_items()
            self.stager.stage(
                RecordKind.DIFFERENTIAL,
                differential.step,
                encode_scalars(differential),
                differential.payload,
                rebases=rebases,
            )
        self._unstaged = None

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

    def _heed(self, notes: tuple[int, ...]) -> None:
        """Act on what ranks told each other in this step, once if the commit is repeated."""
        if self._heeded_step < self.step:
            self._heeded_step = self.step
            if any(note & _PREEMPTED for note in notes) and not self._is_signalled:
                self.preempt()
            self.stager.heed([rank for rank, note in enumerate(notes) if note & _IN_TROUBLE])
            self.divergence.heed(self.step, notes)

    def _rebase(self) -> None:
        """The step cannot be replayed: only a snapshot of it can be recovered."""
        self._warn_once(
            f"parameters, optimizer state or their average were changed outside optimizer.step() "
            f"and update_parameters() around step {self.step} (load_state_dict, clamping, an EMA "
            "swap?), or its commit was interrupted; such a step costs a full snapshot"
        )
        self.snapshot(at_once=True)
        if self._settings.backpressure == "block":
            self.stager.wait_for_snapshot()

    def _kept_gradients(self) -> Collection[int]:
        """Parameters with gradients for a later step; a body that only makes such is not resumed."""
        has_stepped = self._capture.has_stepped
        if has_stepped and not self._residual.pending:
            return ()  # looking for them reads all gradients
        kept = self._capture.kept_gradients()
        if kept and not has_stepped:
            self._warn_once(
                f"step {self.step + 1} ended without optimizer.step() and with gradients: if they "
                "are accumulated for the next step, a resumed run will lack them; run all "
                "backward passes of an optimizer step between two commits"
            )
        return kept

    def _warn_about_large_items(self) -> None:
        for name, size in self._tracker.large_items.items():
            cost = f"{size / 1e6:.1f} MB in every step that changes it"
            self._warn_once(f"{name} changed, which costs {cost}")

    @property
    def large_items(self) -> dict[str, int]:
        """Items of which a step logged more than 1 MiB, and the most bytes one did."""
        return dict(self._tracker.large_items)

    def _warn_once(self, text: str) -> None:
        kind = text.partition(" ")[0]
        if kind not in self._warned:
            self._warned.add(kind)
            _logger.warning("rank %d: %s. This is said once", self._rank, text)

    def _make_differential(self) -> None:
        """Read the step that just ended; it is whole, in `_unstaged`, once the copies are.

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
        items = self._tracker.changed(thorough=is_thorough, fetch=self._copies.fetch_copy)
        # The rest can be done once only; after an interrupt there, the step is its snapshot.
        self._capture.changed_outside |= self._is_half_made
        self._is_half_made = True
        steps = self._capture.optimizer_steps()
        held = self._committed_held = self._attached.held()
        self._residual.advance(carried=self._kept_gradients())
        self.scaling.end_step()
        digest = self._digest(step)
        averages, replayable = self._averages.commit(self._digester, digest)
        self._capture.changed_outside |= not replayable
        absent = tuple(sorted(self._capture.absent))
        payload = self.reducer.payload(self._copies.fetch)
        self._residual.copy(step, self._copies)

        def whole() -> None:
            self._unstaged = self._differential(
                step,
                optimizers=steps,
                absent=absent,
                held=tuple(held),
                payload=payload,
                items=items(),
                digest=digest,
                averages=averages,
            )

        self._copies.then(whole)
        self._is_half_made = False

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
        """Whether to read frozen parameters that nothing says were written."""
        return step - self._base_step <= _AUDITED_FIRST or self.stager.cadence.is_due(step)

    def _digest(self, step: int) -> Digest | None:
        if self._attached.device.type != "cpu":
            return None  # it is computed on the host
        if self._settings.has_replica:
            return self._digester.digest_of(self._attached.parameters, self._pieces, step)
        return self._digester.digest(self._attached.parameters, step, self._rank, self._world_size)

    def _begin(self) -> None:
        step = self.step + 1
        self._capture.begin(step)
        audit = step - self._base_step <= _AUDITED_FIRST or step % _AUDITED_EVERY == 0
        self.reducer.begin(self._incarnation << 40 | step, audit=audit, note=self._note())

    def _note(self) -> int:
        """What this rank tells the others in the step that begins."""
        stager = self.stager
        state = self.divergence.note(self.step) if self._world_size > 1 else 0
        return (
            state
            | _LOST_RUN * self._lock.is_lost()
            | _PREEMPTED * self._is_signalled
            | _IN_TROUBLE * stager.trouble.is_there
            | _OWES_SNAPSHOT * stager.owes_snapshot
            | _READY_FOR_SNAPSHOT * stager.is_ready_for_snapshot(self.step)
            | stager.cadence.note()
        )

    def _stage_base(self) -> None:
        """Name the residual this incarnation starts from, should it die in its first step."""
        self._residual.copy(self.step, self._copies, is_first=True)
        self._copies.finish()
        base = self._differential(self.step, optimizers=(), absent=(), held=(), payload=Payload(()))
        self.stager.stage(RecordKind.BASE, self.step, encode_scalars(base), base.payload)

    def _is_snapshot_due(self, notes: tuple[int, ...]) -> bool:
        is_due = self.stager.cadence.is_due(self.step)
        if self._settings.has_replica:
            # The replica makes the images for the disk. On CUDA its arithmetic may differ in the
            # last place, so it begins anew with the trainer's state as often.
            drifts = self._attached.device.type != "cpu" and is_due
            # Nothing but an image outlives the machine, and that may be taken away soon.
            is_last = self.is_preempted and not self._is_prepared
            self._is_prepared |= is_last
            is_due = is_last or drifts
        return is_due or self._can_catch_up(notes)

    def _can_catch_up(self, notes: tuple[int, ...]) -> bool:
        """Whether to take a snapshot that a rank owes; it exists only with every rank's shard."""
        if self._world_size == 1:
            return self.stager.owes_snapshot and self.stager.is_ready_for_snapshot(self.step)
        # The notes are from before the last commit's snapshot, which may be the one owed.
        return (
            self._tried_snapshot_step < self.step - 1
            and any(note & _OWES_SNAPSHOT for note in notes)
            and all(note & _READY_FOR_SNAPSHOT for note in notes)
        )

    def snapshot(self, *, required: bool = False, at_once: bool = False) -> None:
        """Stage an atomic snapshot of the current step, unless that was the last one staged.

        An accelerator copies it while training goes on, up to the next optimizer step; unless it
        is required, or wanted at once, it is staged at the next commit.

        Raises:
            StorageError: If it is required and there is no memory for it.
        """
        if self._rolling is not None:
            self._rolling.restart()
        if self.stager.atomic_step != self.step:
            tensors = self._live.shard(self._committed_held, self._capture.committed_groups)
            is_late = self._copies.lag and not (required or at_once)
            stage = self._stage_late_snapshot if is_late else self.stager.stage_snapshot
            self._copies.then(partial(stage, self.step, tensors, required=required))
        if required or at_once:
            self._copies.finish()

    def _stage_late_snapshot(
        self, step: int, tensors: Callable[[], Sequence[ImageTensor]], *, required: bool
    ) -> None:
        # Who changes parameters between two steps may have done so while they were copied; and only
        # an optimizer's step holds an average back. Such a step takes a snapshot of its own when it
        # is committed.
        if step == self.step:
            capture = self._capture
            capture.look_outside()
            capture.changed_outside |= (
                not capture.has_stepped and not self._averages.is_as_committed
            )
            if capture.changed_outside:
                return
        self.stager.stage_snapshot(step, tensors, required=required)

    def is_as_committed(self) -> bool:
        """Whether the live state is still that of the last commit."""
        return (
            self._capture.is_as_committed()
            and self._averages.is_as_committed
            and self._tracker.is_as_committed()
        )

    def restore_random_states(self, items: Mapping[str, bytes]) -> None:
        """Set the random generators as they were at this session's first step."""
        restore_random_states(items, self._attached.device)

    def leave(self) -> None:
        """Remove the optimizer hooks, and touch nothing else: the process has only a copy of it."""
        self._capture.remove()

    def detach(self) -> None:
        """Remove the optimizer hooks and give back what gradients were exchanged with."""
        self._capture.remove()
        self.reducer.close()
