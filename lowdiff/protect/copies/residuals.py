"""Error-feedback residuals on their way to other nodes, and as they are kept there.

A rank alone has its residual: after the loss of its node training continues bit for bit only if another node has it.
A step's residual is copied from its slot after the commit, and leaves in parts while no gradients are exchanged.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from functools import partial
from math import ceil
from pathlib import Path

import numpy as np
import torch
from crc32c import crc32c

from lowdiff.compressors.feedback import NUM_SLOTS, RotatingResidual
from lowdiff.core.events import Code
from lowdiff.core.memory import byte_view
from lowdiff.errors import RankLost
from lowdiff.persistence.staging.residual_slots import ResidualSlots
from lowdiff.protect.copies.schedule import LinkMeter, schedule
from lowdiff.protect.copies.spans import Spans
from lowdiff.types import Layout, ResidualLayout, ResidualMark

#: Of two parts, one is sent while the other is received.
_PARTS, _BUFFER_BYTES = 2, 32 << 20
#: Share of an idle span that parts take.
_SAFETY = 0.8
#: Steps that may be made while a note waits for its residual.
_MOST_STEPS_BEHIND = 2
#: Steps behind the last replicated one whose residuals are sent. Recovery goes back to that step or a later one,
#: and keepers have slots for all of these.
_MOST_STEPS_AHEAD = NUM_SLOTS - 1
#: Where nothing has been replicated for longer, nothing soon will be.
_STUCK_STEPS = 4
#: A part up to this size is sent in any span while none is known: it would hardly last into an exchange.
_SMALL_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a residual.

    Attributes:
        position: Step and idle span in which it is sent, or later; None: in the first span of any step.
        keeper: Index of the rank that gets it, among those that keep copies.
        step: Of the residual.
        generation: Number of the residual.
        offset: First byte.
        data: Its bytes, uint8.
        checksum: CRC-32C of the residual from its beginning to the end of the part.
    """

    position: tuple[int, int] | None
    keeper: int
    step: int
    generation: int
    offset: int
    data: torch.Tensor
    checksum: int


class Plan:
    """Decide in which idle span each part of a residual is sent.

    Args:
        spans: Tells when gradients are exchanged.
        num_keepers: How many ranks get each residual.
        rank: This rank.

    Attributes:
        fits: Whether one step's idle spans take a whole residual, as far as is known.
        spans: As given.
    """

    def __init__(self, spans: Spans, num_keepers: int, rank: int) -> None:
        self.fits = True
        self.spans = spans
        self._num_keepers = num_keepers
        self._rank = rank
        self._meter = LinkMeter()
        self._has_said = False

    def measured(self, num_bytes: int, seconds: float) -> None:
        """Note how long a message took."""
        self._meter.add(num_bytes, seconds)

    def cut(self, residual: torch.Tensor, step: int, generation: int) -> list[Part]:
        """Divide a residual into parts, each with the span that has room for it.

        Args:
            residual: All of it, uint8.
            step: Its step.
            generation: Its number.
        """
        idle, (now_step, now_span) = self.spans.idle_seconds, self.spans.position
        scheduled = partial(
            schedule,
            copies=self._num_keepers,
            copy_bytes=residual.nbytes,
            buffer_bytes=_BUFFER_BYTES,
            parts=_PARTS,
            link=self._meter.link(),
            safety=_SAFETY,
        )
        # What no span of one step takes is in the last of them, which has no end.
        placed = sum(chunk.bytes for chunk in scheduled(idle) if chunk.span < len(idle))
        num_steps = ceil(self._num_keepers * residual.nbytes / placed) if placed else 0
        self.fits = not idle or num_steps == 1
        if not self.fits:
            self._say_once(residual.nbytes, num_steps)
        now_span = min(now_span, len(idle) - 1)
        parts, offset, keeper, checksum = [], 0, 0, 0
        for chunk in scheduled((idle * (num_steps + 1))[now_span:] if placed else ()):
            if chunk.copy != keeper:
                offset, keeper, checksum = 0, chunk.copy, 0
            position = (0, 0) if chunk.bytes <= _SMALL_BYTES else None
            if placed:
                later, span = divmod(now_span + chunk.span, len(idle))
                position = now_step + later, span
            data = residual[offset : offset + chunk.bytes]
            checksum = crc32c(byte_view(data), checksum)
            parts.append(Part(position, keeper, step, generation, offset, data, checksum))
            offset += chunk.bytes
        return parts

    def _say_once(self, size: int, num_steps: int) -> None:
        if self._has_said:
            return
        self._has_said = True
        often = f"one every {num_steps} steps" if num_steps else "one whenever training pauses"
        Code.RESIDUALS_LEFT_OUT.warn(
            f"the network is idle for too short a part of a step to take a residual of {size / 2**20:.1f} "
            f"MiB, so this rank sends {often}: after the loss of its node the state is exact, and its error "
            "feedback perhaps that of an earlier step",
            rank=self._rank,
        )


