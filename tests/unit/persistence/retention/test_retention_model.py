"""Retention of a run with ranks and lives, against what can really be rebuilt."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from lowdiff.persistence.retention.plan import (
    CollectionPlan,
    Inventory,
    StoredSegment,
    StoredSnapshot,
    is_on,
    is_valid,
    owner_of,
    plan_collection,
)
from lowdiff.persistence.run.fences import lineage
from lowdiff.persistence.run.journal import Collected, Pin
from lowdiff.types import Fence, Retention
from tests.unit.persistence.retained import fence, segment, snapshot


class Run:
    def __init__(self, policy: Retention) -> None:
        self.policy = policy
        self.fences: dict[int, Fence] = {}
        self.num_incarnations = 0
        self.step = 0
        self.snapshots: list[StoredSnapshot] = []
        self.segments: dict[StoredSegment, list[int]] = {}
        self.open: dict[int, list[int]] = {}
        self.pins: list[Pin] = []
        self.collected = Collected()
        self.resume(0, world_size=1, complete=True)
        self.snapshot()

    def resume(self, pick: int, *, world_size: int, complete: bool) -> None:
        number = self.num_incarnations
        self.num_incarnations += 1
        if not complete:
            return
        if self.fences:
            steps = sorted(self.recoverable())
            self.step = steps[-1 - pick % len(steps)]
        parent = max(self.fences, default=None)
        self.fences[number] = fence(number, parent, self.step, world_size)
        self.open = {}

    def train(self, rolls: list[int]) -> None:
        """One step per entry; its bits say which ranks begin a new segment there."""
        number = max(self.fences)
        for bits in rolls:
            self.step += 1
            for rank in range(self.fences[number].world_size):
                if rank not in self.open or bits >> rank & 1:
                    self.open[rank] = []
                    self.segments[segment(number, self.step, rank)] = self.open[rank]
                self.open[rank].append(self.step)

    def snapshot(self) -> None:
        self.snapshots.append(snapshot(max(self.fences), self.step))
        self.open = {}

    def pin(self, pick: int) -> None:
        steps = sorted(self.recoverable())
        step = steps[-1 - pick % len(steps)]
        owner = owner_of(lineage(self.fences), step)
        assert owner is not None
        self.pins.append(Pin(f"pin{len(self.pins)}", step, owner))

    def usable(self) -> set[int]:
        spans = lineage(self.fences)
        return {s.step for s in self.snapshots if is_on(spans, s)}

    def missing(self, step: int) -> int | None:
        """The incarnation that owns a step of which a differential is not there."""
        owner = next((s for s in lineage(self.fences) if s.owns(step)), None)
        if owner is None:
            return -1
        stored = {
            s.rank
            for s, steps in self.segments.items()
            if s.incarnation == owner.incarnation and step in steps
        }
        return owner.incarnation if len(stored) < owner.world_size else None

    def recoverable(self) -> set[int]:
        found = set()
        for base in self.usable():
            step = base
            while step not in found:
                found.add(step)
                if self.missing(step + 1) is None:
                    step += 1
        return found

    def gaps(self) -> Iterator[tuple[int, int]]:
        """What `verify` would take for lost: first missing step between two snapshots."""
        for base, following in pairwise(sorted(self.usable())):
            for step in range(base + 1, following + 1):
                owner = self.missing(step)
                if owner is not None:
                    yield owner, step
                    break

    def collecting(self) -> Iterator[CollectionPlan]:
        """Remove one thing after the other: a crash may come after each."""
        inventory = Inventory(lineage(self.fences), tuple(self.snapshots), tuple(self.segments))
        plan = plan_collection(inventory, self.policy, self.pins, now_seconds=0.0)
        self.collected |= plan.collected
        for removal in plan.removals:
            self.snapshots = [s for s in self.snapshots if s.path != removal.path]
            self.segments = {s: v for s, v in self.segments.items() if s.path != removal.path}
            yield plan

    def pinned(self) -> set[int]:
        return {pin.step for pin in self.pins if is_valid(lineage(self.fences), pin)}


actions: st.SearchStrategy[tuple[str, dict[str, Any]]] = st.one_of(
    st.tuples(
        st.just("train"),
        st.fixed_dictionaries({"rolls": st.lists(st.integers(0, 7), min_size=1, max_size=6)}),
    ),
    st.tuples(st.just("snapshot"), st.just({})),
    st.tuples(st.just("pin"), st.fixed_dictionaries({"pick": st.integers(0, 12)})),
    st.tuples(
        st.just("resume"),
        st.fixed_dictionaries(
            {
                "pick": st.integers(0, 12),
                "world_size": st.integers(1, 3),
                "complete": st.sampled_from([True, True, True, False]),
            }
        ),
    ),
)


policies = st.builds(
    Retention,
    snapshots=st.integers(1, 3),
    every_steps=st.sampled_from([None, None, 3, 4]),
    total_bytes=st.sampled_from([None, None, 15, 40]),
)


@given(st.lists(actions, max_size=25), policies)
def test_after_every_removal_all_that_is_kept_can_be_recovered(
    sequence: list[tuple[str, dict[str, Any]]], policy: Retention
) -> None:
    run = Run(policy)
    for name, arguments in sequence:
        getattr(run, name)(**arguments)
        before = run.recoverable()
        for plan in run.collecting():
            after = run.recoverable()
            stays = {s for s in before for k in plan.kept if k.last is None and s >= k.first}
            stays |= {k.last for k in plan.kept if k.last in before}
            assert after >= stays | run.pinned()
            assert max(after) == run.step
            for owner, step in run.gaps():
                assert run.collected.holds(owner, step)
        if policy.total_bytes is None:
            newest = sorted({s for s in run.usable()})[-(policy.snapshots or 0) :]
            assert set(newest) <= run.recoverable()


@given(st.lists(actions, max_size=25), st.integers(1, 3))
def test_whatever_is_kept_is_of_use(sequence: list[tuple[str, dict[str, Any]]], keep: int) -> None:
    run = Run(Retention(snapshots=keep))
    for name, arguments in sequence:
        if name != "pin":
            getattr(run, name)(**arguments)
    usable = sorted(run.usable())
    list(run.collecting())
    if len(usable) >= keep:
        oldest = usable[-keep]
        assert all(s.step >= oldest for s in run.snapshots)
        for kept, steps in run.segments.items():
            later = [
                s for s in run.segments if (s.rank, s.incarnation) == (kept.rank, kept.incarnation)
            ]
            # Where a segment ends is only known from the one after it.
            assert steps[-1] > oldest or kept.first == max(s.first for s in later)
