"""A sum over ranks whose bits depend on the values alone.

A ring all-reduce adds a bucket's chunks in an order that depends on where they lie in the bucket,
and DDP rebuilds its buckets after the first iteration: with three or more ranks a resumed run would
differ. Here every element is added in rank order, whatever surrounds it, and the bytes on the wire
are those of a ring: an all-to-all gives each rank one range of everyone's elements, it adds them, and
an all-gather hands the sums round.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from lowdiff.compressors.futures import completed


def reproducible_mean(
    buffer: torch.Tensor, group: dist.ProcessGroup | None
) -> torch.futures.Future[torch.Tensor]:
    """Replace a flat tensor by its mean over ranks, added in rank order.

    Each rank's share is divided by the world size before the sum, as DDP does. Half-width values are
    added in float32 and rounded once, so that with two ranks the result equals that of an
    all-reduce in their own width. Per rank ``2 * (world_size - 1) / world_size`` of the buffer's
    bytes are sent, and as many received; scratch is one such buffer and a half.

    The two collectives follow each other, so the call returns when both are done; `Lane` keeps that
    off the training thread. On CUDA it only orders streams: the host does not wait.

    Args:
        buffer: Flat, contiguous, equal size and floating dtype on all ranks; overwritten.
        group: Process group, or None for a single process.

    Returns:
        Completed future of ``buffer``.
    """
    world_size = 1 if group is None else group.size()
    if world_size > 1 and buffer.numel():
        _mean(buffer, world_size, group)
    return completed(buffer)


def _mean(buffer: torch.Tensor, world_size: int, group: dist.ProcessGroup | None) -> None:
    size = -(-buffer.numel() // world_size)
    own = buffer.new_zeros(world_size * size)
    own[: buffer.numel()] = buffer
    own.div_(world_size)
    theirs = torch.empty_like(own)
    # Values travel as bytes: Gloo does not take every type everywhere.
    dist.all_to_all_single(theirs.view(torch.uint8), own.view(torch.uint8), group=group)
    wide = torch.float32 if buffer.element_size() == 2 else buffer.dtype
    first, *others = theirs.chunk(world_size)
    total = first.to(wide, copy=True)
    for other in others:
        total.add_(other)
    mine = total.to(buffer.dtype)
    shares = list(own.view(torch.uint8).chunk(world_size))
    dist.all_gather(shares, mine.view(torch.uint8), group=group)
    buffer.copy_(own[: buffer.numel()])
