"""A queue that runs the collectives of one rank's buckets one after the other, in DDP's order.

Ranks match collectives by the order in which they start them. A second collective that starts in
the callback of a first one would start whenever the first happens to end, and this order may differ
between ranks. A rank's buckets therefore pass through one lane, in the order in which DDP calls the
hook, over a process group that nothing else uses.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from lowdiff.compressors.collectives import chained, completed, leave, own_group, reproducible_mean
from lowdiff.compressors.exchange import HEADER_WORDS, Headers
from lowdiff.core import devices
from lowdiff.errors import LowDiffError, RankLost, UsageError
from lowdiff.types import Block


class Lane:
    """Runs one rank's exchanges in order, on its own thread; the thread ends when no job is left.

    A single process does not wait for others, and on CUDA a collective only orders streams. In both
    cases a job runs at once, on the caller's thread.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._training_group = group
        # A rank that hangs in the exchange is one that hangs in training. Made at once, with all ranks: one that
        # dies before its first exchange would leave the others waiting for it to join.
        self._group = None if group is None else own_group(group, at_least=timedelta(0))
        self.rank = 0 if group is None else dist.get_rank(group)
        self.world_size = 1 if group is None else group.size()
        self._threads = torch.get_num_threads()
        self._waiting: deque[torch.futures.Future[None]] = deque()
        self._lock = threading.Lock()
        self._is_running = False
        self._has_failed = self._is_closed = False
        self._check: Callable[[], None] | None = None

    def submit(
        self, work: Callable[[], torch.Tensor], device: torch.device
    ) -> torch.futures.Future[torch.Tensor]:
        """Run ``work`` after every job submitted before; the returned future gets its result."""
        if not devices.may_look(device):
            # Run on the stream of the backward pass: a callback's own stream has waited for
            # nothing.
            self._group = self._training_group
            return completed(self._work(work))
        if self.world_size == 1:
            return completed(self._work(work))
        start: torch.futures.Future[None] = torch.futures.Future()
        done = chained(start, lambda _: self._work(work), device)
        self._queue(start)
        return done

    def _work(self, work: Callable[[], torch.Tensor]) -> torch.Tensor:
        # The other ranks have given up as well, so nobody would answer this exchange.
        if self._is_closed:
            raise UsageError("gradients are exchanged after close(); attach again")
        if self._has_failed:
            raise UsageError("an earlier exchange of gradients failed; start all ranks again")
        # Alone, an interrupted job (Ctrl-C in a notebook) has left nobody else behind: the next one goes on.
        self._has_failed = self.world_size > 1
        try:
            result = work()
            self._check_heads()
        except LowDiffError:
            raise
        except RuntimeError as error:
            raise RankLost(error) from error
        self._has_failed = False
        return result

    def _queue(self, start: torch.futures.Future[None]) -> None:
        with self._lock:
            self._waiting.append(start)
            if not self._is_running:
                self._is_running = True
                threading.Thread(target=self._run, name="lowdiff-exchange", daemon=True).start()

    def _run(self) -> None:
        torch.set_num_threads(self._threads)  # a new thread may start with another number
        with torch.no_grad():
            while True:
                with self._lock:
                    if not self._waiting:
                        self._is_running = False
                        return
                    start = self._waiting.popleft()
                start.set_result(None)  # runs the job here; its future keeps an exception

    def close(self) -> None:
        """Take no further jobs, and leave the lane's process group.

        If a job is still running, of a backward pass that was broken off, it may wait for ranks
        that never come; the process group then stays open for that job.
        """
        with self._lock:
            self._is_closed = True
            is_idle = not self._is_running
        if is_idle and self._group is not self._training_group:
            leave(self._group)
            self._group = None

    # For jobs

    def greet(
        self, stamp: int, sizes: Sequence[int], headers: Headers, device: torch.device
    ) -> None:
        """Have it checked that all ranks are at the same bucket of the same step.

        The headers travel while this rank prepares what it sends; the check comes before anything else is
        exchanged, which raises UsageError if a rank is at another bucket or step.

        Args:
            stamp: Number that names incarnation and step.
            sizes: Elements of the bucket, and entries or bytes that this rank sends of the bucket.
            headers: Checker of the ranks' headers.
            device: Device of the bucket.
        """
        if self.world_size == 1:
            return
        header = torch.tensor([self.rank, stamp, *sizes], device="cpu")
        own = header.to(device, non_blocking=True)
        assert own.numel() == HEADER_WORDS
        heads, travelling = self._gathering(own)

        def check() -> None:
            travelling.wait()
            expected = [[rank, stamp, *sizes] for rank in range(len(heads))]
            headers.check(torch.stack(list(heads)), expected)

        self._check = check

    def _check_heads(self) -> None:
        if self._check is not None:
            check, self._check = self._check, None
            check()

    def gather(self, own: torch.Tensor) -> list[torch.Tensor]:
        """Return every rank's tensor, in rank order; size and dtype must be equal on all ranks."""
        self._check_heads()
        if self.world_size == 1:
            return [own]
        shares, travelling = self._gathering(own)
        travelling.wait()
        return shares

    def _gathering(self, own: torch.Tensor) -> tuple[list[torch.Tensor], dist.Work]:
        """Return where every rank's tensor will be, and what to wait for."""
        gathered = own.new_empty(self.world_size * own.numel())
        shares = list(gathered.chunk(self.world_size))
        work = dist.all_gather(shares, own, group=self._group, async_op=True)
        assert work is not None
        return shares, work

    def gather_each(self, tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
        """Return every rank's flat tensors, in rank order, gathered at once.

        Args:
            tensors: Of any dtypes; sizes and dtypes must be equal on all ranks.
        """
        sizes = [tensor.nbytes for tensor in tensors]
        shares = self.gather(torch.cat([tensor.view(torch.uint8) for tensor in tensors]))
        # Copies, because numbers may be unaligned in what all ranks sent.
        return [
            [
                part.clone().view(tensor.dtype)
                for part, tensor in zip(share.split(sizes), tensors, strict=True)
            ]
            for share in shares
        ]

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        """Overwrite ``tensor`` with the tensor of rank ``source``."""
        self._check_heads()
        if self.world_size > 1:
            assert self._group is not None
            dist.broadcast(tensor, dist.get_global_rank(self._group, source), group=self._group)

    def mean(self, buffer: torch.Tensor) -> None:
        """Overwrite ``buffer`` with its mean over ranks; see `reproducible_mean`."""
        self._check_heads()
        reproducible_mean(buffer, self._group).wait()

    def mean_of(self, tensors: Mapping[int, torch.Tensor]) -> None:
        """Overwrite several tensors with their means over ranks; one exchange for each dtype."""
        if self.world_size == 1:
            return
        of_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
        for tensor in tensors.values():
            of_dtype.setdefault(tensor.dtype, []).append(tensor)
        for own in of_dtype.values():
            joined = torch.cat([tensor.flatten() for tensor in own])
            self.mean(joined)
            means = joined.split([tensor.numel() for tensor in own])
            shaped = [mean.view(t.shape) for t, mean in zip(own, means, strict=True)]
            torch._foreach_copy_(own, shaped)


def share(numel: int, rank: int, world_size: int) -> tuple[int, int]:
    """Return a rank's share of ``numel`` elements: first, and last exclusive."""
    return numel * rank // world_size, numel * (rank + 1) // world_size


def shares_in(block: Block, numel: int, world_size: int) -> Iterator[tuple[int, slice, slice]]:
    """Yield the shares that a block touches: rank, range in the share, range in the block."""
    for rank in range(world_size):
        first, last = share(numel, rank, world_size)
        start, stop = max(first, block.start), min(last, block.stop)
        if start < stop:
            yield (
                rank,
                slice(start - first, stop - first),
                slice(start - block.start, stop - block.start),
            )
