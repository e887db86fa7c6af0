"""Fences and commits as a small model: lives that die between any two fences or commits.

The planner is the real one; only the files are made up. A life's records carry the life they come
from, so a history mixed from two lives would show.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from lowdiff.persistence.format.framing import RecordHeader, RecordKind, RecordRef, StoredRecord
from lowdiff.persistence.run.catalog import Catalog, SnapshotSet
from lowdiff.persistence.run.records import RankRecords
from lowdiff.recovery.plan import plan_recovery
from lowdiff.types import Environment, Fence, Layout

WORLD_SIZE = 2
RUN = "0" * 32


@dataclass(frozen=True)
class Death:
    """How a life ends.

    Attributes:
        fenced: Ranks whose fence was durable.
        staged: Steps each rank had staged beyond the life's base; at most one apart.
    """

    fenced: frozenset[int]
    staged: tuple[int, int]


def deaths() -> Iterator[Death]:
    """Every way to die: before all fences nobody stages; after, ranks stay within one step."""
    for fenced in ((), (0,), (1,)):
        yield Death(frozenset(fenced), (0, 0))
    for staged in itertools.product(range(3), repeat=WORLD_SIZE):
        if abs(staged[0] - staged[1]) <= 1:
            yield Death(frozenset({0, 1}), (staged[0], staged[1]))


def fence(number: int, parent: int | None, base: int, rank: int) -> Fence:
    """A fence of one rank."""
    nowhere = Environment("cpu", "2.13.0", "", "", 1, False, "", "float32", "highest")
    identity = RUN, number, parent, base, rank, WORLD_SIZE
    return Fence(
        *identity, nowhere, Layout(()), (), {"name": "none"}, {}, life="0" * 32, strategy="log"
    )


def record(number: int, rank: int, step: int) -> StoredRecord:
    """A differential with nothing in it."""
    header = RecordHeader(
        RecordKind.DIFFERENTIAL, False, 0, 0, 0, step, number, rank, WORLD_SIZE, 0
    )
    return StoredRecord(RecordRef(header, 0, memoryview(b"")), Path("x"), may_change=True)


class Files:
    """What all lives so far left on disk and in staging."""

    def __init__(self) -> None:
        self.fences: dict[int, dict[int, Fence]] = {}
        self.records: dict[tuple[int, int], RankRecords] = {}

    def catalog(self) -> Catalog:
        complete = {
            number: ranks[0] for number, ranks in self.fences.items() if len(ranks) == WORLD_SIZE
        }
        first = SnapshotSet(0, 0, Path("s0"), ())
        return Catalog(RUN, Path("run"), complete, (first,), self.records, (), ())

    def live(self, base: int, death: Death) -> None:
        catalog = self.catalog()
        number = len(self.fences)
        parent = max(catalog.incarnations, default=None)
        self.fences[number] = {rank: fence(number, parent, base, rank) for rank in death.fenced}
        if len(death.fenced) == WORLD_SIZE:
            for rank, count in enumerate(death.staged):
                steps = range(base + 1, base + count + 1)
                self.records[number, rank] = RankRecords()
                for step in steps:
                    self.records[number, rank].stage(record(number, rank, step), is_checked=True)


@pytest.mark.cases(11)
@pytest.mark.parametrize("back", [0, 1])
@pytest.mark.parametrize("first", list(deaths())[3:], ids=str)
def test_history_is_never_mixed_and_nothing_committed_is_lost(first: Death, back: int) -> None:
    """``back``: how many steps before the newest the later lives are told to start."""
    for later in itertools.product(deaths(), repeat=2):
        files = Files()
        committed: dict[int, int] = {}  # step -> the life all of whose ranks staged it
        base = 0
        for life, death in enumerate((first, *later)):
            files.live(base, death)
            if len(death.fenced) == WORLD_SIZE:
                # From here on what other lives did after the base is void.
                committed = {step: made for step, made in committed.items() if step <= base}
                for step in range(base + 1, base + min(death.staged) + 1):
                    committed[step] = life
            plan = plan_recovery(files.catalog())
            # Nothing that was committed is lost, and nothing else appears.
            assert plan.step == max(committed, default=0)
            assert {s.step: s.incarnation for s in plan.steps} == committed
            for planned in plan.steps:
                lives = {shard.record.header.incarnation for shard in planned.shards}
                assert lives == {planned.incarnation}
            base = max(0, plan.step - back)
