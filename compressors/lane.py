"""Where compressors with several collectives per bucket run them: one after the other, in order.

Collectives are matched by the order in which ranks start them. Those that follow another one in a
future's callback would start in whatever order the first ones happen to end, which may differ
between ranks; so a rank's buckets pass through one lane, in the order of DDP's hook, over a process
group that nothing else uses.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist

from lowdiff.compressors.collectives import chained, completed, leave, own_group, reproducible_mean
from lowdiff.compressors.exchange import HEADER_WORDS, Headers
from lowdiff.errors import LowDiffError, RankLost, UsageError
from lowdiff.types import Block


class Lane:
    """Runs one rank's exchanges in order, on a thread of its own that ends when it has none left.

    A single process has nobody to wait for, and on CUDA collectives only order streams: there a
    job runs at once, on the caller's thread.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._training_group = group
        self._group: dist.ProcessGroup | None = None
        self.rank = 0 if group is None else dist.get_rank(group)
        self.world_size = 1 if group is None else group.size()
        self._threads = torch.get_num_threads()
        self._waiting: deque[torch.futures.Future[None]] = deque()
        self._lock = threading.Lock()
        self._is_running = False
        self._has_failed = self._is_closed = False

    def submit(
        self, work: Callable[[], torch.Tensor], device: torch.device
    ) -> torch.futures.Future[torch.Tensor]:
        """Run ``work`` after everything that was submitted before; the future has its result."""
        if device.type != "cpu":
            # On the stream of the backward pass: one that a callback gets has waited for nothing.
            self._group = self._training_group
            return completed(self._work(work))
        if self.world_size == 1:
            return completed(self._work(work))
        start: torch.futures.Future[None] = torch.futures.Future()
        done = chained(start, lambda _: self._work(work), device)
        self._queue(start)
        return done

    def _work(self, work: Callable[[], torch.Tensor]) -> torch.Tensor:
        # The others have given up as well: nobody would answer.
        if self._is_closed:
            raise UsageError("gradients are exchanged after close(); attach again")
        if self._has_failed:
            raise UsageError("an earlier exchange of gradients failed; start all ranks again")
        self._has_failed = True
        try:
            result = work()
        except LowDiffError:
            raise
        except RuntimeError as error:
            raise RankLost(error) from error
        self._has_failed = False
        return result

    def _queue(self, start: torch.futures.Future[None]) -> None:
        if self._group is None:
            assert self._training_group is not None
            self._group = own_group(self._training_group)
        with self._lock:
            self._waiting.append(start)
            if not self._is_running:
                self._is_running = True
                threading.Thread(target=self._run, name="lowdiff-exchange", daemon=True).start()

    def _run(self) -> None:
        torch.set_num_threads(self._threads)  # a new thread's team may be of another size
        with torch.no_grad():
            while True:
                with self._lock:
                    if not self._waiting:
                        self._is_running = False
                        return
                    start = self._waiting.popleft()
                start.set_result(None)  # runs the job here; what it raises waits in its future

    def close(self) -> None:
        """Take no further jobs, and leave the group made for them.

        A job under way, of a backward pass that was broken off, may wait for ranks that never come:
        then the group is left to it.
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
        """Check that all ranks are at the same bucket of the same step.

        Args:
            stamp: Names incarnation and step.
            sizes: Elements of the bucket, and entries or bytes that this rank sends of it.
            headers: Where the ranks' headers are checked.
            device: Where the bucket is.

        Raises:
            UsageError: If a rank is elsewhere.
        """
        if self.world_size == 1:
            return
        header = torch.tensor([self.rank, stamp, *sizes], device="cpu")
        own = header.to(device, non_blocking=True)
        assert own.numel() == HEADER_WORDS
        for rank, head in enumerate(self.gather(own)):
            headers.check(head, [rank, stamp, *sizes])

    def gather(self, own: torch.Tensor) -> list[torch.Tensor]:
        """Everyone's tensor, in rank order; equal size and dtype on all ranks."""
        if self.world_size == 1:
            return [own]
        gathered = own.new_empty(self.world_size * own.numel())
        shares = list(gathered.chunk(self.world_size))
        dist.all_gather(shares, own, group=self._group)
        return shares

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        """Overwrite ``tensor`` by that of rank ``source``."""
        if self.world_size > 1:
            assert self._group is not None
            dist.broadcast(tensor, dist.get_global_rank(self._group, source), group=self._group)

    def mean(self, buffer: torch.Tensor) -> None:
        """Overwrite ``buffer`` by its mean over ranks; see `reproducible_mean`."""
        reproducible_mean(buffer, self._group).wait()

    def mean_of(self, tensors: Mapping[int, torch.Tensor]) -> None:
        """Overwrite several tensors of one dtype by their means over ranks."""
        joined = torch.cat([tensor.flatten() for tensor in tensors.values()])
        self.mean(joined)
        sizes = [tensor.numel() for tensor in tensors.values()]
        for tensor, own in zip(tensors.values(), joined.split(sizes), strict=True):
            tensor.copy_(own.view(tensor.shape))


def share(numel: int, rank: int, world_size: int) -> tuple[int, int]:
    """The range of ``numel`` elements that a rank answers for: first, and last exclusive."""
    return numel * rank // world_size, numel * (rank + 1) // world_size


def shares_in(block: Block, numel: int, world_size: int) -> Iterator[tuple[int, slice, slice]]:
    """The ranges of a parameter that a block touches: rank, where in its range, where in the block."""
    for rank in range(world_size):
        first, last = share(numel, rank, world_size)
        start, stop = max(first, block.start), min(last, block.stop)
        if start < stop:
            yield (
                rank,
                slice(start - first, stop - first),
                slice(start - block.start, stop - block.start),
            )
