"""Parts of an exchange: futures of buffers, a mean in rank order, process groups of lowdiff's own.

A ring all-reduce adds a bucket's chunks in an order that depends on their place in the bucket, and
DDP rebuilds its buckets after the first iteration. With three or more ranks, a resumed run would
therefore differ. `reproducible_mean` adds every element in rank order, whatever shares its bucket,
and sends as many bytes as a ring: an all-to-all gives each rank one range of everyone's elements,
the rank adds them, and an all-gather distributes the sums. Two ranks gather a short buffer whole.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from lowdiff.core import devices

#: Up to here two ranks wait longer for a second collective than they take to add the whole.
_SHORT_BYTES = 1 << 18


def completed(buffer: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    """Return a future whose result is ``buffer``."""
    done: torch.futures.Future[torch.Tensor] = devices.future_on(buffer.device)
    done.set_result(buffer)
    return done


def chained(
    earlier: torch.futures.Future[Any],
    work: Callable[[torch.futures.Future[Any]], torch.Tensor],
    device: torch.device,
) -> torch.futures.Future[torch.Tensor]:
    """Return a future of ``work(earlier)``, called once ``earlier`` is done.

    Python code that waits for the future gets the exception of ``work`` itself; ``Future.then``
    would turn every exception into a RuntimeError. C++ code would get the exception as a value.

    Args:
        earlier: The future to wait for.
        work: Called on the thread that completes ``earlier``, or here if that is done.
        device: Device of the result.
    """
    later: torch.futures.Future[torch.Tensor] = devices.future_on(device)

    def settle(done: torch.futures.Future[Any]) -> None:
        try:
            result = work(done)
        except BaseException as error:  # noqa: BLE001  a future without an end would hang who waits
            kept = error if isinstance(error, Exception) else RuntimeError(repr(error))
            later.set_exception(kept)  # type: ignore[arg-type]
        else:
            later.set_result(result)

    earlier.add_done_callback(settle)
    return later


def reproducible_mean(
    buffer: torch.Tensor, group: dist.ProcessGroup | None
) -> torch.futures.Future[torch.Tensor]:
    """Replace a flat tensor by its mean over ranks, added in rank order.

    Each rank's share is divided by the world size before the sum, as DDP does. Half-width values
    are added in float32 and rounded once, so with two ranks the result equals an all-reduce in half
    width. Each rank sends ``2 * (world_size - 1) / world_size`` of the buffer's bytes and receives
    as many; scratch memory is 2.5 times the buffer at most, 3 times a short one of two ranks.

    The call returns when its collectives are done, because the second needs the first; `Lane`
    keeps this wait off the training thread. On CUDA the call only orders streams and the host does
    not wait.

    Args:
        buffer: Flat, contiguous, equal size and floating dtype on all ranks; overwritten.
        group: Process group, or None for a single process.

    Returns:
        Completed future of ``buffer``.
    """
    world_size = 1 if group is None else group.size()
    if world_size == 2 and 0 < buffer.nbytes <= _SHORT_BYTES:
        _mean_of_two(buffer, group)
    elif world_size > 1 and buffer.numel():
        _mean(buffer, world_size, group)
    return completed(buffer)


def _mean_of_two(buffer: torch.Tensor, group: dist.ProcessGroup | None) -> None:
    """One gather, which moves as many bytes as both steps of `_mean`; each rank adds all of it."""
    own = buffer / 2
    gathered = torch.empty(2 * own.nbytes, dtype=torch.uint8, device=own.device)
    # Values travel as bytes, because Gloo does not support every dtype in every collective.
    dist.all_gather(list(gathered.chunk(2)), own.view(torch.uint8), group=group)
    first, second = gathered.view(own.dtype).chunk(2)
    _add_into(buffer, first, [second])


def _mean(buffer: torch.Tensor, world_size: int, group: dist.ProcessGroup | None) -> None:
    size = -(-buffer.numel() // world_size)
    own = buffer.new_zeros(world_size * size)
    own[: buffer.numel()] = buffer
    own.div_(world_size)
    theirs = torch.empty_like(own)
    dist.all_to_all_single(theirs.view(torch.uint8), own.view(torch.uint8), group=group)
    first, *others = theirs.chunk(world_size)
    mine = torch.empty_like(first)
    _add_into(mine, first, others)
    shares = list(own.view(torch.uint8).chunk(world_size))
    dist.all_gather(shares, mine.view(torch.uint8), group=group)
    buffer.copy_(own[: buffer.numel()])


def _add_into(target: torch.Tensor, first: torch.Tensor, others: Sequence[torch.Tensor]) -> None:
    """Write the sum in order; halves are added in float32 and rounded once."""
    total = target if target.element_size() != 2 else torch.empty_like(target, dtype=torch.float32)
    total.copy_(first)
    for other in others:
        total.add_(other)
    if total is not target:
        target.copy_(total)


def own_group(
    training_group: dist.ProcessGroup, *, at_least: timedelta = default_pg_timeout
) -> dist.ProcessGroup:
    """Make a Gloo group of the same ranks; only the group's ranks call this.

    Args:
        training_group: Whose timeout the new group has.
        at_least: Unless that is shorter than this: a rank may recover for longer than a step takes.
    """
    members = dist.get_process_group_ranks(training_group)
    group: dist.ProcessGroup = dist.new_group(
        members,
        timeout=max(timeout_of(training_group), at_least),
        backend="gloo",
        use_local_synchronization=not _is_world(training_group),
    )
    return group


def leave(group: dist.ProcessGroup | None) -> None:
    """Release a group's connections and threads; groups of a destroyed world are gone already.

    A group of only some ranks stays until the world ends. PyTorch would reuse the group's name, a
    hash of its ranks, for the next such group, which would then look for the old group's addresses.
    """
    if group is not None and dist.is_initialized():
        with suppress(KeyError, ValueError):  # the group belonged to an earlier world
            if _is_world(group):
                dist.destroy_process_group(group)


def keep_for_ever(group: dist.ProcessGroup) -> None:
    """Let a group end with the process only.

    With its last reference it waits for what is under way, which a rank that hangs does not answer before the group's
    time limit; and on a thread of its own that would be at the interpreter's end, which aborts the process.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


def timeout_of(group: dist.ProcessGroup) -> timedelta:
    """Return how long ranks of a group wait for one another."""
    found = []
    for device in group._device_types:
        options = getattr(group._get_backend(device), "options", None)  # not every backend has any
        found.append(getattr(options, "_timeout", default_pg_timeout))
    return max(found, default=default_pg_timeout)


def _is_world(group: dist.ProcessGroup) -> bool:
    return bool(len(dist.get_process_group_ranks(group)) == dist.get_world_size())
