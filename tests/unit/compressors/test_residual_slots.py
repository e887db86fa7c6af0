"""Residual slots as small models: every interleaving, and a crash after every event.

A rank's program for step ``t``: write the residual of ``t`` into the next slot (begin, end), send
its gradient, wait until everybody sent theirs, stage the record of ``t``. Where staging lags, as it
may on CUDA, the record of ``t`` is staged only after the gradient of ``t + 1`` was sent. Where the
residual depends on the average, as with PowerSGD, its writing ends only after everybody sent.

Of a residual on an accelerator only copies survive, at every step at most; what is copied may be two steps behind.
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


def copying_program(every: int, steps: int) -> list[list[tuple[str, int]]]:
    """What the training queues, and what is copied and staged behind it; each in its order."""
    training: list[tuple[str, int]] = []
    copying: list[tuple[str, int]] = []
    for t in range(1, steps + 1):
        training += [("write", t), ("commit", t)]
        copying += [("copied", t), ("stage", t)] if t % every == 0 else [("stage", t)]
    return [training, copying]


def torn_or_lost(num_slots: int, num_copies: int, lag: int, every: int, steps: int = 9) -> int:
    """Number of reachable states in which a copy reads what is overwritten, or a staged record's copy is gone."""
    training, copying = copying_program(every, steps)
    nothing: tuple[int | None, ...] = (None,) * num_copies
    start = (0, 0, (0,) * num_slots, nothing)
    seen, waiting, wrong = {start}, [start], 0
    while waiting:
        trained, copied, device, copies = waiting.pop()
        staged = sum(kind == "stage" for kind, _ in copying[:copied])
        committed = sum(kind == "commit" for kind, _ in training[:trained])
        last = staged - staged % every
        wrong += last > 0 and copies[last // every % num_copies] != last
        following = []
        if trained < len(training):
            kind, t = training[trained]
            # A step whose staging is late waits for the one before the last two.
            if kind != "write" or t - 1 - staged <= lag:
                slots = list(device)
                if kind == "write":
                    slots[t % num_slots] = t
                following.append((trained + 1, copied, tuple(slots), copies))
        if copied < len(copying):
            kind, t = copying[copied]
            if t <= committed:
                made: list[int | None] = list(copies)
                if kind == "copied":
                    wrong += device[t % num_slots] != t
                    made[t // every % num_copies] = t
                following.append((trained, copied + 1, device, tuple(made)))
        for state in following:
            if state not in seen:
                seen.add(state)
                waiting.append(state)
    return wrong


@pytest.mark.parametrize("every", [1, 2, 4])
def test_three_slots_on_a_device_are_enough_for_copies_up_to_two_steps_late(every: int) -> None:
    assert torn_or_lost(NUM_SLOTS, NUM_SLOTS, lag=2, every=every) == 0


def test_two_slots_or_a_third_late_step_are_not() -> None:
    assert torn_or_lost(2, NUM_SLOTS, lag=2, every=1) > 0
    assert torn_or_lost(NUM_SLOTS, NUM_SLOTS, lag=3, every=1) > 0
