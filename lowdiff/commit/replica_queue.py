"""Staging for a replica: gradients that are used at once instead of being written every step."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from lowdiff.commit.health import say
from lowdiff.commit.queue import Stager
from lowdiff.persistence.format.differentials import numbered
from lowdiff.persistence.format.framing import RecordKind
from lowdiff.persistence.format.image import ImageTensor
from lowdiff.persistence.staging.log import StagingLog
from lowdiff.persistence.staging.settings import ReplicaSettings
from lowdiff.persistence.staging.status import ReplicaStatus, WriterStatus
from lowdiff.persistence.writer.handle import WriterProcess
from lowdiff.protocols import Reducer
from lowdiff.recovery.replay.optimizers import registrations
from lowdiff.recovery.replica.handle import ReplicaProcess
from lowdiff.recovery.state import SCALAR_STATE
from lowdiff.settings import Settings
from lowdiff.types import OptimizerSpec, Section


class ReplicatedStager(Stager):
    """One rank's queue of steps, the replica that empties it, and the writer of its images."""

    def __init__(
        self,
        log: StagingLog,
        writer: WriterProcess,
        settings: Settings,
        rank: int,
        world_size: int,
        replica: ReplicaSettings,
    ) -> None:
        super().__init__(log, writer, settings, rank, world_size)
        self._step = self._given_up = self._told_step = -1
        self._holds_image = self._is_dropping = self._needs_image = False
        #: Gradients of the step under way that found no room yet.
        self._pending: Sequence[Section] = ()
        #: With what error the replica asked for an image last.
        self._asked_with = ""
        self._replica_makes_images = replica.image_every > 0
        self.replica = ReplicaProcess(replica)

    @property
    def is_gone(self) -> bool:
        """See ``Stager.is_gone``: or the replica's page, or the file that holds its state."""
        if super().is_gone or not self._log.folder.replica_status.exists():
            return True
        generation = self.replica.read_status().generation
        if generation < 0 or self._log.folder.replica_state(generation).exists():
            return False
        # The replica removes a file once another one has taken its place.
        return self.replica.read_status().generation == generation

    def end_processes(self) -> None:
        """See ``Stager.end_processes``: without its images a writer has nothing to make durable."""
        self.replica.stop()
        self.writer.stop()

    def begin_anew(self, step: int) -> None:
        """See ``Stager.begin_anew``: the replica waits for the snapshot that is owed."""
        super().begin_anew(step)
        self._step = self._given_up = self.snapshot_step = self._renewed_step = -1
        self._holds_image = False
        self._is_dropping = self._needs_image = True
        self._pending = ()
        self.replica.begin_anew()

    def stage_ahead(self, step: int, reducer: Reducer, number: int) -> None:
        """Queue gradients before their step's record, straight from where the optimizer has them."""
        self._pending = [*self._pending, *numbered(reducer.payload().sections, number)]
        if self._needs_image or self._given_up == step:
            self._pending = ()
        elif self._degrades:
            if not self._has_put():
                self._given_up = step
            self._pending = ()
        else:
            try:
                # What is wrong is raised by the commit, not in the middle of the step.
                self._wait_until(
                    lambda status: (
                        self._has_put() or self.needs_image or (self._raises and status.error != "")
                    ),
                    "the replica to make room",
                )
            finally:
                self._pending = [replace(s, data=s.data.copy()) for s in self._pending]

    def _has_put(self) -> bool:
        """Put what is pending into the queue, if there is room."""
        if self._pending:
            if not self._log.append_ahead(self._pending, durable_step=self._consumed_step()):
                return False
            self._pending = ()
        return True

    def stage(
        self,
        kind: RecordKind,
        step: int,
        scalars: bytes,
        sections: Sequence[Section],
        *,
        rebases: bool = False,
    ) -> None:
        """Queue a record for the replica, as soon as there is room.

        With ``backpressure="block"`` training waits for room, and where the newest durable image is
        two snapshot intervals old. With ``"degrade"`` a step that finds no room is given up, with
        all that follow, until a fresh snapshot of the trainer's takes their place. So are steps after
        one that the replica cannot apply.
        """
        if kind is RecordKind.DIFFERENTIAL:
            self._forget_image()
            self._bound_risk(step - self._most_at_risk)
            if (self.needs_image or self._given_up == step) and not rebases:
                self._drop(step)
                return
            # Behind what was staged ahead of the record.
            self._pending, sections = [*self._pending, *sections], ()

        size: list[int] = []

        def fits(_: object) -> bool:
            if kind is RecordKind.DIFFERENTIAL and not self._has_put():
                return False
            written = self._log.append(
                kind,
                step,
                scalars,
                sections,
                durable_step=self._consumed_step(),
                rebases=rebases,
            )
            size.extend([] if written is None else [written])
            return written is not None

        is_step = kind is RecordKind.DIFFERENTIAL
        if self._degrades and is_step:
            fits(None)
        else:
            self._wait_until(
                lambda _: fits(None) or (is_step and not rebases and self.needs_image),
                "the replica to make room",
            )
        if not size:
            self._drop(step)
            return
        self._step = step
        self._needs_image |= rebases
        self.counters.staged_bytes += size[0]
        if is_step:
            self._keep_room()

    @property
    def _most_at_risk(self) -> int:
        """See ``Stager._most_at_risk``: only images become durable."""
        return 2 * self._settings.snapshot_every

    def _is_reached(self, status: WriterStatus, step: int) -> bool:
        """See ``Stager._is_reached``: an image that comes only once training goes on does not count."""
        return status.durable_step >= step or self.needs_image or self._newest_image < step

    @property
    def _newest_image(self) -> int:
        """Step of the newest image that there is, or will be before training goes on."""
        if not self._replica_makes_images:
            return self.snapshot_step
        known = self._told_step if self._world_size > 1 else self._step
        newest = known - known % self._settings.snapshot_every
        if self._consumed_step() > newest:  # made by now, or left out for want of memory
            image = self.replica.status().image
            newest = -1 if image is None else image.step
        return max(self.snapshot_step, newest)

    def _keep_room(self) -> None:
        """Wait for room for the next step while there is another in which to tell of trouble.

        Not for what the replica takes only once the next step has told it what is committed.
        """
        if self._tells_first and not self._degrades:
            self._wait_until(
                lambda status: (
                    bool(status.error)
                    or self.needs_image
                    or self._consumed_step() >= self._told_step
                    or self._has_room()
                ),
                "the replica to make room",
            )

    def _has_room(self) -> bool:
        """Whether a step as large as the last one would fit into the queue."""
        has_room = self._log.append_ahead((), durable_step=self._consumed_step())
        self._log.drop_ahead()
        return has_room

    def _forget_image(self) -> None:
        """Give an image's memory back once the replica has its own copy and the disk has it."""
        if self._holds_image and not self._is_image_in_use():
            self._log.folder.snapshot.unlink(missing_ok=True)
            self._holds_image = False

    def _drop(self, step: int) -> None:
        self._log.drop_ahead()
        self._pending = ()
        if not self._is_dropping:
            text = (
                f"the replica does not keep up, so steps from {step} on are given up; a full "
                "snapshot follows when it has caught up"
            )
            say(self._rank, "steps_dropped", text, step=step)
        self._owes_snapshot = self._is_dropping = self._needs_image = True
        self.counters.dropped_steps += 1

    def stage_snapshot(
        self, step: int, tensors: Callable[[], Sequence[ImageTensor]], *, required: bool
    ) -> None:
        """See ``Stager.stage_snapshot``: the replica begins anew with it, the writer persists it."""
        # The replica takes what is committed, and only this thread can tell it what is.
        is_untold = self._world_size > 1 and self.snapshot_step > self._told_step
        if required or not (self._degrades or is_untold):
            self._wait_until(
                lambda status: (
                    not self._is_image_in_use()
                    or (self._tells_first and not required and bool(status.error))
                ),
                "the last full snapshot",
            )
        if self._is_image_in_use():
            self._owes_snapshot = True
            return
        self._holds_image = False  # the new one takes its place
        if self._stage_image(step, tensors, required=required):
            self._holds_image = True
            self._is_dropping = self._needs_image = False

    def show(self, step: int, committed_step: int, *, preempted: bool = False) -> None:
        """See ``Stager.show``."""
        self._told_step = committed_step
        super().show(step, committed_step, preempted=preempted)

    @property
    def owes_snapshot(self) -> bool:
        """Whether a snapshot could not be taken and should be, or the replica needs an image."""
        return self.needs_image or self._owes_snapshot

    @property
    def needs_image(self) -> bool:
        """Whether the replica has no use for steps before it has a fresh snapshot of the trainer's."""
        status = self.replica.status()
        if self._asks_for_image(status):
            if status.error != self._asked_with:
                text = f"the replica begins anew with a full snapshot: {status.error}"
                say(self._rank, "replica_error", text, error=status.error)
            self._asked_with = status.error
            self._needs_image = True
        elif not status.error:
            self._asked_with = ""
        return self._needs_image

    def _asks_for_image(self, status: ReplicaStatus) -> bool:
        """Whether it holds no state although it has taken over every image there was."""
        return status.generation < 0 and status.image_step >= self.snapshot_step >= 0

    def is_ready_for_snapshot(self, step: int) -> bool:
        """Whether the replica keeps up with training, and can take an image."""
        # A whole step's time for a step: the newest has only just been staged, and with several
        # ranks it is committed, and may be applied, only with the next one. What a replica that
        # keeps up is behind would otherwise keep the ranks from ever being ready together.
        in_time = self._step - 1 - (self._world_size > 1)
        return (
            step >= self._retry_step
            # Where training waits for storage, it waits here as well.
            and (
                not self._degrades
                or (not self._is_image_in_use() and self._consumed_step() >= in_time)
            )
        )

    def stop(self) -> None:
        """See ``Stager.stop``."""
        self.replica.stop()

    def tend(self) -> None:
        """See ``Stager.tend``: so for the replica."""
        super().tend()
        self.replica.status()

    def die(self, *, kills_processes: bool) -> None:
        """See ``Stager.die``."""
        super().die(kills_processes=kills_processes)
        (self.replica.stop if kills_processes else self.replica.orphan)()

    def figures(self) -> dict[str, Any]:
        """See ``Stager.figures``: the replica's part of ``stats()``."""
        status = self.replica.read_status()
        applied = max(1, status.applied_steps)
        return {
            "replica_pid": self.replica.pid,
            "replica_step": status.step,
            "replica_lag_steps": max(0, self._step - status.consumed_step),
            "replica_seconds_per_step": status.apply_seconds / applied,
            "replica_restarts": self.replica.restarts,
            "replica_error": status.error or self.replica.error,
            "replica_drift": status.drift,
            "queue_bytes": self._log.bytes_held,
        }

    def _reported(self) -> WriterStatus:
        """See ``Stager._reported``: without the replica's images nothing becomes durable, either."""
        status, replica = super()._reported(), self.replica.read_status()
        # Not what ends with the trainer's next snapshot.
        is_asking = replica.forgot or self._asks_for_image(replica)
        trouble = "" if is_asking else replica.error
        return status.with_errors(trouble, self.replica.error)

    def _consumed_step(self) -> int:
        return self.replica.status().consumed_step

    def _is_image_in_use(self) -> bool:
        """Whether the trainer's last image is still to be read by the writer or by the replica."""
        status = self.replica.status()
        is_taken = status.image_step >= self.snapshot_step or self.replica.is_stopped
        return not is_taken or self._status().durable_snapshot < self.snapshot_step


def begin_replicated(
    log: StagingLog,
    writer: WriterProcess,
    settings: Settings,
    rank: int,
    world_size: int,
    *,
    makes_images: bool,
    specs: Sequence[OptimizerSpec],
) -> ReplicatedStager:
    """Start a rank's replica, which reads ``log`` and hands its images to ``writer``.

    Unless the trainer makes them: the replica may have other last bits than an accelerator.
    """
    every = settings.snapshot_every
    kept = (settings.retention and settings.retention.every_steps) or 0
    replica = ReplicaSettings(
        run=str(settings.run),
        staging_root=str(log.folder.root.parents[1]),
        run_id=log.folder.run_id,
        incarnation=log.folder.incarnation,
        rank=rank,
        world_size=world_size,
        trainer_pid=os.getpid(),
        image_every=every if makes_images else 0,
        keep_every=kept if makes_images else 0,
        waits=settings.backpressure == "block",
        imports=settings.imports,
        optimizers=tuple(registrations(specs)),
        scalar_state=tuple(sorted(SCALAR_STATE)),
        import_path=tuple(map(os.path.abspath, sys.path)) if settings.imports else (),
    )
    return ReplicatedStager(log, writer, settings, rank, world_size, replica)
