"""Copies that one rank keeps for another one: images, items and records, as they come or as they are made here."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import ClassVar

import torch
from crc32c import crc32c

from lowdiff.commit.images import share_of_items
from lowdiff.commit.run_lock import StagingArea
from lowdiff.core.events import Code
from lowdiff.errors import RankLost, StorageError
from lowdiff.model.tracked import Live
from lowdiff.persistence.files.mapped_file import ImageMark, MappedFile
from lowdiff.persistence.format.framing import RecordKind
from lowdiff.persistence.format.image import stage_image
from lowdiff.persistence.format.values import decode
from lowdiff.persistence.staging.items import StagedItems, write_items
from lowdiff.persistence.staging.log import StagingLog
from lowdiff.persistence.staging.status import (
    ReplicaStatus,
    SavedStatus,
    StatusPage,
    TrainerStatus,
    WriterStatus,
)
from lowdiff.protect.copies.line import CHUNK_BYTES, Head, Receiver, bytes_of
from lowdiff.protect.copies.note import Note
from lowdiff.protect.copies.residuals import KeptResidual
from lowdiff.recovery.replica.handle import ReplicaProcess
from lowdiff.step.states import Sealed
from lowdiff.types import Section

#: Steps of which a copy waits for its owner's numbers.
_MOST_WAITING = 8
#: How long a rank's numbers wait for this rank to come to their step.
_PATIENCE_SECONDS = 120.0
#: How long a snapshot waits for the replica of another rank's copy.
_STALL_SECONDS = 2.0
#: How long a step waits for a copy that is behind; to begin it anew takes a snapshot.
_LATE_SECONDS = 10.0
_LOOK_SECONDS = 0.002


class Ward:
    """Copies that are kept here for one rank on another node.

    The thread that trains makes images and sections, another one receives what the rank sends and puts the two
    together. Large because both share one state.

    Args:
        area: The copy's folder.
        live: This rank's training.
        log: Takes the rank's records.
        residual: Takes the rank's residuals; None where they are not sent.

    Attributes:
        rank: Whose copies.
        held_step: The newest step that can be recovered from here; -1 before the first.
        copied_step: Step of the newest image that is whole; -1 before the first.
        owes_snapshot: Whether only an image makes further steps of use.
        makes_steps: Whether steps between two images are kept, and made here.
    """

    makes_steps: ClassVar[bool] = True

    def __init__(
        self,
        area: StagingArea,
        live: Live,
        log: StagingLog,
        residual: KeptResidual | None = None,
    ) -> None:
        self.rank = area.folder.rank
        self.held_step = self.copied_step = -1
        self.owes_snapshot = False
        self._area = area
        self._folder = area.folder
        self._live = live
        self._log = log
        self._residual = residual
        self._items: StagedItems | None = None
        #: All items as of the newest step that the rank told of.
        self._all: dict[str, bytes] = {}
        self._told_step = -1
        self._waiting: deque[tuple[int, list[Section]]] = deque()
        #: Copies of what the optimizers of the open body used.
        self._ahead: list[Section] = []
        #: Slot and mark of an image whose items are not here yet.
        self._image: tuple[int, ImageMark] | None = None
        self._slot = 0
        self._trim_step = -1
        self._heard_at = time.monotonic()
        self._is_broken = False
        self._is_over = False
        self._why_over = ""
        self._changed = threading.Condition()
        #: Held while what was received is written.
        self._writing = threading.Lock()

    # By the thread that trains.

    def hold_ahead(self, sections: Sequence[Section]) -> None:
        """Keep a copy of what an optimizer is about to use of the rank's share."""
        if not self._is_broken:
            self._ahead += own_copy(sections)

    def hold(self, step: int, sections: Sequence[Section]) -> None:
        """Keep a copy of what else the rank stores of a step, until it tells the rest."""
        ahead, self._ahead = self._ahead, []
        with self._changed:
            # Steps after an image count once the items of its own step are here, which may come later.
            if self._is_broken and self._image is None:
                return
            self._waiting.append((step, [*ahead, *own_copy(sections)]))
            is_late = len(self._waiting) > _MOST_WAITING
            self._changed.notify()
        if is_late:
            self._give_up(f"rank {self.rank} has told nothing for {_MOST_WAITING} steps")

    def stage_image(self, sealed: Sealed) -> None:
        """Make the rank's share of a snapshot of the live state."""
        with self._changed:
            # An image whose items are not here yet is written over: it is not to be published meanwhile.
            slot, self._image = 1 - self._slot, None
        step = sealed.differential.step
        try:
            tensors = share_of_items(self._live, sealed, self.rank, {}).images()
            size, checksum = stage_image(self._folder.kept(slot), tensors, torch.get_num_threads())
        except StorageError as error:
            self._give_up(str(error), owes=False)
            return
        with self._changed:
            self._image = slot, ImageMark(step, size, checksum)
            self._publish()

    def trim(self, step: int) -> None:
        """Forget records before an image that every rank holds; that of its own step names a residual."""
        self._trim_step = max(self._trim_step, step - 1)

    def show(self, step: int, settled_step: int) -> None:
        """Tell whoever works on the copy how far it may go on; see `TrainerStatus`."""

    def keep_up(self, step: int) -> None:
        """Wait until the copy has a step, if the ranks' states would leave it behind: a log leaves none."""

    def wait_for_base(self, step: int) -> None:
        """Wait until the copy of a step is whole.

        Raises:
            RankLost: If the rank does not tell what it has.
        """
        with self._changed:
            self._heard_at = time.monotonic()
            # The residual of a large model takes a while.
            while not (self.held_step >= step or self._is_over):
                seconds = self._heard_at + _PATIENCE_SECONDS - time.monotonic()
                if seconds <= 0:
                    break
                self._changed.wait(seconds)
        if self.held_step < step:
            raise RankLost(f"rank {self.rank} did not tell what it alone has")

    def begin_anew(self) -> None:
        """Make the folder again after somebody removed staging; the next snapshot is the first.

        Raises:
            StorageError: If it cannot be made.
        """
        # Then nobody waits for this thread with the lock.
        self._give_up("its copy was removed", owes=False)  # a snapshot follows
        with self._writing:
            self._area.make_anew()
            self._log = self._log.anew()
            if self._items is not None:
                self._items = StagedItems(self._folder, self._all)
            if self._residual is not None:
                self._residual.begin_anew()
            self.held_step = self.copied_step = -1
            self._image = None

    # By the thread that receives.

    def receive(self, receiver: Receiver) -> None:
        """Put together what the rank sends and what is made here, until it sends no more."""
        try:
            while (head := receiver.head()) is not None:
                self._heard_at = time.monotonic()
                if head.is_image:
                    self._take_image(head, receiver)
                    continue
                if head.generation:
                    self._take_part(head, receiver)
                    continue
                note = Note.read(receiver.note(head))
                sections = note.empty_sections()
                for section in sections:
                    receiver.part(bytes_of(section.data))
                try:
                    with self._writing:
                        self._take(note, sections)
                except (StorageError, OSError) as error:
                    if not self._is_over:
                        self._give_up(str(error), owes=False)
        except RankLost as error:
            # Said where training goes on.
            self._why_over = f"the line to rank {self.rank} broke: {error}"
        finally:
            with self._changed:
                self._is_over = True
                self._changed.notify_all()

    def _take_part(self, head: Head, receiver: Receiver) -> None:
        """Receive a part of a residual where it is kept."""
        if self._residual is None:  # that rank was told otherwise
            receiver.part(torch.empty(head.length, dtype=torch.uint8, device="cpu"))
            return
        target = self._residual.target(head.generation, head.step, head.offset, head.length)
        receiver.part(target)
        self._residual.take(target, head.checksum)

    def _take_image(self, head: Head, receiver: Receiver) -> None:
        """Receive an image of the rank's share, where that is not made here."""
        raise RankLost(f"rank {self.rank} sent an image that is made here")

    def _take(self, note: Note, sections: Sequence[Section]) -> None:
        is_base = self._items is None
        if is_base:
            self._items = StagedItems(self._folder, note.items)
            self._all = dict(note.items)
        changed = decode(note.scalars)["items"]
        self._all.update(changed)
        assert self._items is not None
        self._items.stage(note.step, changed)
        if is_base and self._residual is not None:
            # It names the residual that the incarnation begins with.
            self._log.append(RecordKind.BASE, note.step, note.scalars, (), durable_step=-1)
        is_whole = is_base or self._append(note, sections)
        with self._changed:
            self._told_step = note.step
            if is_whole and self.copied_step >= 0 and not self._is_broken:
                self.held_step = note.step
            self._publish()
            self._changed.notify_all()

    def _append(self, note: Note, sent: Sequence[Section]) -> bool:
        """Add a record of the step; whether it is there.

        Raises:
            StorageError: If it is not equal to that of its rank.
        """
        sections = self._sections_of(note.step)
        if sections is None:
            return False
        if not self._write(note, [*sections, *sent]):
            self._give_up("there is no room for more steps before the next snapshot")
            return False
        return True

    def _write(self, note: Note, sections: Sequence[Section]) -> bool:
        """Append a record; False if there is no room."""
        written = self._log.append(
            RecordKind.DIFFERENTIAL,
            note.step,
            note.scalars,
            sections,
            durable_step=self._free_step(),
            rebases=note.rebases,
            expected=note.checksum,
        )
        return written is not None

    def _free_step(self) -> int:
        """The step up to which records are of no use any more."""
        return self._trim_step

    def _sections_of(self, step: int) -> list[Section] | None:
        """Wait for this rank's copy of a step; None where it gave up."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._is_broken or self._is_over or bool(self._waiting), _PATIENCE_SECONDS
            )
            while self._waiting and self._waiting[0][0] < step:
                self._waiting.popleft()
            if self._waiting and self._waiting[0][0] == step:
                return self._waiting.popleft()[1]
        if not (self._is_broken or self._is_over):
            self._give_up(f"step {step} was not kept")
        return None

    # By either.

    def _publish(self) -> None:
        """Make an image count once the items of its step are here; the lock is held."""
        if self._image is None or self._image[1].step != self._told_step:
            return
        slot, mark = self._image
        try:
            write_items(self._folder.kept_items(slot), mark.step, self._all)
            StatusPage(self._folder.kept_saved(slot), SavedStatus(image=mark))
        except (OSError, StorageError) as error:
            self._give_up(str(error), owes=False)
            return
        self._slot, self._image = slot, None
        self._is_broken = self.owes_snapshot = False
        self.copied_step = self.held_step = mark.step
        self._changed.notify_all()

    def _give_up(self, why: str, *, owes: bool = True) -> None:
        """Keep no more steps until the next image."""
        with self._changed:
            is_news, self._is_broken = not self._is_broken, True
            self.owes_snapshot = owes and not self._is_over  # which no image mends
            self._waiting.clear()
            self._changed.notify_all()
        if is_news:
            Code.COPY_SUSPENDED.warn(
                f"no copy of rank {self.rank}'s steps is kept until the next full snapshot: {why}",
                rank=self._live.rank,
            )

    def close(self, *, removes: bool) -> None:
        """End; the folder goes where nothing of it is needed any more."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()
        if removes:
            self._folder.remove()
        self._area.release()