class Outgoing:
    """The residuals of one rank, each of which its keepers get whole or not at all.

    The thread that trains offers one per commit, and never waits. Another thread copies it and sends its parts. A
    residual that has not begun gives way to a newer one.

    Args:
        residual: Where residuals lie.
        plan: When parts are sent.

    Attributes:
        changed: Guards what threads share; see `Spans`.
        plan: As given.
        sent_step: Newest step whose residual was sent to all keepers; -1 before the first.
    """

    def __init__(self, residual: RotatingResidual, plan: Plan) -> None:
        self.changed = plan.spans.changed
        self.plan = plan
        self.sent_step = -1
        self._residual = residual
        size = ResidualLayout(residual.layout).slot_bytes
        self._buffer = torch.empty(size, dtype=torch.uint8, device="cpu")
        self._pending: tuple[int, ResidualMark] | None = None
        #: Step of the residual that is copied or sent; -1 where there is none.
        self._step = -1
        self._generation = 0
        self._parts: deque[Part] = deque()
        self._offered_step = -1
        #: The newest step that all ranks hold, as far as was heard; that which an incarnation begins with at least.
        self._held_step: int | None = None

    # By the thread that trains.

    def hear(self, replicated_step: int) -> None:
        """Note the newest step of which all ranks hold everything; -1: recovery goes back to none of theirs."""
        with self.changed:
            held = self._offered_step if replicated_step < 0 else replicated_step
            if self._held_step is None or held > self._held_step:
                self._held_step = held
                self.changed.notify_all()

    def offer(self, step: int, mark: ResidualMark | None) -> None:
        """Send a step's residual, unless none is staged for that step; the lock is held."""
        self._offered_step = step
        if self._held_step is None:
            self._held_step = step
        if mark is None or step == 0:  # a run begins with zeros
            return
        if mark.generation == self._generation:  # no optimizer has stepped since
            if self._step < 0:
                self.sent_step = step
            return
        self._pending = step, mark

    # By the thread that sends.

    @property
    def is_under_way(self) -> bool:
        """Whether parts wait to be sent."""
        return bool(self._parts)

    def holds_back(self, step: int) -> bool:
        """Whether a step's note waits, so that who has the note has the residual; the lock is held.

        Notes wait where a residual is sent within a step or so, and for no longer.
        """
        first = self._step if self._step >= 0 else self._pending[0] if self._pending else None
        if first is None or step < first or not self.plan.fits:
            return False
        if self._step < 0 and not self._may_begin():  # it waits for news, which notes bring
            return False
        return self._offered_step - first < _MOST_STEPS_BEHIND

    def is_due(self) -> bool:
        """Whether `next_part` is to be called; the lock is held."""
        if self._parts:
            return self.plan.spans.is_open(self._parts[0].position)
        return self._may_begin()

    def _may_begin(self) -> bool:
        if self._pending is None or self._held_step is None:
            return False
        # Where nothing is replicated any more, a copy waits for a snapshot, or a rank is far behind.
        is_stuck = self._offered_step - self._held_step > _STUCK_STEPS
        return is_stuck or self._pending[0] - self._held_step <= _MOST_STEPS_AHEAD

    def next_part(self) -> Part | None:
        """Return the part to send now; None where it only copied a residual."""
        if self._parts:
            return self._parts.popleft()
        self._begin()
        return None  # the first part has a span as well

    def sent(self) -> None:
        """Note that the last part returned has been sent."""
        with self.changed:
            if not self._parts:
                self.sent_step, self._step = self._step, -1

    def _begin(self) -> None:
        with self.changed:
            assert self._pending is not None
            (self._step, mark), self._pending = self._pending, None
        parts: list[Part] = []
        if self._residual.read(mark, byte_view(self._buffer)):
            parts = self.plan.cut(self._buffer, self._step, mark.generation)
        with self.changed:
            self._parts.extend(parts)
            if parts:
                self._generation = mark.generation
            else:  # it was overwritten
                self._step = -1


