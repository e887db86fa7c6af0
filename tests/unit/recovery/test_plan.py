"""Plans are made from hand-made catalogs: no disk, no tensors."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
from crc32c import crc32c

from lowdiff.errors import StepNotFound
from lowdiff.persistence.format.framing import RecordHeader, RecordKind, RecordRef, StoredRecord
from lowdiff.persistence.run.catalog import Catalog, SnapshotSet
from lowdiff.persistence.run.records import RankRecords
from lowdiff.recovery.plan import plan_recovery, recoverable, usable_snapshots
from lowdiff.types import Fence, Layout
from tests.unit.persistence import made_runs


def life(number: int, *, base: int = 0, parent: int | None = None, ranks: int = 1) -> Fence:
    made = made_runs.fence(number, base=base, world_size=ranks)
    return replace(made, parent=parent, layout=Layout(()), optimizers=(), names={})


def staged(found: Iterable[StoredRecord]) -> RankRecords:
    records = RankRecords()
    for one in found:
        records.stage(one, is_checked=True)
    return records


def record(incarnation: int, rank: int, step: int) -> StoredRecord:
    body = memoryview(bytes(8))
    kind = RecordKind.DIFFERENTIAL
    header = RecordHeader(kind, False, 0, 8, crc32c(body), step, incarnation, rank, 1, 0)
    return StoredRecord(RecordRef(header, 0, body), Path("x.seg"), may_change=False)


def catalog(
    lives: Iterable[Fence],
    snapshots: Iterable[tuple[int, int]],
    records: dict[tuple[int, int], Iterable[int]],
) -> Catalog:
    """A run.

    Args:
        lives: Incarnations that all ranks fenced.
        snapshots: Incarnation and step of each complete one.
        records: ``(incarnation, rank)`` -> steps.
    """
    return Catalog(
        run_id="ab" * 16,
        root=Path("run"),
        incarnations={one.incarnation: one for one in lives},
        snapshots=tuple(
            SnapshotSet(incarnation, step, Path(f"run/s{step}"), ())
            for step, incarnation in sorted((step, number) for number, step in snapshots)
        ),
        records={
            key: staged([record(*key, step) for step in steps]) for key, steps in records.items()
        },
        staging=(),
        damage=(),
    )


def way(made: Catalog, step: int | None = None) -> tuple[tuple[int, int], list[tuple[int, int]]]:
    """The plan: base snapshot, then every differential, as ``(incarnation, step)``."""
    plan = plan_recovery(made, step)
    return (plan.base.incarnation, plan.base.step), [(s.incarnation, s.step) for s in plan.steps]


def test_the_newest_snapshot_before_the_step_is_the_base() -> None:
    made = catalog([life(0)], [(0, 0), (0, 5), (0, 10)], {(0, 0): range(1, 13)})
    assert way(made) == ((0, 10), [(0, 11), (0, 12)])
    assert way(made, 10) == ((0, 10), [])
    assert way(made, 9) == ((0, 5), [(0, 6), (0, 7), (0, 8), (0, 9)])
    assert recoverable(made) == [(0, 12)]


def test_a_plan_lists_the_shards_of_all_ranks_in_order() -> None:
    made = catalog([life(0, ranks=3)], [(0, 0)], {(0, r): [1] for r in (2, 0, 1)})
    shards = plan_recovery(made).steps[0].shards
    assert [shard.record.header.rank for shard in shards] == [0, 1, 2]


def test_a_step_counts_once_every_rank_has_it() -> None:
    made = catalog([life(0, ranks=2)], [(0, 0)], {(0, 0): range(1, 8), (0, 1): range(1, 6)})
    assert recoverable(made) == [(0, 5)]
    with pytest.raises(StepNotFound, match=r"step 6 is missing for rank 1; .*: 0 to 5") as caught:
        plan_recovery(made, 7)
    assert caught.value.recoverable == ((0, 5),)


def test_a_gap_ends_a_range_and_a_snapshot_begins_the_next() -> None:
    made = catalog([life(0)], [(0, 0), (0, 5), (0, 10)], {(0, 0): [1, 2, 3, 5, 6, 7, 9, 10, 11]})
    assert recoverable(made) == [(0, 3), (5, 7), (10, 11)]
    assert way(made) == ((0, 10), [(0, 11)])
    for step in (4, 8, 9):
        with pytest.raises(StepNotFound, match="0 to 3, 5 to 7, 10 to 11"):
            plan_recovery(made, step)


def test_ranges_that_touch_are_one() -> None:
    made = catalog([life(0)], [(0, 0), (0, 5)], {(0, 0): [1, 2, 3, 4, 6]})
    assert recoverable(made) == [(0, 6)]


def test_a_step_before_the_first_snapshot_is_gone() -> None:
    made = catalog([life(0)], [(0, 5)], {(0, 0): range(1, 8)})
    with pytest.raises(StepNotFound, match="no snapshot that can be read lies at or before it"):
        plan_recovery(made, 4)


def test_a_step_beyond_the_end_is_not_there_yet() -> None:
    made = catalog([life(0)], [(0, 0)], {(0, 0): [1, 2]})
    with pytest.raises(StepNotFound, match="step 3 is missing for rank 0"):
        plan_recovery(made, 9)


def test_a_resumed_run_goes_through_its_incarnations() -> None:
    made = catalog(
        [life(0), life(1, base=3, parent=0), life(2, base=5, parent=1)],
        [(0, 0)],
        {(0, 0): [1, 2, 3, 4], (1, 0): [4, 5, 6], (2, 0): [6]},
    )
    assert way(made) == ((0, 0), [(0, 1), (0, 2), (0, 3), (1, 4), (1, 5), (2, 6)])
    assert plan_recovery(made).incarnation == 2
    assert plan_recovery(made, 5).incarnation == 1


def test_what_a_fence_made_void_never_counts() -> None:
    made = catalog(
        [life(0), life(1, base=3, parent=0)],
        [(0, 0), (0, 5)],
        {(0, 0): range(1, 8), (1, 0): [4]},
    )
    assert recoverable(made) == [(0, 4)]
    assert [s.step for s in usable_snapshots(made)] == [0]
    with pytest.raises(StepNotFound):
        plan_recovery(made, 5)


def test_a_rewind_beyond_a_parent_voids_the_parent_too() -> None:
    lives = [life(0), life(1, base=6, parent=0), life(2, base=4, parent=1)]
    made = catalog(lives, [(0, 0), (1, 8)], {(0, 0): range(1, 7), (1, 0): [7, 8], (2, 0): [5]})
    assert way(made) == ((0, 0), [(0, 1), (0, 2), (0, 3), (0, 4), (2, 5)])
    assert recoverable(made) == [(0, 5)]


def test_a_restart_from_nothing_leaves_the_old_history_behind() -> None:
    made = catalog(
        [life(0), life(1)], [(0, 0), (0, 5), (1, 0)], {(0, 0): range(1, 8), (1, 0): [1, 2]}
    )
    assert recoverable(made) == [(0, 2)]
    assert way(made) == ((1, 0), [(1, 1), (1, 2)])


def test_an_incarnation_whose_fences_are_not_all_there_voids_nothing() -> None:
    # Incarnation 1 died between the fences of its ranks: the catalog does not list it.
    made = catalog(
        [life(0), life(2, base=5, parent=0)],
        [(0, 0)],
        {(0, 0): range(1, 6), (1, 0): [4, 5, 6], (2, 0): [6, 7]},
    )
    assert way(made)[1] == [*((0, t) for t in range(1, 6)), (2, 6), (2, 7)]


def test_a_lost_parent_ends_the_history() -> None:
    made = catalog(
        [life(0), life(2, base=5, parent=1)],
        [(0, 0), (2, 10)],
        {(0, 0): range(1, 6), (2, 0): range(6, 12)},
    )
    assert recoverable(made) == [(10, 11)]


def test_shards_of_two_incarnations_never_make_a_step() -> None:
    made = catalog(
        [life(0, ranks=2), life(1, base=1, parent=0, ranks=2)],
        [(0, 0)],
        {(0, 0): [1, 2], (0, 1): [1], (1, 1): [2]},
    )
    assert recoverable(made) == [(0, 1)]


def test_the_number_of_ranks_may_change() -> None:
    made = catalog(
        [life(0, ranks=2), life(1, base=2, parent=0, ranks=1)],
        [(0, 0)],
        {(0, 0): [1, 2], (0, 1): [1, 2], (1, 0): [3]},
    )
    assert [len(s.shards) for s in plan_recovery(made).steps] == [2, 2, 1]


def test_of_two_snapshots_of_a_step_the_later_incarnations_is_taken() -> None:
    made = catalog(
        [life(0), life(1, base=5, parent=0)], [(0, 0), (0, 5), (1, 5)], {(0, 0): range(1, 6)}
    )
    assert way(made, 5) == ((1, 5), [])
    assert plan_recovery(made, 5).incarnation == 1


def test_a_step_changed_outside_the_optimizer_is_reached_by_a_snapshot_only() -> None:
    others = [1, 2, 4, 5]
    made = catalog([life(0, ranks=2)], [(0, 0)], {(0, 0): others, (0, 1): others})
    for rank in (0, 1):
        changed = record(0, rank, 3)
        header = replace(changed.record.header, rebases=True)
        stored = replace(changed, record=replace(changed.record, header=header))
        made.records[0, rank].stage(stored, is_checked=True)
    assert recoverable(made) == [(0, 2)]
    why = "changed outside the optimizer in step 3, so only a snapshot leads to it"
    for step in (3, 5):
        with pytest.raises(StepNotFound, match=f"step {step} of run .*{why}.*: 0 to 2"):
            plan_recovery(made, step)


@pytest.mark.parametrize(
    ("made", "why"),
    [
        (catalog([], [], {}), "no incarnation has the fences of all its ranks"),
        (catalog([life(0)], [], {(0, 0): [1]}), "it holds no complete snapshot"),
        (catalog([life(0), life(1)], [(0, 0)], {}), "no snapshot belongs to the run's newest"),
    ],
    ids=["fences", "snapshots", "history"],
)
def test_a_run_without_a_single_step_says_why(made: Catalog, why: str) -> None:
    assert recoverable(made) == []
    with pytest.raises(StepNotFound, match=f"no step of run can be recovered: {why}"):
        plan_recovery(made)
