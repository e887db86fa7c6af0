"""One all-gather of sparse entries per bucket, summed in rank order.

The sum runs over ranks, element by element, in rank order, so its bits do not depend on which
parameters share a bucket. DDP rebuilds its buckets after the first iteration and starts with the
initial ones after a restart; a sum that depends on the buckets would make a resumed run differ.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from lowdiff.compressors.collectives import chained, completed
from lowdiff.compressors.settings import refuse_large
from lowdiff.core import devices
from lowdiff.errors import RankLost, UsageError

#: Words of a header: rank, stamp, elements of the bucket, entries sent of the bucket.
HEADER_WORDS = 4
HEADER_BYTES = 8 * HEADER_WORDS
_STEP_BITS = 40
#: What has 31 bits for positions.
_BUCKET = "a bucket of gradients (DistributedDataParallel's bucket_cap_mb)"


def stamp_of(incarnation: int, step: int) -> int:
    """Return one number that identifies a step of an incarnation."""
    return incarnation << _STEP_BITS | step


def step_of(stamp: int) -> int:
    """Return the step that a stamp names."""
    return stamp & (1 << _STEP_BITS) - 1


def incarnation_of(stamp: int) -> int:
    """Return the incarnation that a stamp names."""
    return stamp >> _STEP_BITS


class Headers:
    """Checks that every rank was at the same bucket of the same step.

    `depart` reads headers on an accelerator later, so that no exchange waits for the host.
    """

    def __init__(self) -> None:
        self._unread: list[tuple[torch.Tensor, list[list[int]]]] = []

    def begin(self) -> None:
        """Forget the last step's headers."""
        self._unread.clear()

    def check(self, heads: torch.Tensor, expected: list[list[int]]) -> None:
        """Compare ranks' headers with what this rank expects.

        Args:
            heads: Of all ranks, int64 ``[ranks, HEADER_WORDS]``, or its bytes.
            expected: This rank's own header, with each rank's number.

        Raises:
            UsageError: If a rank is at another step, or has another bucket.
        """
        words = heads.clone(memory_format=torch.contiguous_format).view(torch.int64)
        if devices.may_look(words):
            for head, own in zip(words, expected, strict=True):
                check_header(head, own)
        else:
            self._unread.append((words, expected))

    def depart(self) -> DepartedHeaders:
        """Begin to read the headers that were left on an accelerator."""
        return DepartedHeaders(self._unread)

    def confirm(self) -> None:
        """Check the headers that were left on an accelerator; waits for them.

        Raises:
            UsageError: If a rank was at another step, or had another bucket.
        """
        self.depart().confirm()


class DepartedHeaders:
    """Headers of one step on their way to the host.

    Args:
        unread: Those of an exchange, and what was expected, row by row.
    """

    def __init__(self, unread: Sequence[tuple[torch.Tensor, list[list[int]]]]) -> None:
        self._fetch = devices.fetch([heads.flatten() for heads, _ in unread])
        self._expected = [expected for _, expected in unread]

    def confirm(self) -> None:
        """See `Headers.confirm`."""
        for heads, expected in zip(self._fetch.arrived(), self._expected, strict=True):
            for head, own in zip(heads.view(-1, HEADER_WORDS), expected, strict=True):
                check_header(head, own)


@dataclass(frozen=True, slots=True, eq=False)
class Wire:
    """One rank's entries of a bucket as they are sent: ``[header int64 x 4 | positions, padded to 8 | values]``.

    Values in few bits are sent otherwise; see `lowdiff.compressors.flat.bins`.

    Attributes:
        data: uint8; as many on all ranks.
        head: int64 ``[HEADER_WORDS]``.
        positions: int32 ``[k]``.
        values: ``[k]``.
    """

    data: torch.Tensor
    head: torch.Tensor
    positions: torch.Tensor
    values: torch.Tensor

    @classmethod
    def empty(cls, count: int, dtype: torch.dtype, device: torch.device) -> Wire:
        """Make one for so many entries, to be filled."""
        size = HEADER_BYTES + _index_bytes(count) + count * dtype.itemsize
        size += -size % 8  # keeps every rank's part aligned inside the gathered tensor
        return cls.view(torch.empty(size, dtype=torch.uint8, device=device), dtype, count)

    @classmethod
    def view(cls, data: torch.Tensor, dtype: torch.dtype, count: int) -> Wire:
        """Look at what a rank sent."""
        start = HEADER_BYTES + _index_bytes(count)
        return cls(
            data,
            data[:HEADER_BYTES].view(torch.int64),
            data[HEADER_BYTES : HEADER_BYTES + 4 * count].view(torch.int32),
            data[start : start + count * dtype.itemsize].view(dtype),
        )