class KeptResidual:
    """Residuals of a rank on another node, in slots in turn.

    Args:
        path: Their file.
        layout: Of the rank's residual.

    Raises:
        StorageError: If there is no memory for them.
    """

    def __init__(self, path: Path, layout: Layout) -> None:
        self._path, self._layout = path, layout
        self.begin_anew()

    def begin_anew(self) -> None:
        """Make the file again after it was removed.

        Raises:
            StorageError: If there is no memory for it.
        """
        self._incoming = _Incoming(ResidualSlots(self._path, self._layout, NUM_SLOTS))

    def target(self, generation: int, step: int, offset: int, length: int) -> torch.Tensor:
        """Return where a part of a residual is to be written, uint8.

        Args:
            generation: Number of the residual; the owner's.
            step: Its step.
            offset: First byte.
            length: Bytes.
        """
        return self._incoming.target(generation, step, offset, length)

    def take(self, part: torch.Tensor, checksum: int) -> None:
        """Take a part that was written; the last one makes the residual whole.

        Args:
            part: As `target` returned it.
            checksum: Of the residual up to here.

        Raises:
            RankLost: If it came otherwise than it was sent.
        """
        self._incoming.take(part, checksum)


class _Incoming:
    """The residual that is received into one of the slots."""

    def __init__(self, slots: ResidualSlots) -> None:
        self._slots = slots
        #: Step of the residual in each slot; -1 where none is whole.
        self._steps = [-1] * NUM_SLOTS
        self._slot, self._generation, self._step = 0, 0, -1
        self._size = self._checksum = 0

    def target(self, generation: int, step: int, offset: int, length: int) -> torch.Tensor:
        if offset == 0:
            self._slot = self._steps.index(min(self._steps))
            self._steps[self._slot] = -1
            self._slots.reuse(self._slot)
            self._generation, self._step = generation, step
            self._size = self._checksum = 0
        slot = self._slots.whole(self._slot)
        is_next = generation == self._generation and offset == self._size
        if not is_next or offset + length > len(slot):
            self._generation = 0  # its beginning went to a file that was removed
            return torch.empty(length, dtype=torch.uint8, device="cpu")
        return torch.from_numpy(np.frombuffer(slot[offset : offset + length], np.uint8))

    def take(self, part: torch.Tensor, checksum: int) -> None:
        if not self._generation:
            return
        self._checksum = crc32c(byte_view(part), self._checksum)
        if self._checksum != checksum:
            raise RankLost(f"a part of the residual of step {self._step} fails its checksum")
        self._size += part.nbytes
        if self._size == len(self._slots.whole(self._slot)):
            self._slots.complete_copy(self._slot, self._generation, checksum)
            self._steps[self._slot] = self._step
            self._generation = 0
