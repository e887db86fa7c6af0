"""Staging as the session uses it: filled with steps and snapshots, made anew where it was removed."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from typing import Any

from lowdiff.commit.agreement import RankNews
from lowdiff.commit.images import Overwritten, Share, share_of, share_of_items
from lowdiff.commit.pending import MOST_LATE, Pending, Reach
from lowdiff.commit.protection import Protection
from lowdiff.commit.run_lock import StagingArea
from lowdiff.commit.sinks import Ahead, Handed, Snapshot
from lowdiff.commit.storage import Look, Trainer
from lowdiff.core import devices
from lowdiff.core.events import Code
from lowdiff.errors import StorageError
from lowdiff.model.tracked import Live
from lowdiff.persistence.format.differentials import numbered
from lowdiff.protocols import Reducer
from lowdiff.step.states import Change, Sealed

#: Between two tries to find memory.
_RETRY_SECONDS = 0.3


class Staging:
    """One rank's staging memory as training fills it: what is staged goes through all sinks, in one order.

    A step that is on its way from an accelerator is staged by another thread, once it is here; a lock sees that one
    thread at a time fills staging.

    Large because all that is handed on passes here. Whatever finds that somebody removed it goes on: the next commit makes it anew.

    Args:
        area: The folder.
        trainer: This rank's training, whose measurements lie there.
        live: Its residual lies there as well.
        protection: Takes steps and images, its queue first.

    Attributes:
        protection: As given.
        reach: How far steps are staged.
    """

    def __init__(
        self,
        area: StagingArea,
        trainer: Trainer,
        live: Live,
        protection: Protection,
    ) -> None:
        self.protection = protection
        self._lock = trainer.turn
        self.reach = Reach(self._lock, needs_all=protection.queue.most_late > 0)
        self._area = area
        self._trainer = trainer
        self._live = live
        self._queue = protection.queue
        self._sinks = protection.sinks
        self._pending = Pending(self._lock, "lowdiff-staging")
        #: A snapshot on its way, which takes longer than a step.
        self._leaving = Pending(self._lock, "lowdiff-snapshot")
        #: What it holds, until it is written.
        self._share: Share | None = None
        self._ended_step = -1
        #: Steps of which others have not learned yet.
        self._late: deque[Sealed] = deque()
        self._warned: set[tuple[Code, str | Change | None]] = set()

    @property
    def num_pending(self) -> int:
        """How many steps have ended and are not staged; for any thread."""
        return max(0, self._ended_step - self.reach.step)

    @property
    def _most_before(self) -> int:
        """How many steps may be on their way when another one begins to; a snapshot alone may be pending as well."""
        return max(self._queue.most_late - 1, 0)

    def wait_for_room(self) -> None:
        """Wait until one more step may be on its way from an accelerator, or what staging met is to be raised."""
        self.wait_for_steps(self._most_before)

    def wait_for_steps(self, most: int) -> None:
        """Wait until so many steps at most are on their way, or what staging met is to be raised."""
        if self._pending:
            self._pending.wait_until(lambda: self.num_pending <= most)

    def make_room(self) -> None:
        """The same, and raise what staging met meanwhile.

        Raises:
            WriterFailed: See `Sink.stage`.
            StorageError: See `Sink.stage`.
            LowDiffError: What else a step was found to be when it was here.
        """
        if self._pending:
            self._pending.finish(lambda: self.num_pending <= self._most_before)

    def hold(self) -> None:
        """Have the device copy the rest of a snapshot before it does what is queued from now on; the host goes on.

        Whoever may write to parameters, optimizer state or averages calls it before, and whoever waits for a snapshot.
        """
        share = self._share  # another thread forgets it
        if share is not None:
            share.hold()

    def settle(self, timeout_seconds: float | None = None) -> bool:
        """Wait until every step that has ended is staged; returns whether that is so.

        Args:
            timeout_seconds: How long at most.

        Raises:
            LowDiffError: See `make_room`.
        """
        self.hold()
        return self._leaving.finish(timeout_seconds=timeout_seconds) and self._pending.finish(
            timeout_seconds=timeout_seconds
        )

    def drop(self) -> None:
        """Stage nothing more of what is on its way."""
        self._trainer.is_over = True
        self.hold()
        self._leaving.drop()
        self._pending.drop()

    def is_gone(self, look: Look) -> bool:
        """Whether somebody removed or damaged the folder, or files of it."""
        return any(sink.is_gone(look) for sink in self._sinks)

    def owes_snapshot(self, look: Look) -> bool:
        """Whether a full snapshot should be taken, for whichever sink."""
        return any(sink.owes_snapshot(look) for sink in self._sinks)

    def news(self, step: int, look: Look) -> dict[str, Any]:
        """Return fields of `RankNews` that say how the sinks stand after a step."""
        news = {"owes_snapshot": self.owes_snapshot(look)}
        with self._lock:
            for sink in self._sinks:
                news |= sink.news(step, look)
        return news

    def hear(self, heard: Sequence[RankNews]) -> None:
        """Note what all ranks said after the step that ended last."""
        with self._lock:
            for sink in self._sinks:
                sink.hear(heard)

    def keep_up(self, step: int) -> None:
        """Wait for what is too far behind a step."""
        for sink in self._sinks:
            sink.keep_up(step)

    def items(self, step: int) -> Mapping[str, bytes] | None:
        """Return all items as of a step, however far the live ones have moved since; None if not kept.

        With error feedback a snapshot is never taken of them: its residual is in the live training alone.
        """
        if self._live.residual.layout.parameters:
            return None
        every = (sink.items(step) for sink in self._sinks)
        return next((items for items in every if items is not None), None)

    def show(self, committed_step: int, *, preempted: bool) -> None:
        """Tell all processes, and who watches the run, how far this rank is."""
        with self._lock:
            told = self._trainer.page.status.settled_step
            step = self.reach.step
            settled = [sink.show(step, committed_step, told) for sink in self._sinks]
            self._trainer.show(step, min(settled), preempted=preempted)

    def is_as_committed(self) -> bool:
        """Whether nothing wrote to what sinks would save, since the last commit."""
        return all(sink.is_as_committed() for sink in self._sinks)

    def renew(self, step: int) -> None:
        """Make the folder anew, after ``step``; a full snapshot is owed.

        Raises:
            StorageError: If it cannot be made.
        """
        with suppress(Exception):  # what is on its way finds no log, and is lost with it
            self.settle()
        with self._lock:
            try:
                self._renew(step)
            except (OSError, StorageError):  # whoever removes files may not have finished
                self._renew(step)
        durable_step = self.protection.storage.writer.read_status().durable_step
        root = self._trainer.folder.root
        Code.STAGING_REMOVED.warn(
            f"somebody removed or damaged {root}, or files in it, while training uses it: "
            f"{_lost(durable_step, step)}; it is made anew, and a full snapshot follows",
            rank=self._trainer.rank,
            step=step,
            durable_step=durable_step,
        )

    def _renew(self, step: int) -> None:
        self.protection.storage.end_processes()
        self._queue.images.release()
        self._area.make_anew()
        self._live.residual.move(self._area.folder.residual)
        self._trainer.meter.recorder.reopen()
        # The queue last: it starts the processes, which look for the rest.
        for sink in reversed(self._sinks):
            sink.begin_anew(step)

    def stage_base(self, base: Sealed) -> None:
        """Stage what an incarnation starts from, should it die in its first step."""
        self.reach.staged(base.differential.step, rebases=False)
        handed = Handed(base, self._queue.attend())
        for sink in self._sinks:
            handed = sink.stage_base(handed)
        self._trainer.counters.staged_bytes += handed.staged_bytes

    def stage_ahead(self, step: int, reducer: Reducer, number: int) -> None:
        """Stage gradients before their optimizer's step ends, where that saves a copy."""
        with self._lock, self._unless_gone():
            ahead = Ahead(step, number, (), None)
            if not (self._queue.logs_steps or devices.comes_late(self._live.attached.device)):
                self._pending.finish()  # a record lies behind that of the step before
                sections = numbered(reducer.payload().sections, number)
                ahead = Ahead(step, number, sections, reducer)
            for sink in reversed(self._sinks):
                sink.stage_ahead(ahead)

    def stage(self, sealed: Sealed, look: Look) -> Look:
        """Stage a step, or see that it is staged once it is here; returns the newest look at storage."""
        if self._queue.most_late and (sealed.late or self._pending):
            step = sealed.differential.step
            with self._lock:
                if step <= self._ended_step:
                    return look  # a commit that was interrupted is made again
                self._pending.put(sealed.arrived, self._stage_arrived)
                self._late.append(sealed)
                self._ended_step = step
            if len(self._late) > MOST_LATE:  # this one has arrived on all ranks
                self._late.popleft().learn()
            return look
        # What others keep beside the step, live state or gradients staged ahead, is of no step before.
        with self._lock:
            look = self._stage(sealed.arrived(), look)
        sealed.learn()
        return look

    def _stage_arrived(self, sealed: Sealed) -> None:
        self._stage(sealed, self._queue.attend())
        page = self._trainer.page.status
        self._trainer.show(self.reach.step, page.settled_step, preempted=page.preempted)

    def _stage(self, sealed: Sealed, look: Look) -> Look:
        handed = Handed(sealed, look)
        self._say(sealed)
        with self._unless_gone():
            try:
                for sink in self._sinks:
                    handed = sink.stage(handed)
            finally:
                self._trainer.counters.staged_bytes += handed.staged_bytes
        self.reach.staged(sealed.differential.step, rebases=handed.sealed.rebases)
        return handed.look

    def _say(self, sealed: Sealed) -> None:
        """Say once of each kind what costs much: a step that needs a snapshot, an item that is logged whole."""
        for name, size in self._live.tracker.large_items.items():
            text = f"{name} changed, which costs {size / 1e6:.1f} MB in every step that changes it"
            self._warn_once(Code.LARGE_ITEM, name, text)
        if sealed.warning:
            self._warn_once(Code.STEP_NEEDS_SNAPSHOT, sealed.first_change, sealed.warning)

    def _warn_once(self, code: Code, key: str | Change | None, text: str) -> None:
        if (code, key) not in self._warned:
            self._warned.add((code, key))
            code.warn(f"{text}. This is said once", rank=self._live.rank)

    def snapshot(
        self,
        sealed: Sealed,
        look: Look,
        *,
        required: bool = False,
        waits: bool = False,
        is_due: bool = True,
        trails: bool = False,
    ) -> None:
        """Stage a snapshot of a step, unless that was the last one staged; another thread writes what leaves an accelerator.

        Args:
            sealed: The step that ended last; the live state must still be its state.
            look: At storage.
            required: Whether to wait for memory, and for the snapshot before.
            waits: Whether to wait until it is durable, unless ``backpressure="degrade"``.
            is_due: Whether it is to be durable; else it stays in memory, where the queue keeps some.
            trails: Whether it may be given up for another one where something else than an optimizer writes to what is
                copied beside the next step.

        Raises:
            StorageError: If it is required and there is no memory for it.
        """
        step, images = sealed.differential.step, self._queue.images
        is_prompt = required or waits or any(sink.takes_images_at_once for sink in self._sinks)
        try:
            # Which frozen parameters an image leaves out is known of steps that are here.
            if is_prompt or self._live.shares_constants or images.step != images.staged_step:
                self.settle()
        except Exception:  # at the next commit it is tried again, and raised
            if required:
                raise
            images.is_owed = True
            return
        with nullcontext() if required else self._unless_gone():
            if images.step != step:
                try:
                    cleared = self._queue.clear_for_snapshot(look, required=required, is_due=is_due)
                    if cleared is None:
                        return
                    look = cleared
                    # After one that was given up so, the next is copied in its turn.
                    trails = trails and not (is_prompt or images.is_owed)
                    self._take(
                        sealed,
                        required=required,
                        is_prompt=is_prompt,
                        is_due=is_due,
                        trails=trails,
                    )
                except BaseException:  # whatever broke it off: nobody asks for it again
                    images.is_owed = True
                    raise
            elif is_due:
                images.make_due()
            if waits and not self._trainer.degrades:
                if images.step != step and self._queue.lacks_room_for(step):
                    look = self._insist(sealed, look)
                look = self._queue.wait_for_snapshot(look)
                if self._trainer.world_size == 1:
                    self.reach.close(look.writer.durable_snapshot)

    def _insist(self, sealed: Sealed, look: Look) -> Look:
        """Wait for the memory of a snapshot without which its step is lost, as training waits for chunks of a log."""
        images, step = self._queue.images, sealed.differential.step
        tried = time.monotonic()

        def is_taken(look: Look) -> bool:
            nonlocal tried
            if time.monotonic() - tried >= _RETRY_SECONDS:
                self._take(sealed, required=False, is_prompt=True, is_due=True, trails=False)
                tried = time.monotonic()
            return images.step == step

        return self._queue.wait_until(is_taken, f"memory for the snapshot of step {step}", look)

    def _take(
        self, sealed: Sealed, *, required: bool, is_prompt: bool, is_due: bool, trails: bool
    ) -> None:
        """Read the live state, and write it or leave that to another thread."""
        trainer, images, step = self._trainer, self._queue.images, sealed.differential.step
        with trainer.counters.timed(trainer.counters.snapshot_seconds):
            items = self.items(step)
            lasts = not is_prompt
            if items is None:
                share = share_of(self._live, sealed, lasts=lasts, trails=trails)
            else:  # buffers may have moved on since
                rank = self._live.rank
                share = share_of_items(self._live, sealed, rank, items, lasts=lasts, trails=trails)
            try:
                images.begin(step, is_due=is_due)
                if share.travels and not is_prompt:
                    self._share = share
                    shown = partial(self._put_shown, sealed)
                    self._leaving.put(partial(self._written, share), shown)
                    return
                written = images.write(share.images())
            except BaseException as error:
                images.give_up()
                if required or not isinstance(error, StorageError):
                    raise
                # At the next commit it is an error, if ``on_error="raise"``: this step counts already.
                images.owe_for(error, step)
                return
        self._show(sealed, written)

    def _written(self, share: Share) -> tuple[int, int] | Exception:
        """Write a snapshot once it is here, without the lock."""
        try:
            return self._queue.images.write(share.images())
        except Exception as error:  # noqa: BLE001  said, and the snapshot is owed
            return error
        finally:
            if self._share is share:
                self._share = None

    def _put_shown(self, sealed: Sealed, written: tuple[int, int] | Exception) -> None:
        """Have a snapshot count behind its step, which may be on its way."""
        self._pending.put(lambda: written, partial(self._show, sealed))

    def _show(self, sealed: Sealed, written: tuple[int, int] | Exception) -> None:
        """Hand a snapshot on that is written, or owe it."""
        step, images = sealed.differential.step, self._queue.images
        if images.step != step:
            return  # staging was made anew meanwhile
        if isinstance(written, Exception):
            images.give_up()
            if isinstance(written, Overwritten):  # the next one is copied in its turn
                images.is_owed = True
                text = (
                    f"the full snapshot of step {step} is given up: {written} was written between two optimizer "
                    "steps, while it was copied. Another one follows, for which the device waits"
                )
                self._warn_once(Code.SNAPSHOT_OVERWRITTEN, None, text)
            else:
                images.owe_for(written, step)
            return
        with self._lock:
            mark = images.show(*written)
            snapshot = Snapshot(sealed, self._trainer.folder.image(mark.slot), mark)
            for sink in self._sinks:
                sink.snapshot(snapshot)
            self.reach.forget_news(step)

    @contextmanager
    def _unless_gone(self) -> Iterator[None]:
        try:
            yield
        except StorageError:
            if not self.is_gone(self._queue.look()):
                raise


def _lost(durable_step: int, step: int) -> str:
    if durable_step >= step:
        return f"every step up to {step} is durable"
    steps = f"step {step}" if durable_step + 1 == step else f"steps {durable_step + 1} to {step}"
    return f"{steps} cannot be recovered"
