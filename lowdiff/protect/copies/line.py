"""Messages between ranks on different nodes beside the training, from threads of their own.

Notes are small: a step's numbers and the items that changed. They leave when a step is committed, between the
last gradient of a step and the first of the next. Gradients and images of shards follow them, where nobody on another
node holds these. Parts of a residual are large, and leave when no gradients are exchanged. Gloo carries all of it, on a
group that nothing else uses.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, fields
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from crc32c import crc32c

from lowdiff.core.memory import array_of, byte_view
from lowdiff.errors import RankLost
from lowdiff.protect.copies.residuals import Outgoing, Part
from lowdiff.types import ResidualMark

#: At most so much is sent at a time.
CHUNK_BYTES = 16 << 20
#: Length of the message that ends a line.
_END = -1
#: Stands for the generation in the head of an image.
_IMAGE = -1
#: Messages that wait while training goes on: each may carry a gradient.
_MOST_QUEUED = 2
#: Of Gloo: a rank ended, or the group is gone.
_ENDED = (RuntimeError, ValueError)
_CLOSE_SECONDS = 5.0
_LOOK_SECONDS = 0.002
#: A part waits for a span, and for one that lasts so long that training must be pausing.
_LOOK_FOR_SPAN_SECONDS = 0.02


@dataclass(frozen=True, slots=True)
class Head:
    """What goes before a message.

    Attributes:
        length: Bytes of the message.
        checksum: CRC-32C of it; of a part: of the residual up to the end of the part.
        generation: Of the residual that it is a part of; 0 for a note, -1 for an image.
        offset: Of a part in its residual.
        step: Of the residual or of the image.
    """

    length: int
    checksum: int
    generation: int = 0
    offset: int = 0
    step: int = 0

    @property
    def is_image(self) -> bool:
        """Whether an image of a rank's share of a snapshot follows."""
        return self.generation == _IMAGE


_NUM_FIELDS = len(fields(Head))


@dataclass(slots=True)
class _Message:
    """A note with what follows it, or an image."""

    step: int
    head: Head
    bodies: Sequence[torch.Tensor]
    is_sent: bool = False


