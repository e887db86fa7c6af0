"""One all-gather of sparse entries per bucket, summed in rank order.

The sum runs over ranks, element by element, in rank order: its bits do not depend on which
parameters share a bucket. DDP rebuilds its buckets after the first iteration and starts from the
initial ones after a restart, so anything else would make a resumed run differ.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from lowdiff.compressors.futures import chained, completed
from lowdiff.errors import RankLost, UsageError

#: Rank, stamp, elements of the bucket, entries sent of it, note.
HEADER_WORDS = 5
_HEADER_BYTES = 8 * HEADER_WORDS
_NOTE_BYTES = 8


class Notes:
    """A small number from every rank to all, on the back of a step's exchanges."""

    def __init__(self) -> None:
        self.own = 0
        self._heard: list[torch.Tensor] = []
        self._unchecked: list[tuple[torch.Tensor, list[int]]] = []

    def begin(self, own: int) -> None:
        """Start a step, in which this rank says ``own``."""
        self.own = own
        self._heard.clear()
        self._unchecked.clear()

    def hear(self, words: torch.Tensor) -> None:
        """Take in an exchange's words, int64 ``[world_size]``; they are not read before commit."""
        self._heard.append(words)

    def check(self, head: torch.Tensor, expected: list[int]) -> None:
        """See to it that a rank is where this one is; an accelerator's header is read by `heard`.

        Args:
            head: Header that came with an exchange, int64 ``[HEADER_WORDS]``.
            expected: This rank's own, with the other's rank and without the note.

        Raises:
            UsageError: If that rank is at another step, or has another bucket.
        """
        if head.is_cpu:
            check_header(head, expected)
        else:
            self._unchecked.append((head.clone(), expected))

    def heard(self) -> tuple[int, ...]:
        """What each rank said since ``begin``, bits of several exchanges together; equal on all.

        Empty if nothing was exchanged.

        Raises:
            UsageError: If a header that was put off is another than expected.
        """
        if self._unchecked:
            heads = torch.stack([head for head, _ in self._unchecked]).cpu()
            for head, (_, expected) in zip(heads, self._unchecked, strict=True):
                check_header(head, expected)
            self._unchecked.clear()
        if not self._heard:
            return ()
        said = [0] * self._heard[0].numel()
        for words in torch.stack(self._heard).tolist():
            said = [a | b for a, b in zip(said, words, strict=True)]
        return tuple(said)


def exchange(
    buffer: torch.Tensor,
    positions: torch.Tensor,
    values: torch.Tensor,
    *,
    stamp: int,
    group: dist.ProcessGroup | None,
    notes: Notes | None = None,
) -> torch.futures.Future[torch.Tensor]:
    """Replace ``buffer`` by the sum over ranks of everyone's entries.

    Args:
        buffer: Flat bucket; overwritten.
        positions: int64 ``[k]``, strictly ascending positions in ``buffer``.
        values: ``[k]``, dtype of ``buffer``; already divided by the world size.
        stamp: Must be equal on all ranks; names incarnation and step.
        group: Process group, or None for a single process.
        notes: What this rank says, and hears from all if there are several.

    Returns:
        Future of ``buffer``. Its ``wait()`` raises UsageError if a rank is at another step, and
        RankLost if the exchange failed.
    """
    world_size = 1 if group is None else group.size()
    if world_size == 1:
        buffer.zero_().index_copy_(0, positions, values)
        return completed(buffer)

    notes = Notes() if notes is None else notes
    wire = _pack(buffer, positions, values, [dist.get_rank(group), stamp], notes.own)
    gathered = torch.empty(world_size * wire.numel(), dtype=torch.uint8, device=wire.device)
    shares = list(gathered.chunk(world_size))
    work = dist.all_gather(shares, wire, group=group, async_op=True)

    def add_in_rank_order(gathering: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
        try:
            gathering.value()  # raises what made it fail
        except RuntimeError as error:
            raise RankLost(error) from error
        notes.hear(_notes(gathered, world_size))
        buffer.zero_()
        for rank, share in enumerate(shares):
            head = share[:_HEADER_BYTES].view(torch.int64)
            notes.check(head, [rank, stamp, buffer.numel(), positions.numel()])
            theirs = _unpack(share, buffer.dtype, positions.numel())
            buffer.index_add_(0, *theirs)
        return buffer

    return chained(work.get_future(), add_in_rank_order, buffer.device)


def _pack(
    buffer: torch.Tensor,
    positions: torch.Tensor,
    values: torch.Tensor,
    origin: list[int],
    note: int,
) -> torch.Tensor:
    """``[header int64 x 5 | positions int32 padded to 8 | values]`` as bytes."""
    index_bytes = _index_bytes(positions.numel())
    total = _HEADER_BYTES + index_bytes + values.numel() * values.element_size()
    total += -total % 8  # every rank's share stays aligned inside the gathered tensor
    wire = torch.zeros(total, dtype=torch.uint8, device=buffer.device)
    words = [*origin, buffer.numel(), positions.numel(), note]
    header = torch.tensor(words, device="cpu")
    wire[:_HEADER_BYTES].view(torch.int64).copy_(header, non_blocking=True)
    indices, entries = _unpack(wire, values.dtype, positions.numel())
    indices.copy_(positions)
    entries.copy_(values)
    return wire


def _unpack(share: torch.Tensor, dtype: torch.dtype, count: int) -> tuple[torch.Tensor, ...]:
    start = _HEADER_BYTES + _index_bytes(count)
    indices = share[_HEADER_BYTES : _HEADER_BYTES + 4 * count].view(torch.int32)
    values = share[start : start + count * dtype.itemsize].view(dtype)
    return indices, values


def _notes(gathered: torch.Tensor, world_size: int) -> torch.Tensor:
    """Last word of every rank's header, copied: the exchange itself is soon freed."""
    words = gathered.view(world_size, -1)[:, _HEADER_BYTES - _NOTE_BYTES : _HEADER_BYTES]
    return words.contiguous().view(torch.int64).flatten()


def _index_bytes(count: int) -> int:
    return 4 * count + (4 * count) % 8


def check_header(head: torch.Tensor, expected: list[int]) -> None:
    """Compare a rank's header, int64 ``[HEADER_WORDS]``, with this rank's own but for the note.

    Raises:
        UsageError: If that rank is at another step, or has another bucket.
    """
    found = head[:-1].tolist()
    rank, stamp, *counts = expected
    if found[:2] != [rank, stamp]:
        raise UsageError(
            f"rank {rank} sent gradients of {_where(found[1])} while this rank is in "
            f"{_where(stamp)}; every rank must attach to the same run and commit the same steps"
        )
    if found[2:] != counts:
        raise UsageError(
            f"rank {rank} sent {found[3]} entries of {found[2]} elements where this rank has "
            f"{counts[1]} of {counts[0]}; give every rank the same model and compressor"
        )


def _where(stamp: int) -> str:
    return f"step {stamp & 0xFFFFFFFFFF} of incarnation {stamp >> 40}"
