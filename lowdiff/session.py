"""One incarnation of a run while it lives: from the optimizer's hooks to the staging log."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping

from lowdiff.attached import Attached
from lowdiff.averages import Averages
from lowdiff.capture import ItemTracker, restore_random_states
from lowdiff.compressors.feedback import RotatingResidual
from lowdiff.digests import Digester
from lowdiff.persistence.differentials import encode_scalars
from lowdiff.persistence.framing import RecordKind
from lowdiff.protocols import Reducer
from lowdiff.rolling import Live, Rolling
from lowdiff.run_lock import RunLock
from lowdiff.scaling import Scaling
from lowdiff.settings import Settings
from lowdiff.snapshot import shard_tensors
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
        attached: Attached,
        settings: Settings,
        incarnation: int,
        rank: int,
        world_size: int,
        step: int,
        reducer: Reducer,
        residual: RotatingResidual,
        tracker: ItemTracker,
        items: Mapping[str, bytes],
        stager: Stager,
        lock: RunLock,
        scaling: Scaling,
        averages: Averages,
        shares_constants: bool,
    ) -> None:
        self.step = step
        self.committed_step = step
        self.stager = stager
        self._lock = lock
        self.reducer = reducer
        self._attached = attached
        self._settings = settings
        self._incarnation = incarnation
        self._rank, self._world_size = rank, world_size
        self._residual = residual
        self._tracker = tracker
        self._averages = averages
        self._shares_constants = shares_constants
        self._rolling: Rolling | None = None
        if settings.snapshot == "rolling":
            live = Live(attached, tracker, residual, averages, shares_constants, rank, world_size)
            self._rolling = Rolling(live, stager, settings)
        self._digester = Digester(attached.layout)
        self.scaling = scaling
        self._capture = StepCapture(attached, reducer, residual, scaling, averages)
        self._pieces = self._digester.pieces_of(rank, world_size)
        self._base_step = step
        self._unstaged: Differential | None = None
        self._is_signalled = False
        self._all_preempted = self._is_prepared = False
        self._is_taken_over = False
        self._heeded_step = -1
        self._tried_snapshot_step = -1
        self._warned: set[str] = set()
        self._committed_held = attached.held()
        tracker.start(items)
        self._stage_base()
        self.stager.show(step, step)
        self._begin()
        self._capture.install(
            lambda: self.stager.timed("differential_seconds"),
            self._note_exchange,
            lambda: self.stager.stage_ahead(self.step + 1, self.reducer),
        )

    def forward_begins(self) -> None:
        """A forward pass that a backward pass will follow begins."""
        self._capture.forward_begins()

    @property
    def has_finished_step(self) -> bool:
        """Whether every optimizer stepped since the last commit."""
        return self._capture.has_finished

    def _note_exchange(self) -> None:
        """Gradients of this step have come: on CUDA only once the host has read them."""
        if self._attached.device.type == "cpu":
            self._note_commit()

    def _note_commit(self) -> None:
        """Every rank sent its gradients of this step, so every rank had staged the one before."""
        if self._world_size > 1 and self._settings.has_replica:
            self.stager.show(self.step, self.step)  # a replica applies what is committed
        self.committed_step = self.step

    def commit(self) -> None:
        """Stage the step that just ended.

        Raises:
            WriterFailed: If ``on_error="raise"`` and the writer reports trouble.
            StorageError: If staging memory is exhausted.
            RunInUse: If another machine took over the run; on all ranks.
        """
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
            differential = self._unstaged = self._unstaged or self._differential()
            rebases = self._capture.changed_outside
        if self._rolling is not None:
            self._rolling.copy(differential.step, self._committed_held)
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

    def _rebase(self) -> None:
        """The step cannot be replayed: only a snapshot of it can be recovered."""
        self._warn_once(
            f"parameters, optimizer state or their average were changed outside optimizer.step() "
            f"and update_parameters() around step {self.step} (load_state_dict, clamping, an EMA "
            "swap?); such a step costs a full "
            "snapshot"
        )
        self.snapshot()
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
            megabytes = size / 1e6
            self._warn_once(
                f"{name} changed, which costs {megabytes:.1f} MB in every step that changes it"
            )

    @property
    def large_items(self) -> dict[str, int]:
        """Items of which a step logged more than 1 MiB, and the most bytes one did."""
        return dict(self._tracker.large_items)

    def _warn_once(self, text: str) -> None:
        kind = text.partition(" ")[0]
        if kind not in self._warned:
            self._warned.add(kind)
            _logger.warning("rank %d: %s. This is said once", self._rank, text)

    def _differential(self) -> Differential:
        steps = self._capture.optimizer_steps()
        self._committed_held = self._attached.held()
        self._residual.advance(carried=self._kept_gradients())
        self.scaling.end_step()
        step = self.step + 1
        digest = self._digest(step)
        averages, replayable = self._averages.commit(self._digester, digest)
        self._capture.changed_outside |= not replayable
        return Differential(
            step=step,
            incarnation=self._incarnation,
            rank=self._rank,
            world_size=self._world_size,
            optimizers=steps,
            absent=tuple(sorted(self._capture.absent)),
            held=tuple(self._committed_held),
            payload=self.reducer.payload(),
            items=self._tracker.changed(thorough=self._is_thorough(step)),
            residual=self._residual.mark(),
            digest=digest,
            averages=averages,
        )

    def _is_thorough(self, step: int) -> bool:
        """Whether to read frozen parameters that nothing says were written."""
        return step - self._base_step <= _AUDITED_FIRST or self.stager.cadence.is_due(step)

    def _digest(self, step: int) -> Digest | None:
        if self._attached.device.type != "cpu":
            return None  # reading parameters back would stop the GPU at every step
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
        return (
            _LOST_RUN * self._lock.is_lost()
            | _PREEMPTED * self._is_signalled
            | _IN_TROUBLE * stager.in_trouble
            | _OWES_SNAPSHOT * stager.owes_snapshot
            | _READY_FOR_SNAPSHOT * stager.is_ready_for_snapshot(self.step)
            | stager.cadence.note()
        )

    def _stage_base(self) -> None:
        """Name the residual this incarnation starts from, should it die in its first step."""
        base = Differential(
            step=self.step,
            incarnation=self._incarnation,
            rank=self._rank,
            world_size=self._world_size,
            optimizers=(),
            absent=(),
            held=(),
            payload=Payload(()),
            residual=self._residual.mark(),
        )
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

    def snapshot(self, *, required: bool = False) -> None:
        """Stage an atomic snapshot of the current step, unless that was the last one staged.

        Raises:
            StorageError: If it is required and there is no memory for it.
        """
        if self._rolling is not None:
            self._rolling.restart()
        if self.stager.atomic_step != self.step:
            self.stager.stage_snapshot(
                self.step,
                lambda: shard_tensors(
                    self._attached,
                    self._tracker,
                    self._residual.named(),
                    self._averages.named_tensors(),
                    held=self._committed_held,
                    shares_constants=self._shares_constants,
                    rank=self._rank,
                    world_size=self._world_size,
                ),
                required=required,
            )

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

    def detach(self) -> None:
        """Remove the optimizer hooks and give back what gradients were exchanged with."""
        self._capture.remove()
        self.reducer.close()