class ReplicaWard(Ward):
    """A copy for a rank without a compressor: its share of the state, by a replica of its own.

    Args:
        area: See `Ward`.
        live: See `Ward`.
        log: The replica's queue.
        replica: Applies what is queued.

    Attributes:
        replica: Its handle, which starts another process where one has died.
    """

    def __init__(
        self, area: StagingArea, live: Live, log: StagingLog, replica: ReplicaProcess
    ) -> None:
        super().__init__(area, live, log)
        self.replica = replica
        self._tell_processes()

    def show(self, step: int, settled_step: int) -> None:
        """See `Ward`: the replica applies what is settled."""
        self._page.update(step=step, settled_step=settled_step)

    def keep_up(self, step: int) -> None:
        """See `Ward`: states go back to no earlier step, so without this one none would go on, or all in vain."""
        with self._changed:
            self._changed.wait_for(
                lambda: self.held_step >= step or self._is_broken or self._is_over, _LATE_SECONDS
            )
            is_lacking = 0 <= self.held_step < step
        if is_lacking:
            late = f"step {step} of rank {self.rank} has not come for {_LATE_SECONDS:g} s"
            self._give_up(self._why_over or late)

    def stage_image(self, sealed: Sealed) -> None:
        """See `Ward`: the replica begins anew with it, so it has the items as well."""
        step = sealed.differential.step
        # In attach a rank may be far behind; a step waits for no one for long.
        patience = _PATIENCE_SECONDS if self.copied_step < 0 else _STALL_SECONDS
        with self._changed:
            self._changed.wait_for(lambda: self._told_step >= step or self._is_over, patience)
            is_told = self._told_step == step  # a rank that ended may have told less
            items = dict(self._all)
        if not is_told or not self._waits_for(lambda: not self._is_image_in_use(), patience):
            self._give_up(f"rank {self.rank}, or its replica here, is behind")
            return
        try:
            tensors = share_of_items(self._live, sealed, self.rank, items).images()
            size, checksum = stage_image(self._folder.snapshot, tensors, torch.get_num_threads())
        except StorageError as error:
            self._give_up(str(error), owes=False)
            return
        self._show_image(ImageMark(step, size, checksum))

    def _show_image(self, mark: ImageMark) -> None:
        """Let the replica begin anew with an image that is whole."""
        self._page.update(image=mark)
        with self._changed:
            self._is_broken = self.owes_snapshot = False
            self.copied_step = self.held_step = mark.step
            self._changed.notify_all()

    def _give_up(self, why: str, *, owes: bool = True) -> None:
        """See `Ward`: a state that falls behind has no step in common with those of the other ranks."""
        super()._give_up(why)  # its replica needs an image, which nobody takes unasked
        self.held_step = -1

    def _is_image_in_use(self) -> bool:
        # Another replica may have to be started before it is taken; none is before the first step.
        return self.copied_step >= 0 and self._replica_status().image_step < self.copied_step

    def _write(self, note: Note, sections: Sequence[Section]) -> bool:
        """See `Ward`: waits for the replica to make room; without a state it has no use for steps."""
        write, status = super()._write, self._replica_status()
        if status.asks_for_image(self.copied_step):
            self._give_up(f"its replica here has no state: {status.error}")
            return False
        return self._waits_for(lambda: write(note, sections), _PATIENCE_SECONDS)

    def _free_step(self) -> int:
        return self._replica_status().consumed_step

    def _replica_status(self) -> ReplicaStatus:
        """Start the replica if it is not there, or no longer; return what it has done."""
        self.replica.begin()
        return self.replica.read_status()

    def _waits_for(self, condition: Callable[[], bool], seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while not condition():
            if self._is_over or self._is_broken or time.monotonic() > deadline:
                return False
            time.sleep(_LOOK_SECONDS)
        return True

    def begin_anew(self) -> None:
        """See `Ward`."""
        self.replica.stop()
        super().begin_anew()
        self.replica.begin_anew()
        self._tell_processes()

    def _tell_processes(self) -> None:
        folder = self._folder
        self._page = StatusPage(folder.trainer_status, TrainerStatus(os.getpid()))
        StatusPage(folder.status, WriterStatus())  # nobody writes its images to a disk

    def close(self, *, removes: bool) -> None:
        """See `Ward`: its replica would hold what it keeps until this trainer ends."""
        self.replica.stop()
        super().close(removes=removes)


class SentWard(ReplicaWard):
    """A copy for a rank whose shards nobody here holds: that rank sends gradients, and images of its share.

    It sends what LowDiff+ needs: a gradient a step, of the size of its shards. (Gemini sends parameters and
    optimizer state: three times as much with Adam.)
    """

    makes_steps = False

    def stage_image(self, sealed: Sealed) -> None:
        """See `Ward`: the rank sends it."""

    def _sections_of(self, step: int) -> list[Section] | None:
        """See `Ward`: all of them are sent."""
        return None if self._is_broken else []

    def _take_image(self, head: Head, receiver: Receiver) -> None:
        """See `Ward`: where there is no room for it, it is read from the line all the same."""
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while self._is_image_in_use() and not self._is_over and time.monotonic() < deadline:
            time.sleep(_LOOK_SECONDS)
        with self._writing:  # nobody removes the folder meanwhile
            memory = self._image_memory(head.length)
            checksum = 0
            for start in range(0, head.length, CHUNK_BYTES):
                size = min(CHUNK_BYTES, head.length - start)
                chunk = memory[start : start + size] if memory else memoryview(bytearray(size))
                receiver.part(torch.frombuffer(chunk, dtype=torch.uint8))
                checksum = crc32c(chunk, checksum)
                self._heard_at = time.monotonic()
            if memory and checksum != head.checksum:
                self._give_up(f"an image of rank {self.rank} fails its checksum")
            elif memory:
                self._show_image(ImageMark(head.step, head.length, checksum))

    def _image_memory(self, size: int) -> memoryview | None:
        """Return where an image is to lie; None if there is no room, which is said."""
        if self._is_image_in_use():
            self._give_up(f"the replica of rank {self.rank} here is behind")
            return None
        try:
            return MappedFile(self._folder.snapshot, size).view
        except StorageError as error:
            self._give_up(str(error))
            return None


def own_copy(sections: Sequence[Section]) -> list[Section]:
    """Return sections with memory of their own."""
    return [replace(section, data=section.data.copy()) for section in sections]
