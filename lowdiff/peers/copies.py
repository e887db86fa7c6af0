"""Copies in other nodes' memory: what one rank keeps for ranks on other nodes, and has kept for itself.

After an exchange every rank of a data-parallel training holds the gradient, the parameters and the optimizer's state.
So a copy of another rank's differential, and of its share of a snapshot, is made here, from this rank's own memory, and
nothing of it is sent. (Gemini sends the whole state: Wang et al., SOSP 2023.) What the other rank alone has is sent: the
numbers of a step and the items that changed (generators, buffers, stateful objects). They also carry the checksum of the
record as that rank staged it, so that a copy which is not equal to the bit is noticed here.

A copy of a step counts once its items and, with a log, its record are here, on the image of an earlier step. Two images
take turns: the one before stays until every rank holds the next.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from lowdiff.commit.agreement import RankNews
from lowdiff.commit.run_lock import StagingArea
from lowdiff.commit.staging import share_of_items
from lowdiff.compressors.collectives import leave
from lowdiff.core.events import Code
from lowdiff.errors import RankLost, StorageError
from lowdiff.model.tracked import Live
from lowdiff.peers.line import Head, Receiver, Sender
from lowdiff.peers.residuals import KeptResidual, Outgoing
from lowdiff.peers.spans import Spans
from lowdiff.persistence.files.mapped_file import ImageMark
from lowdiff.persistence.format.differentials import (
    encode_scalars,
    numbered,
    written_sections,
)
from lowdiff.persistence.format.framing import RecordKind
from lowdiff.persistence.format.image import stage_image
from lowdiff.persistence.format.values import decode, encode
from lowdiff.persistence.staging.items import StagedItems, write_items
from lowdiff.persistence.staging.log import StagingLog
from lowdiff.persistence.staging.status import (
    SavedStatus,
    StatusPage,
    TrainerStatus,
    WriterStatus,
)
from lowdiff.protocols import Reducer
from lowdiff.recovery.replica.handle import ReplicaProcess
from lowdiff.step.states import Sealed
from lowdiff.types import Section

#: Steps of which a copy waits for its owner's numbers.
_MOST_WAITING = 8
#: How long a rank's numbers wait for this rank to come to their step.
_PATIENCE_SECONDS = 120.0
#: How long a snapshot waits for the replica of another rank's copy.
_STALL_SECONDS = 2.0
_LOOK_SECONDS = 0.002
#: How many steps replicas stay behind the committed one for copies that are late; their queues hold twice as many.
_MOST_STEPS_BEHIND = 2
#: How long a rank that closes waits for what others still send: where all is well, and after a failure.
_CLOSE_SECONDS, _FAILED_SECONDS = 5.0, 0.5


@dataclass(frozen=True, slots=True)
class Note:
    """One step's message of a rank to those that keep its copies.

    Attributes:
        step: The step.
        rebases: Whether it cannot be replayed.
        scalars: Of its record, encoded; with the items that changed.
        written: Sections with values that something else than an optimizer wrote: name, coding, dtype, bytes.
        checksum: CRC-32C of its record's body; 0 where steps are not logged.
        items: All items, at the beginning of an incarnation alone.
    """

    step: int
    rebases: bool
    scalars: bytes
    written: list[list[Any]]
    checksum: int
    items: dict[str, bytes]

    @classmethod
    def of(cls, sealed: Sealed, checksum: int, items: Mapping[str, bytes]) -> Note:
        """Describe a step that this rank has staged."""
        record = sealed.differential
        sections = written_sections(record.written)
        return cls(
            step=record.step,
            rebases=sealed.rebases,
            scalars=encode_scalars(record),
            written=[[s.name, s.coding, s.data.dtype.str, s.data.tobytes()] for s in sections],
            checksum=checksum,
            items=dict(items),
        )

    @property
    def sections(self) -> list[Section]:
        """The written values, as sections of a record."""
        return [
            Section(name, coding, np.frombuffer(data, np.dtype(dtype)))
            for name, coding, dtype, data in self.written
        ]


class Ward:
    """Copies that are kept here for one rank on another node.

    The thread that trains makes images and sections, another one receives what the rank sends and puts the two
    together. Large because both share one state.

    Args:
        area: The copy's folder.
        live: This rank's training.
        log: Takes the rank's records; None where steps are not logged.
        residual: Takes the rank's residuals; None where they are not sent.

    Attributes:
        rank: Whose copies.
        held_step: The newest step that can be recovered from here; -1 before the first.
        copied_step: Step of the newest image that is whole; -1 before the first.
        owes_snapshot: Whether only an image makes further steps of use.
        keeps_steps: Whether it keeps the steps between two images too.
    """

    def __init__(
        self,
        area: StagingArea,
        live: Live,
        log: StagingLog | None,
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
        self.keeps_steps = log is not None
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
        self._changed = threading.Condition()
        #: Held while what was received is written.
        self._writing = threading.Lock()

    # By the thread that trains.

    def hold_ahead(self, sections: Sequence[Section]) -> None:
        """Keep a copy of what an optimizer is about to use of the rank's share."""
        if self._log is not None and not self._is_broken:
            self._ahead += _copied(sections)

    def hold(self, step: int, sections: Sequence[Section]) -> None:
        """Keep a copy of what else the rank stores of a step, until it tells the rest."""
        ahead, self._ahead = self._ahead, []
        if self._log is None:
            return
        with self._changed:
            # Steps after an image count once the items of its own step are here, which may come later.
            if self._is_broken and self._image is None:
                return
            self._waiting.append((step, [*ahead, *_copied(sections)]))
            is_late = len(self._waiting) > _MOST_WAITING
            self._changed.notify()
        if is_late:
            self._give_up(f"rank {self.rank} has told nothing for {_MOST_WAITING} steps")

    def stage_image(self, sealed: Sealed) -> None:
        """Make the rank's share of a snapshot of the live state."""
        step, slot = sealed.differential.step, 1 - self._slot
        try:
            tensors = share_of_items(self._live, sealed, self.rank, {})
            size, checksum = stage_image(
                self._folder.copied(slot), tensors, torch.get_num_threads()
            )
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
            if self._log is not None:
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
                if head.generation:
                    self._take_part(head, receiver)
                    continue
                note = Note(**decode(receiver.note(head)))
                try:
                    with self._writing:
                        self._take(note)
                except (StorageError, OSError) as error:
                    if not self._is_over:
                        self._give_up(str(error), owes=False)
        except RankLost:
            self._is_broken = True  # training waits for that rank as well, and says so
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

    def _take(self, note: Note) -> None:
        is_base = self._items is None
        if is_base:
            self._items = StagedItems(self._folder, note.items)
            self._all = dict(note.items)
        changed = decode(note.scalars)["items"]
        self._all.update(changed)
        assert self._items is not None
        self._items.stage(note.step, changed)
        if is_base and self._log is not None and self._residual is not None:
            # It names the residual that the incarnation begins with.
            self._log.append(RecordKind.BASE, note.step, note.scalars, (), durable_step=-1)
        is_whole = is_base or self._log is None or self._append(note)
        with self._changed:
            self._told_step = note.step
            if is_whole and self._log is not None and self.copied_step >= 0 and not self._is_broken:
                self.held_step = note.step
            self._publish()
            self._changed.notify_all()

    def _append(self, note: Note) -> bool:
        """Add a record of the step; whether it is there.

        Raises:
            StorageError: If it is not equal to that of its rank.
        """
        sections = self._sections_of(note.step)
        if sections is None or self._log is None:
            return False
        if not self._write(self._log, note, [*sections, *note.sections]):
            self._give_up("there is no room for more steps before the next snapshot")
            return False
        return True

    def _write(self, log: StagingLog, note: Note, sections: Sequence[Section]) -> bool:
        """Append a record; False if there is no room."""
        written = log.append(
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
            write_items(self._folder.copied_items(slot), mark.step, self._all)
            StatusPage(self._folder.copied_saved(slot), SavedStatus(image=mark))
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
            self.owes_snapshot = owes
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
    """

    def __init__(
        self, area: StagingArea, live: Live, log: StagingLog, replica: ReplicaProcess
    ) -> None:
        super().__init__(area, live, log)
        self._replica = replica
        self._tell_processes()

    def show(self, step: int, settled_step: int) -> None:
        """See `Ward`: the replica applies what is settled."""
        self._page.update(step=step, settled_step=settled_step)

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
            tensors = share_of_items(self._live, sealed, self.rank, items)
            size, checksum = stage_image(self._folder.snapshot, tensors, torch.get_num_threads())
        except StorageError as error:
            self._give_up(str(error), owes=False)
            return
        self._page.update(image=ImageMark(step, size, checksum))
        with self._changed:
            self._is_broken = self.owes_snapshot = False
            self.copied_step = self.held_step = step
            self._changed.notify_all()

    def _give_up(self, why: str, *, owes: bool = True) -> None:
        """See `Ward`: a state that falls behind has no step in common with those of the other ranks."""
        super()._give_up(why)  # its replica needs an image, which nobody takes unasked
        self.held_step = -1

    def _is_image_in_use(self) -> bool:
        return self._replica.read_status().image_step < self.copied_step

    def _write(self, log: StagingLog, note: Note, sections: Sequence[Section]) -> bool:
        """See `Ward`: waits for the replica to make room."""
        write = super()._write
        return self._waits_for(lambda: write(log, note, sections), _PATIENCE_SECONDS)

    def _free_step(self) -> int:
        return self._replica.status().consumed_step

    def _waits_for(self, condition: Callable[[], bool], seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while not condition():
            if self._is_over or self._is_broken or time.monotonic() > deadline:
                return False
            time.sleep(_LOOK_SECONDS)
        return True

    def begin_anew(self) -> None:
        """See `Ward`."""
        self._replica.stop()
        super().begin_anew()
        self._replica.begin_anew()
        self._tell_processes()

    def _tell_processes(self) -> None:
        folder = self._folder
        self._page = StatusPage(folder.trainer_status, TrainerStatus(os.getpid()))
        StatusPage(folder.status, WriterStatus())  # nobody writes its images to a disk

    def close(self, *, removes: bool) -> None:
        """See `Ward`."""
        if removes:
            self._replica.stop()
        super().close(removes=removes)


def _copied(sections: Sequence[Section]) -> list[Section]:
    return [replace(section, data=section.data.copy()) for section in sections]


class Copies:
    """The copies that one rank keeps and has kept.

    Large because a step, a snapshot and their news pass here on their way to all of them.

    Args:
        group: Carries what ranks send.
        keepers: Ranks that keep copies of what this one stages.
        wards: What this one keeps.
        all_items: Reads all items of this rank.
        outgoing: This rank's residuals; None if they are not sent.

    Attributes:
        replicated_step: The newest step that every rank's copies have; -1 while one has no state.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        keepers: Sequence[int],
        wards: Sequence[Ward],
        all_items: Callable[[], Mapping[str, bytes]],
        outgoing: Outgoing | None = None,
    ) -> None:
        self.replicated_step = -1
        self._settled_step = -1
        self._wards = wards
        self._all_items = all_items
        #: The newest step that this rank told of: where it keeps nothing, it holds no other rank back.
        self._told_step = -1
        self._group = group
        self._outgoing = outgoing
        self._sender = Sender(group, keepers, outgoing)
        self._receivers = [Receiver(group, ward.rank) for ward in wards]
        self._threads = []
        for ward, receiver in zip(wards, self._receivers, strict=True):
            name = f"lowdiff-keeps-{ward.rank}"
            thread = threading.Thread(target=ward.receive, args=(receiver,), name=name, daemon=True)
            thread.start()
            self._threads.append(thread)

    @property
    def held_step(self) -> int:
        """The newest step of which this rank holds all that it keeps; see `RankNews`."""
        return min((ward.held_step for ward in self._wards), default=self._told_step)

    @property
    def copied_step(self) -> int:
        """The newest step of which it holds the images."""
        return min((ward.copied_step for ward in self._wards), default=self._told_step)

    @property
    def owes_snapshot(self) -> bool:
        """Whether only a snapshot makes further copies of use."""
        return any(ward.owes_snapshot for ward in self._wards)

    @property
    def spans(self) -> Spans | None:
        """What is to hear of exchanges; None where nothing is sent that waits for their end."""
        return None if self._outgoing is None else self._outgoing.plan.spans

    def stage_base(self, sealed: Sealed) -> None:
        """Tell what an incarnation begins with; its first snapshot follows."""
        self._send(sealed, 0, self._all_items())

    def stage_ahead(self, reducer: Reducer, number: int) -> None:
        """Keep what an optimizer is about to use of the shares of others.

        Args:
            reducer: Has the gradients.
            number: Which optimizer step of the loop body it is, from 0.
        """
        for ward in self._wards:
            if ward.keeps_steps:
                ward.hold_ahead(numbered(reducer.payload(ward.rank).sections, number))

    def stage(self, sealed: Sealed, checksum: int) -> None:
        """Tell what this rank alone has of a step, and keep what others store of it.

        Args:
            sealed: The step.
            checksum: Of this rank's own record.
        """
        if self.spans is not None:
            self.spans.committed()
        self._send(sealed, checksum, {})
        for ward in self._wards:
            payload = sealed.of_peers.get(ward.rank)
            if payload is not None:
                ward.hold(sealed.differential.step, payload.sections)

    def _send(self, sealed: Sealed, checksum: int, items: Mapping[str, bytes]) -> None:
        note, record = Note.of(sealed, checksum, items), sealed.differential
        self._told_step = record.step
        self._sender.send(encode(asdict(note)), record.step, record.residual)

    def snapshot(self, sealed: Sealed) -> None:
        """Make the shares of others in a snapshot."""
        for ward in self._wards:
            ward.stage_image(sealed)

    def hear(self, heard: Sequence[RankNews]) -> None:
        """Note what all ranks hold."""
        self.replicated_step = min(news.held for news in heard)
        if self._outgoing is not None:
            self._outgoing.hear(self.replicated_step)
        least = min(news.copied for news in heard)
        for ward in self._wards:
            ward.trim(least)

    def begin_anew(self) -> None:
        """Make the folders again after somebody removed staging.

        Raises:
            StorageError: If one cannot be made.
        """
        for ward in self._wards:
            ward.begin_anew()

    def show(self, step: int, committed_step: int) -> int:
        """Tell replicas of others how far all ranks are; returns to which step all replicas may go on.

        A state goes back to no earlier step. So none goes on to a step that a copy lacks, unless that copy is far
        behind, or given up: training does not wait for it.
        """
        settled = committed_step
        if self.replicated_step >= 0:
            settled = min(settled, max(self.replicated_step, committed_step - _MOST_STEPS_BEHIND))
        self._settled_step = max(self._settled_step, settled)
        for ward in self._wards:
            ward.show(step, self._settled_step)
        return self._settled_step

    def wait_for_base(self, step: int) -> None:
        """Wait until what this rank keeps of a step is whole.

        Raises:
            RankLost: If a rank does not tell what it has.
        """
        for ward in self._wards:
            ward.wait_for_base(step)

    @property
    def _recoverable_step(self) -> int:
        """`replicated_step`, unless states have gone on without a copy: then -1."""
        step = self.replicated_step
        has_states = any(isinstance(ward, ReplicaWard) for ward in self._wards)
        return -1 if has_states and step < self._settled_step else step

    def figures(self) -> dict[str, Any]:
        """Parts of ``stats()``; for any thread."""
        return {
            "replicated_step": self._recoverable_step,
            "held_step": self.held_step,
            "copied_ranks": [ward.rank for ward in self._wards],
            "copies_bytes_sent": self._sender.bytes_sent,
            **({} if self._outgoing is None else {"residual_step": self._outgoing.sent_step}),
        }

    def close(self, *, removes: bool) -> None:
        """Send and receive no more; may be repeated.

        Args:
            removes: Whether all that was kept is in the run folder of all ranks.
        """
        self._sender.close()
        if self._outgoing is not None:
            # Else a rank that sends a part when this one closes would wait in Gloo for nobody. All ranks
            # close where all went well; elsewhere some may have ended.
            deadline = time.monotonic() + (_CLOSE_SECONDS if removes else _FAILED_SECONDS)
            for thread in self._threads:
                thread.join(max(0.0, deadline - time.monotonic()))
        for receiver in self._receivers:
            receiver.close()
        for ward in self._wards:
            ward.close(removes=removes)
        leave(self._group)
