"""Replay by several ranks: each replays some units, and all end with the whole state."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from lowdiff.errors import RecoveryError, RunMismatch
from lowdiff.recovery.blocks import Unit
from lowdiff.recovery.state import RecoveredState, is_aligned

_Item = TypeVar("_Item")

#: Key of an optimizer's state -> dtype of a tensor with an element per element, and for everything
#: else None and the value itself.
_Entries = dict[str, tuple[torch.dtype | None, Any]]


@contextmanager
def without_default_group(*, when: bool = True) -> Iterator[None]:
    """Within it ``torch.distributed`` is not initialized, as in a process that recovers by itself.

    An optimizer of a third party that exchanges with other ranks in its step fails there, instead of
    waiting for ranks that replay something else. Groups that are given by themselves go on to work.

    Args:
        when: Whether to do anything.
    """
    world = dist.GroupMember.WORLD if when and dist.is_available() else None
    if world is None:
        yield
        return
    dist.GroupMember.WORLD = None
    try:
        yield
    finally:
        dist.GroupMember.WORLD = world


def gather(value: _Item, group: dist.ProcessGroup) -> list[_Item]:
    """One value from every rank, in rank order."""
    found: list[Any] = [None] * group.size()
    dist.all_gather_object(found, value, group=group)
    return found


def owners_of(units: Sequence[Unit], num_ranks: int) -> list[int]:
    """Which rank replays each unit: neighbours together, balanced by elements."""
    total = max(1, sum(unit.elements for unit in units))
    owners, before = [], 0
    for unit in units:
        owners.append(min(num_ranks - 1, (before + unit.elements // 2) * num_ranks // total))
        before += unit.elements
    return owners


def agree(what: object, group: dist.ProcessGroup) -> None:
    """Refuse to begin where ranks mean different recoveries.

    Raises:
        RunMismatch: On every rank.
    """
    told = gather(what, group)
    if any(other != told[0] for other in told):
        raise RunMismatch(
            f"the ranks do not see the same run: their plans are {told}; give all of them the same "
            "folder or store, and the step"
        )


def gather_made(make: Callable[[], _Item], group: dist.ProcessGroup) -> list[_Item]:
    """What every rank makes, in rank order; an error of one is an error of all.

    Raises:
        RecoveryError: On all ranks, quoting the first one's error. Where all have one of the same
            type, each raises its own: whoever tries again does so on every rank, or on none.
    """
    try:
        made = make()
    except Exception as error:  # also what an optimizer of the user's raises
        told = gather((None, (type(error).__name__, str(error) or repr(error))), group)
        if len({found and found[0] for _, found in told}) > 1:
            raise _refusal(told) from error
        raise
    answers = gather((made, None), group)
    if any(found for _, found in answers):
        raise _refusal(answers)
    return [value for value, _ in answers]


def _refusal(told: Sequence[tuple[object, tuple[str, str] | None]]) -> RecoveryError:
    rank, text = next((rank, found[1]) for rank, (_, found) in enumerate(told) if found)
    return RecoveryError(
        f"rank {rank} cannot go on: {text}. All ranks end with it; mend that, and start them again"
    )


def made_by_all(make: Callable[[], _Item], group: dist.ProcessGroup | None) -> _Item:
    """What this rank makes, once all have made theirs; see `gather_made`."""
    if group is None:
        return make()
    own: list[_Item] = []
    gather_made(lambda: own.append(make()), group)
    return own[0]


def together(items: Iterator[_Item], group: dist.ProcessGroup) -> Iterator[_Item]:
    """``items``, read by every rank for itself; see `gather_made`."""
    own: list[_Item] = []

    def read() -> bool:
        own.extend(islice(items, 1))
        return bool(own)

    while all(gather_made(read, group)):
        yield own.pop()


def share_results(
    units: Sequence[Unit],
    owners: Sequence[int],
    state: RecoveredState,
    group: dist.ProcessGroup,
) -> None:
    """Give every rank what each unit's owner has of it: one broadcast per unit.

    Args:
        units: All of them, on every rank the same.
        owners: Rank in the group that has replayed each.
        state: Complete afterwards, in place.
        group: The ranks.
    """
    rank = dist.get_rank(group)
    mine = {n: _told(unit, state) for n, unit in enumerate(units) if owners[n] == rank}
    told = {n: entries for part in gather(mine, group) for n, entries in part.items()}
    for n, unit in enumerate(units):
        views = [v.view(torch.uint8) for v in _views(unit, told[n], state)]
        source = dist.get_global_rank(group, owners[n])
        if owners[n] == rank:
            dist.broadcast(torch.cat(views), source, group=group)
            continue
        sizes = [view.numel() for view in views]
        buffer = torch.empty(sum(sizes), dtype=torch.uint8, device="cpu")
        dist.broadcast(buffer, source, group=group)
        for view, part in zip(views, buffer.split(sizes), strict=True):
            view.copy_(part)


def _told(unit: Unit, state: RecoveredState) -> list[_Entries]:
    found = []
    for block in unit.blocks:
        spec = state.fence.layout.parameters[block.parameter]
        entries = state.optimizers[unit.optimizer].state.get(spec.name, {})
        found.append(
            {
                key: (value.dtype, None) if is_aligned(key, value, spec.numel) else (None, value)
                for key, value in entries.items()
            }
        )
    return found


def _views(unit: Unit, told: Sequence[_Entries], state: RecoveredState) -> Iterator[torch.Tensor]:
    """The unit's ranges of every full tensor, which is made where this rank has none yet."""
    for block, entries in zip(unit.blocks, told, strict=True):
        spec = state.fence.layout.parameters[block.parameter]
        yield state.parameters[spec.name][block.start : block.stop]
        if entries:
            full = state.optimizers[unit.optimizer].state.setdefault(spec.name, {})
            for key, (dtype, value) in entries.items():
                if dtype is None:
                    full[key] = value
                    continue
                if not is_aligned(key, full.get(key), spec.numel):
                    full[key] = torch.empty(spec.numel, dtype=dtype, device="cpu")
                yield full[key][block.start : block.stop]
        for name in sorted(state.averages):
            if spec.name in state.averages[name]:
                yield state.averages[name][spec.name][block.start : block.stop]
