"""How large blocks are, how many cores there are, and whether memory suffices."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from lowdiff.errors import NotEnoughMemory
from lowdiff.persistence.files.lease import this_machine
from lowdiff.persistence.staging.budget import group_headrooms

#: Elements of a unit of a replica's, and of a proof: its tensors fit a core's cache.
BLOCK_ELEMENTS = 1 << 18
#: Replay needs at most its state, a quarter of it, and this, whatever the number of differentials.
#: Whoever compares holds two: what the state is compared with counts as state.
_SLACK_BYTES = 256 << 20


def needed_bytes(state_bytes: int) -> int:
    """Most memory that recovery takes with so much state, of one or more, in memory at once."""
    return state_bytes + state_bytes // 4 + _SLACK_BYTES


@dataclass(frozen=True, slots=True)
class LocalRanks:
    """Processes of one machine that recover at once, each a whole state.

    Attributes:
        count: How many, this one included.
        budgets: Of the machine, and of each control group of this process that has a limit: how many
            of them share it, and the bytes that were free for all of these together before any had
            loaded anything.
    """

    count: int
    budgets: tuple[tuple[int, int], ...]


def local_ranks(gather: Callable[[Any], list[Any]]) -> LocalRanks:
    """Find out which ranks share this one's memory; each has dropped what it held of an attempt before.

    They check at different times, and what is free then lacks what others have loaded already. So
    memory is looked at here: nobody loads before all have answered.

    Args:
        gather: Returns everybody's value.
    """
    # By kernel and container, which gives names to control groups.
    here = [this_machine(), os.readlink("/proc/self/ns/mnt")]
    own = free_memory()
    told = gather([here, own])
    found = [free for place, free in told if place == here]
    # Whoever looked first may have seen what others still held; whoever looked last has not.
    shared = [[free[budget] for free in found if budget in free] for budget in own]
    return LocalRanks(len(found), tuple((len(looks), max(looks)) for looks in shared))


def check_memory(state_bytes: int, here: LocalRanks | None = None) -> None:
    """Refuse a recovery that would be killed halfway.

    Args:
        state_bytes: As in `needed_bytes`.
        here: The processes that recover so much at once; None if there is but this one.

    Raises:
        NotEnoughMemory: Saying how much is needed, and how much there is.
    """
    needed = needed_bytes(state_bytes)
    for count, free in here.budgets if here is not None else ():
        if count * needed > free:
            raise NotEnoughMemory(count * needed, free, count)
    # What the others have taken since then leaves enough, unless somebody else has taken some.
    free = free_bytes()
    if needed > free:
        raise NotEnoughMemory(needed, free)


def free_bytes() -> int:
    """Memory that this process may still take, page cache included."""
    return min(free_memory().values())


def free_memory() -> dict[str, int]:
    """Bytes that the machine has left, and each control group of this process that has a limit."""
    with open("/proc/meminfo", encoding="ascii") as file:
        found = dict(line.split(":", 1) for line in file)
    return {"machine": int(found["MemAvailable"].split()[0]) << 10, **group_headrooms()}


def usable_cores() -> int:
    """Cores of this process, by affinity and by the control group's quota."""
    cores = len(os.sched_getaffinity(0))
    try:
        with open("/sys/fs/cgroup/cpu.max", encoding="ascii") as file:
            quota, period = file.read().split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else max(1, min(cores, round(int(quota) / int(period))))


@contextmanager
def threads_put_back() -> Iterator[None]:
    """Whoever is inside sets the size of its own team; the process's default is put back afterwards."""
    before = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(before)
