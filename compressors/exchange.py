"""One all-gather of sparse entries per bucket, summed in rank order.

The sum runs over ranks, element by element, in rank order, so its bits do not depend on which
parameters share a bucket. DDP rebuilds its buckets after the first iteration and starts with the
initial ones after a restart; a sum that depends on the buckets would make a resumed run differ.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from lowdiff.compressors.collectives import chained, completed
from lowdiff.compressors.settings import refuse_large
from lowdiff.core import devices
from lowdiff.errors import RankLost, UsageError

#: Words of a header: rank, stamp, elements of the bucket, entries sent of the bucket.
HEADER_WORDS = 4
_HEADER_BYTES = 8 * HEADER_WORDS
_STEP_BITS = 40


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

    `confirm` reads headers on an accelerator later, so that no exchange waits for the host.
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
        words = heads.contiguous().view(torch.int64)
        if devices.may_look(words):
            for head, own in zip(words, expected, strict=True):
                check_header(head, own)
        else:
            self._unread.append((words, expected))

    def confirm(self) -> None:
        """Check the headers that were left on an accelerator.

        Raises:
            UsageError: If a rank was at another step, or had another bucket.
        """
        if self._unread:
            heads = torch.cat([heads for heads, _ in self._unread]).cpu()
            expected = [own for _, all_expected in self._unread for own in all_expected]
            for head, own in zip(heads, expected, strict=True):
                check_header(head, own)
            self._unread.clear()


def exchange(
    buffer: torch.Tensor,
    positions: torch.Tensor,
    values: torch.Tensor,
    *,
    stamp: int,
    group: dist.ProcessGroup | None,
    headers: Headers | None = None,
    seen: list[torch.Tensor] | None = None,
    is_clear: bool = False,
) -> torch.futures.Future[torch.Tensor]:
    """Replace ``buffer`` by the sum over ranks of everyone's entries.

    Args:
        buffer: Flat bucket; overwritten.
        positions: int64 or int32 ``[k]``, strictly ascending positions in ``buffer``. ``k`` must be equal on all
            ranks, as `SparseSettings.kept` makes it: another count ends the process inside the backend.
        values: ``[k]``, dtype of ``buffer``; already divided by the world size.
        stamp: Must be equal on all ranks; names incarnation and step.
        group: Process group, or None for a single process.
        headers: Checker of the ranks' headers.
        seen: List that receives every rank's positions (int32, ascending) once they have arrived.
        is_clear: Whether ``buffer`` is all zeros.

    Returns:
        Future of ``buffer``. Its ``wait()`` raises UsageError if a rank is at another step, and
        RankLost if the exchange failed.

    Raises:
        UnsupportedModel: If the bucket has more elements than 31 bits number.
    """
    refuse_large("a bucket of gradients (DistributedDataParallel's bucket_cap_mb)", buffer.numel())
    world_size = 1 if group is None else group.size()
    if world_size == 1:
        (buffer if is_clear else buffer.zero_()).index_copy_(0, positions.long(), values)
        if seen is not None:
            seen.append(positions.int())
        return completed(buffer)

    headers = Headers() if headers is None else headers
    wire = _pack(buffer, positions, values, [dist.get_rank(group), stamp])
    gathered = torch.empty(world_size * wire.numel(), dtype=torch.uint8, device=wire.device)
    shares = list(gathered.chunk(world_size))
    work = dist.all_gather(shares, wire, group=group, async_op=True)

    def add_in_rank_order(gathering: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
        try:
            gathering.value()  # raises the exception that made the all-gather fail
        except RuntimeError as error:
            raise RankLost(error) from error
        if not is_clear:
            buffer.zero_()
        sizes = buffer.numel(), positions.numel()
        heads = gathered.view(world_size, -1)[:, :_HEADER_BYTES]
        headers.check(heads, [[rank, stamp, *sizes] for rank in range(world_size)])
        for share in shares:
            indices, entries = _unpack(share, buffer.dtype, positions.numel())
            buffer.index_add_(0, indices, entries)
            if seen is not None:
                seen.append(indices)
        return buffer

    return chained(work.get_future(), add_in_rank_order, buffer.device)


def _pack(
    buffer: torch.Tensor,
    positions: torch.Tensor,
    values: torch.Tensor,
    origin: list[int],
) -> torch.Tensor:
    """Return ``[header int64 x 4 | positions int32 padded to 8 | values]`` as bytes."""
    index_bytes = _index_bytes(positions.numel())
    total = _HEADER_BYTES + index_bytes + values.numel() * values.element_size()
    total += -total % 8  # keeps every rank's part aligned inside the gathered tensor
    wire = torch.zeros(total, dtype=torch.uint8, device=buffer.device)
    header = torch.tensor([*origin, buffer.numel(), positions.numel()], device="cpu")
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
