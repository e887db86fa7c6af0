"""Residual slots as a small model: every interleaving of the ranks, and a crash after every event.

A rank's program for step ``t``: write the residual of ``t`` into the next slot (begin, end), send
its gradient, wait until everybody sent theirs, stage the record of ``t``. Where staging lags, as it
may on CUDA, the record of ``t`` is staged only after the gradient of ``t + 1`` was sent. Where the
residual depends on the average, as with PowerSGD, its writing ends only after everybody sent.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from lowdiff.compressors.feedback import NUM_SLOTS

STEPS = 5


@dataclass(frozen=True)
class Rank:
    """One rank's memory.

    Attributes:
        done: Events of its program that have happened.
        slots: Step whose residual each slot holds; None while it is being written.
        sent: Last step whose gradient it sent.
        staged: Last step it staged.
    """

    done: int
    slots: tuple[int | None, ...]
    sent: int = 0
    staged: int = 0


def program(lag: int, *, late: bool = False) -> list[tuple[str, int]]:
    """A rank's events in order."""
    events = []
    for t in range(1, STEPS + 1):
        sending = [("send", t), ("end late", t)] if late else [("end", t), ("send", t)]
        events += [("begin", t), *sending]
        if t > lag:
            events.append(("stage", t - lag))
    return events


def after(rank: Rank, event: tuple[str, int]) -> Rank:
    """The rank once an event has happened."""
    kind, t = event
    slots = list(rank.slots)
    if kind in ("begin", "end", "end late"):
        slots[t % len(slots)] = None if kind == "begin" else t
    return replace(
        rank,
        done=rank.done + 1,
        slots=tuple(slots),
        sent=t if kind == "send" else rank.sent,
        staged=t if kind == "stage" else rank.staged,
    )


def lost_residuals(world_size: int, num_slots: int, lag: int, *, late: bool = False) -> int:
    """Number of reachable states whose crash would lose a residual that recovery needs."""
    events = program(lag, late=late)
    start = tuple(Rank(0, (0, *[None] * (num_slots - 1))) for _ in range(world_size))
    seen, waiting, lost = {start}, [start], 0
    while waiting:
        ranks = waiting.pop()
        target = min(rank.staged for rank in ranks)
        lost += any(rank.slots[target % num_slots] != target for rank in ranks)
        for i, rank in enumerate(ranks):
            if rank.done == len(events):
                continue
            kind, t = events[rank.done]
            # The all-gather of t ends once every rank has sent; only then is t staged, and only
            # then does t + 1 begin.
            waits_for = t - 1 if kind == "begin" else t
            if kind in ("stage", "begin", "end late") and min(r.sent for r in ranks) < waits_for:
                continue
            following = (*ranks[:i], after(rank, (kind, t)), *ranks[i + 1 :])
            if following not in seen:
                seen.add(following)
                waiting.append(following)
    return lost


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_three_slots_lose_no_residual_at_any_crash(world_size: int, late: bool) -> None:
    assert NUM_SLOTS == 3
    assert lost_residuals(world_size, NUM_SLOTS, lag=0, late=late) == 0


def test_two_slots_would_lose_some() -> None:
    assert lost_residuals(2, 2, lag=0) > 0
    assert lost_residuals(2, 2, lag=0, late=True) > 0


@pytest.mark.parametrize("world_size", [2, 3])
def test_where_staging_lags_a_step_it_takes_four(world_size: int) -> None:
    assert lost_residuals(world_size, 3, lag=1) > 0
    assert lost_residuals(world_size, 4, lag=1) == 0