def exchange(
    buffer: torch.Tensor,
    positions: torch.Tensor,
    values: torch.Tensor,
    *,
    stamp: int,
    group: dist.ProcessGroup | None,
    headers: Headers | None = None,
    seen: list[torch.Tensor] | None = None,
) -> torch.futures.Future[torch.Tensor]:
    """Replace ``buffer`` by the sum over ranks of everyone's entries.

    Args:
        buffer: Flat bucket; overwritten.
        positions: int64 ``[k]``, strictly ascending positions in ``buffer``. ``k`` must be equal on all
            ranks, as `SparseSettings.kept` makes it: another count ends the process inside the backend.
        values: ``[k]``, dtype of ``buffer``; already divided by the world size.
        stamp: Must be equal on all ranks; names incarnation and step.
        group: Process group, or None for a single process.
        headers: Checker of the ranks' headers.
        seen: List that receives every rank's positions (int32, ascending) once they have arrived.

    Returns:
        Future of ``buffer``. Its ``wait()`` raises UsageError if a rank is at another step, and
        RankLost if the exchange failed.

    Raises:
        UnsupportedModel: If the bucket has more elements than 31 bits number.
    """
    if group is None or group.size() == 1:
        return completed(assigned(buffer.zero_(), positions, values, seen))
    wire = Wire.empty(positions.numel(), values.dtype, buffer.device)
    wire.positions.copy_(positions)
    wire.values.copy_(values)
    return gather(buffer, wire, stamp=stamp, group=group, headers=headers, seen=seen)


def assigned(
    buffer: torch.Tensor,
    positions: torch.Tensor,
    values: torch.Tensor,
    seen: list[torch.Tensor] | None,
) -> torch.Tensor:
    """Return a buffer of zeros with a single process's entries; for arguments see `exchange`."""
    refuse_large(_BUCKET, buffer.numel())
    buffer.index_copy_(0, positions.long(), values)
    if seen is not None:
        seen.append(positions.int())
    return buffer


def gather(
    buffer: torch.Tensor,
    wire: Wire,
    *,
    stamp: int,
    group: dist.ProcessGroup,
    headers: Headers | None = None,
    seen: list[torch.Tensor] | None = None,
    is_clear: bool = False,
    view: Callable[[torch.Tensor], Wire] | None = None,
) -> torch.futures.Future[torch.Tensor]:
    """Do what `exchange` does with entries that several ranks send.

    Args:
        buffer: Flat bucket; overwritten.
        wire: This rank's entries; its header is filled here.
        stamp: See `exchange`.
        group: Likewise.
        headers: Likewise.
        seen: Likewise.
        is_clear: Whether ``buffer`` is all zeros already.
        view: Looks at what a rank sent, where that is no plain `Wire`.
    """
    refuse_large(_BUCKET, buffer.numel())
    headers = Headers() if headers is None else headers
    world_size, count = group.size(), wire.positions.numel()
    head = [dist.get_rank(group), stamp, buffer.numel(), count]
    wire.head.copy_(torch.tensor(head, device="cpu"), non_blocking=True)
    size = wire.data.numel()
    gathered = torch.empty(world_size * size, dtype=torch.uint8, device=buffer.device)
    shares = list(gathered.chunk(world_size))
    work = dist.all_gather(shares, wire.data, group=group, async_op=True)

    def add_in_rank_order(gathering: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
        try:
            gathering.value()  # raises the exception that made the all-gather fail
        except RuntimeError as error:
            raise RankLost(error) from error
        if not is_clear:
            buffer.zero_()
        heads = gathered.view(world_size, size)[:, :HEADER_BYTES]
        headers.check(heads, [[rank, *head[1:]] for rank in range(world_size)])
        for share in shares:
            sent = Wire.view(share, buffer.dtype, count) if view is None else view(share)
            buffer.index_add_(0, sent.positions, sent.values)
            if seen is not None:
                seen.append(sent.positions)
        return buffer

    return chained(work.get_future(), add_in_rank_order, buffer.device)


def _index_bytes(count: int) -> int:
    return 4 * count + (4 * count) % 8


def check_header(head: torch.Tensor, expected: list[int]) -> None:
    """Compare a rank's header, int64 ``[HEADER_WORDS]``, with the expected one.

    Raises:
        UsageError: If that rank is at another step, or has another bucket.
    """
    found = head.tolist()
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
    return f"step {step_of(stamp)} of incarnation {incarnation_of(stamp)}"
