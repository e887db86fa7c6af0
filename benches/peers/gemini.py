"""Gemini, made anew for CPUs from its paper: every step in the memory of two ranks, none on a disk.

Follows Wang et al., "GEMINI: Fast Failure Recovery in Distributed Training with In-Memory
Checkpoints", SOSP 2023, with two replicas; its authors published no code for plain PyTorch. The
state's bytes are divided evenly over the ranks. Each rank keeps its share in its own memory and
sends a copy to one other rank; a single rank has none. Unlike the paper's, chunks leave one after
the other, not in planned idle spans, which loopback lacks; nothing goes to remote storage; and all
memories are files of one machine, so a rank that restores reads other ranks' shares in place.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import accumulate, chain, cycle, pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benches.peers.arm import Place, Trained
from benches.peers.dcp import contents_of
from lowdiff.core import placement
from lowdiff.core.layout import flat

_CHUNK_BYTES = 4 << 20
_MARK_BYTES = 8
_TURNS = range(2)


class Buffer:
    """Memory for one share, in a file that outlives its process: a mark, then the share's bytes.

    The mark is the number of the step. It is 0 from before the first byte is written until after
    the last. A kill ends a process between two writes and reorders none: no checksum is needed.
    """

    def __init__(self, path: Path, share: Sequence[torch.Tensor]) -> None:
        size = _MARK_BYTES + sum(len(part) for part in share)
        memory = torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)
        self.mark, self.content = memory[:_MARK_BYTES].view(torch.int64), memory[_MARK_BYTES:]

    @contextmanager
    def written(self, step: int) -> Iterator[torch.Tensor]:
        """Give the bytes that the block writes the mark of a step; 0 if the block fails."""
        self.mark.zero_()
        yield self.content
        self.mark.fill_(step)


class Gemini:
    """A step waits for the exchange before it, copies its share, and leaves the rest to a thread.

    Two buffers take turns, so one is whole while the other is written.
    """

    def __init__(self, place: Place) -> None:
        self._place, self._rank = place, place.rank
        self._placement = placement.place(place.num_ranks, min(2, place.num_ranks))
        self._share: list[torch.Tensor] = []
        self._under_way: Future[None] | None = None

    def open(self, training: Trained) -> None:
        """See ``Arm.open``."""
        self._training = training
        self._thread = ThreadPoolExecutor(max_workers=1)
        self._group = dist.new_group(backend="gloo")

    def after_step(self, step: int) -> bool:
        """See ``Arm.after_step``."""
        self.drain()
        if not self._share:  # an optimizer may have no state until its first step
            shares = shares_of(self._training.state(), self._place.num_ranks)
            self._share = shares[self._rank]
            self._buffers = cycle([self._made(shares, turn) for turn in _TURNS])
        buffers = next(self._buffers)
        with buffers[self._rank].written(step) as memory:
            torch.cat(self._share, out=memory)
        if self._place.num_ranks > 1:
            self._under_way = self._thread.submit(self._exchange, step, buffers)
        return True

    def drain(self) -> None:
        """See ``Arm.drain``: the copy of this rank's share and the one that it keeps are whole."""
        if self._under_way is not None:
            self._under_way.result()
            self._under_way = None

    def restore(self, training: Trained) -> int:
        """See ``Arm.restore``: the newest step of which each share is whole in some memory."""
        if not training.optimizer.state:
            contents_of(training)  # makes a state, whose bytes are replaced below
        shares = shares_of(training.state(), self._place.num_ranks)
        found = [self._whole(owner, share) for owner, share in enumerate(shares)]
        step = max(set(found[0]).intersection(*found), default=0)
        if step:
            for share, whole in zip(shares, found, strict=True):
                saved = whole[step].split([len(part) for part in share])
                for live, part in zip(share, saved, strict=True):
                    live.copy_(part)
        return step

    def _made(self, shares: Sequence[Sequence[torch.Tensor]], turn: int) -> dict[int, Buffer]:
        kept, here = self._placement.held_by(self._rank), self._rank
        return {owner: Buffer(self._path(owner, here, turn), shares[owner]) for owner in kept}

    def _exchange(self, step: int, buffers: Mapping[int, Buffer]) -> None:
        (ward,) = buffers.keys() - {self._rank}
        _, keeper = self._placement.holders[self._rank]
        with buffers[ward].written(step) as memory:
            chunks = memory.split(_CHUNK_BYTES)
            coming = [dist.irecv(chunk, ward, group=self._group) for chunk in chunks]
            for chunk in buffers[self._rank].content.split(_CHUNK_BYTES):
                dist.send(chunk, keeper, group=self._group)
            for work in coming:
                assert work is not None, "every rank is in the group"
                work.wait()

    def _whole(self, owner: int, share: Sequence[torch.Tensor]) -> dict[int, torch.Tensor]:
        """Whole copies of a share by step; of equal ones its owner's, which comes last."""
        holders = reversed(self._placement.holders[owner])
        paths = [self._path(owner, holder, turn) for holder in holders for turn in _TURNS]
        buffers = [Buffer(path, share) for path in paths if path.exists()]
        return {int(one.mark): one.content for one in buffers if one.mark}

    def _path(self, owner: int, holder: int, turn: int) -> Path:
        return self._place.staging / f"share-{owner}-at-{holder}-{turn}"


def shares_of(state: Mapping[str, Any], num_ranks: int) -> list[list[torch.Tensor]]:
    """By rank, live bytes of a state: flat uint8 views of its tensors or of parts, in their order.

    Shares differ by a byte at most; states of equal models and optimizers are divided equally.
    """
    entries = state["optimizer"]["state"].values()
    values = chain(state["model"].values(), *(entry.values() for entry in entries))
    parts = [flat(one).view(torch.uint8) for one in values if isinstance(one, torch.Tensor)]
    *begins, total = accumulate(map(len, parts), initial=0)
    bounds = [total * rank // num_ranks for rank in range(num_ranks + 1)]
    return [
        [part[max(0, low - at) : max(0, high - at)] for part, at in zip(parts, begins, strict=True)]
        for low, high in pairwise(bounds)
    ]
