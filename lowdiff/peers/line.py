"""Messages between ranks on different nodes beside the training, from threads of their own.

Messages are small: a step's numbers and the items that changed. They leave when a step is committed, between the
last gradient of a step and the first of the next. Gloo carries them, on a group that nothing else uses.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist
from crc32c import crc32c

from lowdiff.errors import RankLost

_CHUNK_BYTES = 16 << 20
#: Length of the message that ends a line.
_END = -1
_CLOSE_SECONDS = 5.0
_LOOK_SECONDS = 0.002


class Sender:
    """Sends messages to other ranks, in turn; the caller never waits.

    Args:
        group: The group that carries them.
        targets: Ranks that get every message.

    Attributes:
        bytes_sent: So far, to all targets together.
        error: Why nothing is sent any more; empty while all is well.
    """

    def __init__(self, group: dist.ProcessGroup, targets: Sequence[int]) -> None:
        self.bytes_sent = 0
        self.error = ""
        self._group = group
        self._targets = [dist.get_global_rank(group, target) for target in targets]
        self._messages: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="lowdiff-sender", daemon=True)
        self._thread.start()

    def send(self, message: bytes) -> None:
        """Send a message to every target, after those before."""
        self._messages.put(message)

    def close(self) -> None:
        """Tell the targets that nothing follows; waits a little for what is under way."""
        if self._thread.is_alive():
            self._messages.put(None)
            self._thread.join(_CLOSE_SECONDS)

    def _run(self) -> None:
        try:
            while (message := self._messages.get()) is not None:
                self._send(message)
            self._put(torch.tensor([_END, 0], device="cpu"))
        except RuntimeError as error:  # a target ended; the training's own exchange will say so
            self.error = str(error)

    def _send(self, message: bytes) -> None:
        head = torch.tensor([len(message), crc32c(message)], device="cpu")
        self._put(head)
        body = torch.frombuffer(bytearray(message), dtype=torch.uint8)
        for chunk in body.split(_CHUNK_BYTES):
            self._put(chunk)

    def _put(self, data: torch.Tensor) -> None:
        under_way = [dist.isend(data, target, group=self._group) for target in self._targets]
        for work in under_way:
            assert work is not None
            work.wait()
        self.bytes_sent += data.nbytes * len(self._targets)


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

    def receive(self) -> bytes | None:
        """Wait for the next message; None once nothing follows.

        Raises:
            RankLost: If the rank ended, or a message came otherwise than it was sent.
        """
        try:
            head = torch.zeros(2, dtype=torch.int64, device="cpu")
            work = dist.irecv(head, self._source, group=self._group)
            assert work is not None
            length = head.numpy()
            while length[0] == 0:
                if self._is_over:
                    return None
                time.sleep(_LOOK_SECONDS)
            work.wait()
            size, checksum = map(int, head)
            if size == _END:
                return None
            body = torch.empty(size, dtype=torch.uint8, device="cpu")
            for chunk in body.split(_CHUNK_BYTES):
                self._get(chunk)
        except RuntimeError as error:
            raise RankLost(error) from error
        message = body.numpy().tobytes()
        if crc32c(message) != checksum:
            raise RankLost(f"a message of rank {self._rank} fails its checksum")
        return message

    def _get(self, target: torch.Tensor) -> torch.Tensor:
        work = dist.irecv(target, self._source, group=self._group)
        assert work is not None
        work.wait()
        return target
