"""Copies in other nodes' memory: what one rank keeps for ranks on other nodes, and has kept for itself.

After an exchange every rank of a data-parallel training holds the gradient, the parameters and the optimizer's state.
So a copy of another rank's differential, and of its share of a snapshot, is made here, from this rank's own memory, and
nothing of it is sent. (Gemini sends the whole state: Wang et al., SOSP 2023.) What the other rank alone has is sent: the
numbers of a step, the items that changed (generators, buffers, stateful objects), and of shards that are nowhere else the
gradients. A step's message also carries the checksum of the record as that rank staged it, so that a copy which is not
equal to the bit is noticed here.

A copy of a step counts once its items and, with a log, its record are here, on the image of an earlier step. Two images
take turns: the one before stays until every rank holds the next.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch.distributed as dist

from lowdiff.commit.agreement import RankNews
from lowdiff.commit.sinks import Ahead, Handed, Sink, Snapshot
from lowdiff.commit.storage import Look, Trainer
from lowdiff.compressors.collectives import leave
from lowdiff.core.placement import Peers
from lowdiff.model.tracked import Live
from lowdiff.persistence.files.mapped_file import mapped_privately
from lowdiff.persistence.format.differentials import numbered, sections_of, written_sections
from lowdiff.protect.copies.line import Receiver, Sender
from lowdiff.protect.copies.note import Note
from lowdiff.protect.copies.residuals import Outgoing
from lowdiff.protect.copies.wards import ReplicaWard, Ward, own_copy
from lowdiff.step.states import Sealed
from lowdiff.types import Section

#: How many steps a state's copy may be behind; replicas' queues hold twice as many.
_MOST_STEPS_BEHIND = 2
#: How long a rank that closes waits for what others still send: where all is well, and after a failure.
_CLOSE_SECONDS, _FAILED_SECONDS = 5.0, 0.5


class Copies(Sink):
    """The copies that one rank keeps and has kept.

    Large because a step, a snapshot and their news pass here on their way to all of them.

    Args:
        group: Carries what ranks send.
        peers: Ranks that keep copies of what this one stages, and whose copies it keeps.
        wards: What this one keeps.
        trainer: Says whether a step waits for a copy that is late; else states go on without it.
        live: This rank's training.
        outgoing: This rank's residuals; None if they are not sent.

    Attributes:
        replicated_step: The newest step that every rank's copies have; -1 while one has no state.
        wards: What this rank keeps.
    """

    takes_images_at_once = True

    def __init__(
        self,
        group: dist.ProcessGroup,
        peers: Peers,
        wards: Sequence[Ward],
        trainer: Trainer,
        live: Live,
        outgoing: Outgoing | None,
    ) -> None:
        self.replicated_step = -1
        self._waits, self._counters = not trainer.degrades, trainer.counters
        self._settled_step = -1
        self.wards = wards
        self._live = live
        #: Whether keepers lack this rank's parameters, so that gradients and images are sent as well.
        self._sends_all = peers.sends_all
        #: Copies of what the optimizers of the open body used, where they are sent.
        self._ahead: list[Section] = []
        #: The newest step that this rank told of: where it keeps nothing, it holds no other rank back.
        self._told_step = -1
        self._group = group
        self._outgoing = outgoing
        self._sender = Sender(group, peers.keepers, outgoing)
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
        return min((ward.held_step for ward in self.wards), default=self._told_step)

    @property
    def copied_step(self) -> int:
        """The newest step of which it holds the images."""
        return min((ward.copied_step for ward in self.wards), default=self._told_step)

    def owes_snapshot(self, look: Look) -> bool:
        """See `Sink`: whether only one makes further copies of use."""
        return any(ward.owes_snapshot for ward in self.wards)

    def news(self, step: int, look: Look) -> dict[str, Any]:
        """See `Sink`."""
        return {"held": self.held_step, "copied": self.copied_step}

    def stage_base(self, base: Handed) -> Handed:
        """See `Sink`: tells what an incarnation begins with; its first snapshot follows."""
        self._send(base.sealed, 0, self._live.all_items(), ())
        return base

    def stage_ahead(self, ahead: Ahead) -> None:
        """See `Sink`: keeps what is used of this rank's share to send it, and what is used of those of others."""
        if self._sends_all:
            self._ahead += own_copy(ahead.sections)
        for ward in self.wards:
            if ward.makes_steps and ahead.reducer is not None:
                sections = ahead.reducer.payload(ward.rank).sections
                ward.hold_ahead(numbered(sections, ahead.number))

    def stage(self, handed: Handed) -> Handed:
        """See `Sink`: tells what this rank alone has of a step, and keeps what others store of it."""
        sealed = handed.sealed
        if self._outgoing is not None:
            self._outgoing.plan.spans.committed()
        if self._sends_all:
            ahead, self._ahead = self._ahead, []
            sections = [*ahead, *own_copy(sections_of(sealed.differential))]
        else:
            sections = own_copy(written_sections(sealed.differential.written))
        self._send(sealed, handed.checksum or 0, {}, sections)
        for ward in self.wards:
            payload = sealed.of_peers.get(ward.rank)
            if payload is not None:
                ward.hold(sealed.differential.step, payload.sections)
        return handed

    def _send(
        self,
        sealed: Sealed,
        checksum: int,
        items: Mapping[str, bytes],
        sections: Sequence[Section],
    ) -> None:
        note, record = Note.of(sealed, checksum, items, sections), sealed.differential
        self._told_step = record.step
        behind = [section.data for section in sections]
        self._sender.send(note.encoded(), record.step, record.residual, behind)

    def snapshot(self, snapshot: Snapshot) -> None:
        """See `Sink`: sends this rank's share where it is nowhere else, and makes the shares of others."""
        mark = snapshot.mark
        if self._sends_all:
            with suppress(FileNotFoundError):  # somebody removed it: the next commit makes it anew
                self._sender.send_image(mapped_privately(snapshot.path), mark.step, mark.checksum)
        for ward in self.wards:
            ward.stage_image(snapshot.sealed)

    def keep_up(self, step: int) -> None:
        """See `Sink`: a copy of a state that does not come is given up."""
        if self._waits:
            with self._counters.waiting():
                for ward in self.wards:
                    ward.keep_up(step - _MOST_STEPS_BEHIND)

    def hear(self, heard: Sequence[RankNews]) -> None:
        """See `Sink`: what all ranks hold."""
        self.replicated_step = min(news.held for news in heard)
        if self._outgoing is not None:
            self._outgoing.hear(self.replicated_step)
        least = min(news.copied for news in heard)
        for ward in self.wards:
            ward.trim(least)

    def begin_anew(self, step: int) -> None:
        """See `Sink`."""
        for ward in self.wards:
            ward.begin_anew()

    def show(self, step: int, committed_step: int, told_step: int) -> int:
        """See `Sink`.

        A state goes back to no earlier step. So none goes on to a step that a copy lacks, unless a copy is given up, or
        no step waits for one: then states are some steps behind at most.
        """
        settled = committed_step
        if self.replicated_step >= 0:
            least = -1 if self._waits else committed_step - _MOST_STEPS_BEHIND
            settled = min(settled, max(self.replicated_step, least))
        self._settled_step = max(self._settled_step, told_step, settled)
        for ward in self.wards:
            ward.show(step, self._settled_step)
        return self._settled_step

    def wait_for_base(self, step: int) -> None:
        """Wait until what this rank keeps of a step is whole.

        Raises:
            RankLost: If a rank does not tell what it has.
        """
        for ward in self.wards:
            ward.wait_for_base(step)

    @property
    def _recoverable_step(self) -> int:
        """`replicated_step`, unless states have gone on without a copy: then -1."""
        step = self.replicated_step
        has_states = any(isinstance(ward, ReplicaWard) for ward in self.wards)
        return -1 if has_states and step < self._settled_step else step

    def figures(self) -> dict[str, Any]:
        """See `Sink`."""
        return {
            "replicated_step": self._recoverable_step,
            "held_step": self.held_step,
            "copied_ranks": [ward.rank for ward in self.wards],
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
        for ward in self.wards:
            ward.close(removes=removes)
        leave(self._group)