class Sender:
    """Sends messages to other ranks; the caller never waits.

    Args:
        group: The group that carries them.
        targets: Ranks that get every message.
        outgoing: This rank's residuals; None if they are not sent.

    Attributes:
        bytes_sent: So far, to all targets together.
        error: Why nothing is sent any more; empty while all is well.
    """

    def __init__(
        self, group: dist.ProcessGroup, targets: Sequence[int], outgoing: Outgoing | None = None
    ) -> None:
        self.bytes_sent = 0
        self.error = ""
        self._group = group
        self._targets = [dist.get_global_rank(group, target) for target in targets]
        self._outgoing = outgoing
        self._changed = threading.Condition() if outgoing is None else outgoing.changed
        self._messages: deque[_Message] = deque()
        self._is_over = self._has_ended = False
        self._thread = threading.Thread(target=self._run, name="lowdiff-sender", daemon=True)
        self._thread.start()

    def send(
        self,
        message: bytes,
        step: int = 0,
        mark: ResidualMark | None = None,
        behind: Sequence[np.ndarray[Any, Any]] = (),
    ) -> None:
        """Send a note to every target, after those before.

        Args:
            message: The note.
            step: The step that it is about.
            mark: Names the residual of the step, if that is to be sent as well.
            behind: Arrays whose bytes follow the note. Nobody writes them any more. With any, the caller waits
                while the line lags by more than two messages.
        """
        head = Head(len(message), crc32c(message))
        note = torch.frombuffer(bytearray(message), dtype=torch.uint8)
        with self._changed:
            if behind:
                self._wait_until(lambda: len(self._messages) < _MOST_QUEUED)
            self._messages.append(_Message(step, head, [note, *map(bytes_of, behind)]))
            if self._outgoing is not None:
                self._outgoing.offer(step, mark)
            self._changed.notify_all()

    def send_image(self, image: memoryview, step: int, checksum: int) -> None:
        """Send an image of this rank's share to every target, and wait until they have it.

        Args:
            image: All of it. It may be written again when this returns.
            step: Its step.
            checksum: Its CRC-32C.
        """
        head = Head(image.nbytes, checksum, _IMAGE, step=step)
        body = torch.frombuffer(image, dtype=torch.uint8)
        with self._changed:
            message = _Message(step, head, [body])
            self._messages.append(message)
            self._changed.notify_all()
            self._wait_until(lambda: message.is_sent)

    def _wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait, unless nothing is sent any more; the lock is held."""
        self._changed.wait_for(lambda: condition() or self._has_ended)

    def close(self) -> None:
        """Tell the targets that nothing follows; waits a little for the notes that are under way."""
        if self._thread.is_alive():
            with self._changed:
                self._is_over = True
                self._changed.notify_all()
            self._thread.join(_CLOSE_SECONDS)

    def _run(self) -> None:
        try:
            while (task := self._next()) is not None:
                if isinstance(task, _Message):
                    self._send_message(task)
                elif (part := task.next_part()) is not None:
                    self._send_part(part, task)
            self._put(_tensor(Head(_END, 0)), self._targets)
        except _ENDED as error:  # a target ended; the training's own exchange will say so
            self.error = str(error)
        finally:
            with self._changed:
                self._has_ended = True
                self._changed.notify_all()

    def _next(self) -> _Message | Outgoing | None:
        """Wait for what comes next: a message, or a part of a residual; None once nothing follows."""
        outgoing = self._outgoing
        with self._changed:
            while True:
                if self._messages:
                    step = self._messages[0].step
                    if self._is_over or outgoing is None or not outgoing.holds_back(step):
                        return self._messages.popleft()
                if self._is_over:
                    return None
                if outgoing is not None and outgoing.is_due():
                    return outgoing
                is_waiting = outgoing is not None and outgoing.is_under_way
                self._changed.wait(_LOOK_FOR_SPAN_SECONDS if is_waiting else None)

    def _send_message(self, message: _Message) -> None:
        began = time.monotonic()
        self._put(_tensor(message.head), self._targets)
        for body in message.bodies:
            self._put(body, self._targets)
        with self._changed:
            message.is_sent = True
            self._changed.notify_all()
        if self._outgoing is not None:
            self._outgoing.plan.measured(message.head.length, time.monotonic() - began)

    def _send_part(self, part: Part, outgoing: Outgoing) -> None:
        began = time.monotonic()
        head = Head(part.data.nbytes, part.checksum, part.generation, part.offset, part.step)
        target = [self._targets[part.keeper]]
        self._put(_tensor(head), target)
        self._put(part.data, target)
        outgoing.plan.measured(part.data.nbytes, time.monotonic() - began)
        outgoing.sent()

    def _put(self, data: torch.Tensor, targets: Sequence[int]) -> None:
        for chunk in _chunks(data):
            under_way = [dist.isend(chunk, target, group=self._group) for target in targets]
            for work in under_way:
                assert work is not None
                work.wait()
            self.bytes_sent += chunk.nbytes * len(targets)


class Receiver:
    """Receives the messages of one rank; for one thread.

    It does not wait inside Gloo for a message that may never come: a thread that wakes up in there while the
    interpreter ends aborts the process.
    """

    def __init__(self, group: dist.ProcessGroup, source: int) -> None:
        self._group = group
        self._rank = source
        self._source = dist.get_global_rank(group, source)
        self._is_over = False

    def close(self) -> None:
        """Receive no more; for any thread."""
        self._is_over = True

    def head(self) -> Head | None:
        """Wait for the next message, which `note` or `part` then takes; None once nothing follows.

        Raises:
            RankLost: If the rank ended.
        """
        try:
            numbers = torch.zeros(_NUM_FIELDS, dtype=torch.int64, device="cpu")
            work = dist.irecv(numbers, self._source, group=self._group)
            assert work is not None
            length = array_of(numbers)
            while length[0] == 0:
                if self._is_over:
                    return None
                time.sleep(_LOOK_SECONDS)
            work.wait()
        except _ENDED as error:
            raise RankLost(error) from error
        head = Head(*map(int, numbers))
        return None if head.length == _END else head

    def note(self, head: Head) -> bytes:
        """Return a note.

        Raises:
            RankLost: If the rank ended, or the note came otherwise than it was sent.
        """
        body = torch.empty(head.length, dtype=torch.uint8, device="cpu")
        self.part(body)
        message = bytes(byte_view(body))
        if crc32c(message) != head.checksum:
            raise RankLost(f"a message of rank {self._rank} fails its checksum")
        return message

    def part(self, target: torch.Tensor) -> None:
        """Write what follows into memory of its length.

        Raises:
            RankLost: If the rank ended.
        """
        try:
            for chunk in _chunks(target):
                work = dist.irecv(chunk, self._source, group=self._group)
                assert work is not None
                work.wait()
        except _ENDED as error:
            raise RankLost(error) from error


def bytes_of(array: np.ndarray[Any, Any]) -> torch.Tensor:
    """Return the memory of a contiguous array, uint8."""
    return torch.from_numpy(array.reshape(-1).view(np.uint8))


def _chunks(data: torch.Tensor) -> Sequence[torch.Tensor]:
    """Divide what is sent; a head is short, whatever its dtype."""
    return data.split(CHUNK_BYTES) if data.numel() else ()


def _tensor(head: Head) -> torch.Tensor:
    return torch.tensor(astuple(head), dtype=torch.int64, device="cpu")
