"""The replica process: applies every committed step to a copy of one rank's share of the state.

Started by the trainer with ``python -m lowdiff.recovery.replica.main SETTINGS``, in a session of its own so
that a launcher's kill does not reach it. The copy lies in memory files that outlive it, so whoever
comes next needs no surviving process. When its trainer is gone it ends with the step in hand: whoever
comes next waits for it, and applies the rest of the queue. It never runs ahead of a step that all
ranks have staged.

Reference: Yao et al., "LowDiff", arXiv 2509.04084, LowDiff+. There the copy is kept by a thread of
the trainer and dies with it.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Sequence
from functools import partial

import torch
from crc32c import crc32c

from lowdiff.core.events import Code
from lowdiff.errors import DamagedFile, LowDiffError, ReplayMismatch, StorageError
from lowdiff.persistence.files.locks import FileLock
from lowdiff.persistence.files.mapped_file import ImageMark, read_view
from lowdiff.persistence.format.framing import RecordHeader, RecordKind, RecordRef, StoredRecord
from lowdiff.persistence.format.image import stage_image
from lowdiff.persistence.run.fences import read_fence
from lowdiff.persistence.staging.log import LogTail
from lowdiff.persistence.staging.settings import ReplicaSettings
from lowdiff.persistence.staging.status import (
    Backoff,
    ReplicaStatus,
    StatusPage,
    StatusReader,
    TrainerStatus,
    WriterStatus,
    read_status,
)
from lowdiff.recovery.compare import largest_difference
from lowdiff.recovery.images import shard_images
from lowdiff.recovery.load import load_shard
from lowdiff.recovery.replay.optimizers import import_modules, register_again, settle_kernels
from lowdiff.recovery.replay.unit import UNREPLAYABLE, Step
from lowdiff.recovery.replica.file import ReplicaFile, SlotTooSmall, note_kernel
from lowdiff.recovery.replica.share import Shard, contents_of, share_step
from lowdiff.recovery.state import RecoveredState

#: Between two looks at staging, the longer the longer nothing is new: training shares its cores with this process.
_POLL_SECONDS, _LONGEST_POLL_SECONDS = 0.002, 0.016
_RETRY_SECONDS = 1.0
#: Intervals between images at most, so that a disk which stood still is not left idle for as long again.
_LARGEST_STRIDE = 16


class ImagePace:
    """One rank's: every image that is due, or every second, fourth, ... one.

    Each replica goes by its own disk, but a snapshot is one only with every rank's image of a step. So
    whoever has to leave one out makes only those of multiples of twice the interval from then on: what
    the slower ranks make, all make, because the multiples of a larger stride are also those of a
    smaller one.
    """

    def __init__(self, settings: ReplicaSettings) -> None:
        self._settings = settings
        self._stride = 1
        self._made = -1

    def takes(self, step: int, *, is_free: bool) -> bool:
        """Whether to make the image of a step; asked at every step of which one is due.

        Args:
            step: The step.
            is_free: Whether the image before is durable.
        """
        every, kept = self._settings.image_every, self._settings.keep_every
        if is_free and step - self._made <= self._stride * every // 2:
            self._stride = max(1, self._stride // 2)  # it took less than half of the time there is
        is_its_turn = bool(every) and step % (self._stride * every) == 0
        if not (is_its_turn or (kept and step % kept == 0)):
            return False
        if is_free:
            self._made = step
        else:
            self._stride = min(2 * self._stride, _LARGEST_STRIDE)
        return is_free


class Replica:
    """Keeps one rank's share of the state one step behind its trainer, or less.

    Large because it is a whole process: what it follows, applies, acknowledges and persists.
    """

    def __init__(self, settings: ReplicaSettings) -> None:
        self._settings = settings
        self._staging = settings.staging
        self._fence = read_fence(settings.folder.fence(settings.incarnation, settings.rank))
        self._tail = LogTail(self._staging, self._pass_over)
        path = self._staging.replica_status
        self._page = StatusPage(path, read_status(path, ReplicaStatus))
        # What was tried again by an earlier process is no trouble of this one's yet.
        error = self._page.status.error if self._page.status.generation < 0 else ""
        self._page.update(applied_steps=0, apply_seconds=0.0, error=error)
        made = self._page.status.image
        self._image_step = -1 if made is None else made.step
        self._writer = StatusReader(self._staging.status, WriterStatus)
        self._holds_image = self._staging.replica_image.exists()
        self._pace = ImagePace(settings)
        self._is_trainer_gone = False
        self._whole = False
        #: What does not succeed now and is tried again, and what is wrong with it.
        self._troubles: dict[str, str] = {}
        self._retry_image_at = 0.0
        #: See `TrainerStatus`.
        self._end_step = -1
        self._shard: Shard | None = None
        self._rest = Backoff(_POLL_SECONDS, _LONGEST_POLL_SECONDS)
        os.set_blocking(sys.stdin.fileno(), False)
        if self._look_for_trainer():
            return  # who recovers found the lock free, and reads the files now
        torch.set_num_threads(1)
        torch.set_flush_denormal(self._fence.environment.flush_denormal)
        settle_kernels()
        for generation in self._generations():
            if generation != self._page.status.generation:  # an earlier process died over it
                self._staging.replica_state(generation).unlink(missing_ok=True)
        if self._page.status.generation >= 0:
            self._reopen()

    def run(self) -> None:
        """Work until the trainer is gone."""
        record: RecordRef | None = None
        while not self._look_for_trainer():
            record = record or self._tail.next()
            # Read behind the record, or that could overtake the image that it follows.
            trainer = read_status(self._staging.trainer_status, TrainerStatus)
            self._end_step = trainer.end_step
            image = self._new_image(trainer)
            if image is not None and (record is None or record.header.step > image.step):
                work, record_after = partial(self._load, image), record
            elif record is not None and self._is_settled(record.header.step, trainer):
                work, record_after = partial(self._take, record), None
            else:
                self._idle()
                continue
            self._rest.reset()
            try:
                work()
            except StorageError as error:
                self._report("step", f"{type(error).__name__}: {error}")
                self._forget_image()
                time.sleep(_RETRY_SECONDS)
                if self._page.status.generation >= 0:
                    self._reopen()
                continue
            self._report("step", "")
            record = record_after

    def _idle(self) -> None:
        """There is nothing to apply: training may be waiting for an image that could not be made."""
        self._forget_image()
        is_time = time.monotonic() >= self._retry_image_at
        waits = self._settings.waits or self._end_step >= 0
        if waits and self._shard is not None and is_time:
            self._take_image()
            self._look_for_memory()
        time.sleep(self._rest.next_seconds())

    def _look_for_memory(self) -> None:
        """Say that an image finds memory again, where the state is past the step of the one that did not.

        Where an error ends a commit, training comes to no later step before.
        """
        assert self._shard is not None
        is_due = self._settings.is_image_due(self._shard.step)
        if is_due or self._is_writing() or not self._troubles.get("image"):
            return
        try:
            stage_image(self._staging.replica_image, shard_images(self._shard.state))
        except StorageError:
            self._retry_image_at = time.monotonic() + _RETRY_SECONDS
            return
        self._staging.replica_image.unlink(missing_ok=True)
        self._report("image", "")

    def _look_for_trainer(self) -> bool:
        """Whether the trainer died, so that nothing more will be staged."""
        if not self._is_trainer_gone:
            try:
                is_closed = not os.read(sys.stdin.fileno(), 64)
            except BlockingIOError:
                is_closed = False
            # Forked DataLoader workers may hold the pipe open after the trainer's death.
            is_orphan = os.getppid() != self._settings.trainer_pid
            self._is_trainer_gone = is_closed or is_orphan
        return self._is_trainer_gone

    def _is_settled(self, step: int, trainer: TrainerStatus) -> bool:
        """Whether every rank has staged a step: only then can none of them go back behind it."""
        return self._settings.world_size == 1 or step <= trainer.settled_step

    def _new_image(self, trainer: TrainerStatus) -> ImageMark | None:
        """The trainer's newest image, if it is committed and was not taken over yet."""
        image, status = trainer.image, self._page.status
        if image is None or not self._is_settled(image.step, trainer):
            return None
        return image if image.step > status.image_step and image.step >= status.step else None

    def _take(self, record: RecordRef) -> None:
        step = record.header.step
        status = self._page.status
        if record.header.kind is RecordKind.DIFFERENTIAL and step > status.consumed_step:
            shard = self._shard
            if shard is None or record.header.rebases or step != shard.step + 1:
                # Only the trainer's next image leads to it.
                self._page.update(consumed_step=step)
                return
            started = time.perf_counter()
            self._apply(shard, record)
            if self._shard is not None:
                self._page.update(
                    step=step,
                    consumed_step=step,
                    applied_steps=self._page.status.applied_steps + 1,
                    apply_seconds=self._page.status.apply_seconds + time.perf_counter() - started,
                )
                self._take_image()

    def _pass_over(self, record: RecordHeader) -> None:
        """A staged record was damaged; where the state cannot go on without it, another image must come."""
        step, status, shard = record.step, self._page.status, self._shard
        error = f"step {step}: damaged in staging memory"
        if record.kind is RecordKind.DIFFERENTIAL and step > status.consumed_step:
            if shard is not None and not record.rebases and step == shard.step + 1:
                self._forget(step, error)
            else:
                self._page.update(consumed_step=step)

    def _load(self, mark: ImageMark) -> None:
        """Begin anew with the trainer's image."""
        path = self._staging.snapshot
        try:
            image = read_view(path)
            if len(image) != mark.bytes or crc32c(image) != mark.checksum:
                raise DamagedFile(path, f"it is not the image of step {mark.step} that was staged")
            state = load_shard(path, mark.step, self._fence)
        except (FileNotFoundError, DamagedFile) as error:
            # It will not be any better the next time.
            self._page.update(image_step=mark.step)
            return self._forget(mark.step, f"{type(error).__name__}: {error}")
        if self._shard is not None and self._shard.step == state.step:
            self._page.update(drift=largest_difference(self._shard.state, state))
        self._begin(state, image_step=state.step, error="")
        self._troubles.clear()

    def _apply(self, shard: Shard, record: RecordRef) -> None:
        number = record.header.step
        try:
            # The trainer leaves the record alone until it is consumed.
            stored = StoredRecord(record, self._staging.root, may_change=False)
            step = share_step(stored, self._fence)
            self._step(shard, step)
        except (ReplayMismatch, DamagedFile, *UNREPLAYABLE) as error:
            # Next time in whole tensors: this kernel may not round alike in blocks.
            self._whole = isinstance(error, ReplayMismatch)
            Code.REPLICA_STEP_FAILED.warn(f"step {number}: {error}", exc_info=not self._whole)
            self._forget(number, f"{type(error).__name__}: {error}")

    def _step(self, shard: Shard, step: Step) -> None:
        """Apply a step in place; or, where that makes state of a new shape, into a new file."""
        try:
            shard.apply(step)
        except SlotTooSmall:
            self._begin(self._privately(step))

    def _privately(self, step: Step) -> RecoveredState:
        """The state after a step, in memory of this process."""
        path = self._staging.replica_state(self._page.status.generation)
        copy = Shard(ReplicaFile.open(path, private=True), self._fence, journaled=False)
        copy.apply(step)
        return copy.state

    def _begin(self, state: RecoveredState, **changes: object) -> None:
        """Write a state into a new file, and go on there."""
        before = self._page.status.generation
        generation = max([before, 0, *self._generations()]) + 1
        path = self._staging.replica_state(generation)
        try:
            note_kernel(self._staging)
            ReplicaFile.create(path, contents_of(state, whole=self._whole))
        except StorageError:
            path.unlink(missing_ok=True)
            raise
        now = {"step": state.step, "consumed_step": state.step, "generation": generation}
        self._page.update(**now, forgot=False, **changes)
        self._reopen()
        if before >= 0:
            self._staging.replica_state(before).unlink()

    def _generations(self) -> list[int]:
        """Numbers of the files there are, also of one that was never published."""
        return [generation for generation, _ in self._staging.replica_states()]

    def _reopen(self) -> None:
        """Take up the published file, finishing or undoing what was under way."""
        status = self._page.status
        path = self._staging.replica_state(status.generation)
        try:
            file = ReplicaFile.open(path, private=False)
            self._shard = Shard(file, self._fence, journaled=True)
        except DamagedFile as error:
            self._forget(status.consumed_step, str(error))
            return
        self._whole |= self._shard.is_whole
        if self._shard.step > status.step:
            self._page.update(step=self._shard.step, consumed_step=self._shard.step)

    def _forget(self, consumed_step: int, error: str) -> None:
        """Distrust what there is, and wait for the trainer's next image."""
        generation = self._page.status.generation
        self._shard = None
        self._troubles.clear()
        self._page.update(
            step=-1, generation=-1, consumed_step=consumed_step, error=error, forgot=True
        )
        self._staging.replica_state(generation).unlink(missing_ok=True)

    def _report(self, task: str, error: str) -> None:
        """Tell what is wrong with a task that is tried again; nothing once it has succeeded."""
        if error == self._troubles.get(task, ""):
            return
        if error:
            Code.REPLICA_TASK_FAILED.warn(error, rank=self._settings.rank)
        self._troubles[task] = error
        told = "; ".join(filter(None, self._troubles.values()))
        self._page.update(error=told, forgot=False)

    def _take_image(self) -> None:
        """Copy the state where an image is due, for the writer to persist at its own pace.

        Where there is no memory for it, the replica goes on. All ranks make theirs of the same steps,
        so it is made later only while the state is still of that step; else the next one serves.
        """
        assert self._shard is not None
        step = self._shard.step
        newest = max(self._page.status.image_step, self._image_step)
        is_last = step == self._end_step
        if not (is_last or self._settings.is_image_due(step)) or step <= newest:
            return
        while (self._settings.waits or is_last) and self._is_writing():
            if self._look_for_trainer():
                return
            time.sleep(_POLL_SECONDS)
        if not (is_last or self._pace.takes(step, is_free=not self._is_writing())):
            return
        try:
            size, checksum = stage_image(
                self._staging.replica_image, shard_images(self._shard.state)
            )
        except StorageError as error:
            self._retry_image_at = time.monotonic() + _RETRY_SECONDS
            return self._report("image", f"no image of step {step}: {error}")
        self._page.update(image=ImageMark(step, size, checksum))
        self._image_step = step
        self._holds_image = True
        self._report("image", "")

    def _is_writing(self) -> bool:
        """Whether the last image is still to be made durable."""
        return self._writer.read().settled_snapshot < self._image_step

    def _forget_image(self) -> None:
        """Give an image's memory back once it is durable."""
        if self._holds_image and not self._is_writing():
            self._staging.replica_image.unlink(missing_ok=True)
            self._holds_image = False


def main(arguments: Sequence[str]) -> int:
    """Entry point of the process."""
    settings = ReplicaSettings.from_json(arguments[0])
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.INFO)
    sys.path += [folder for folder in settings.import_path if folder not in sys.path]
    lock = FileLock(settings.staging.replica_lock)
    if not lock.acquire(f"replica {os.getpid()}", timeout_seconds=30.0):
        Code.REPLICA_ALREADY_RUNS.warn(f"another replica holds {lock.path}", level=logging.ERROR)
        return 1
    try:
        import_modules(settings.imports)
        register_again(settings.optimizers, settings.scalar_state)
        Replica(settings).run()
    except LowDiffError:
        Code.REPLICA_ENDED.warn(
            "the replica ends", rank=settings.rank, level=logging.ERROR, exc_info=True
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
