"""Retention frees what is old and never what the newest recoverable step needs."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowdiff.errors import ConfigError
from lowdiff.persistence.catalog import complete_snapshots
from lowdiff.persistence.durable import make_directory, write_json
from lowdiff.persistence.fences import create_run, write_fence
from lowdiff.persistence.lineage import Span, lineage
from lowdiff.persistence.paths import RunFolder
from lowdiff.persistence.policy import Retention
from lowdiff.persistence.retention import collect
from lowdiff.persistence.retention_notes import Collected, read_notes
from lowdiff.persistence.retention_plan import (
    CollectionPlan,
    Inventory,
    Kept,
    Pin,
    StoredSegment,
    StoredSnapshot,
    is_on,
    is_valid,
    owner_of,
    plan_collection,
)
from lowdiff.persistence.snapshots import Manifest, manifest_file, shard_file
from lowdiff.types import Environment, Fence, Layout, OptimizerSpec, ParameterSpec

RUN_ID = "00112233445566778899aabbccddeeff"
ENVIRONMENT = Environment("cpu", "2.13", "some processor", "AVX2", 1, False, "")


def fence(number: int, parent: int | None, base: int, world_size: int, rank: int = 0) -> Fence:
    return Fence(
        run_id=RUN_ID,
        incarnation=number,
        parent=parent,
        base_step=base,
        rank=rank,
        world_size=world_size,
        environment=ENVIRONMENT,
        layout=Layout((ParameterSpec("w", (2,), (1,), "float32", 0),)),
        optimizers=(OptimizerSpec("torch.optim.sgd.SGD", (("w",),)),),
        compressor={"name": "topk"},
        names={},
    )


def snapshot(incarnation: int, step: int, **changes: Any) -> StoredSnapshot:
    made = StoredSnapshot(incarnation, step, Path(f"i{incarnation}-s{step}"), 10, True, float(step))
    return replace(made, **changes)


def segment(incarnation: int, first: int, rank: int = 0) -> StoredSegment:
    path = Path(f"r{rank}") / f"i{incarnation}-s{first}.seg"
    return StoredSegment(incarnation, rank, first, path, 1)


def planned(
    spans: Sequence[Span],
    snapshots: Sequence[StoredSnapshot],
    segments: Sequence[StoredSegment] = (),
    pins: Sequence[Pin] = (),
    /,
    *,
    now_seconds: float = 0.0,
    bases: tuple[int, ...] = (),
    **policy: Any,
) -> CollectionPlan:
    inventory = Inventory(tuple(spans), tuple(snapshots), tuple(segments), bases)
    return plan_collection(inventory, Retention(**policy), pins, now_seconds=now_seconds)


def names(plan: CollectionPlan) -> tuple[list[str], list[str]]:
    return (
        [r.path.name for r in plan.removals if r.is_snapshot],
        [r.path.name for r in plan.removals if not r.is_snapshot],
    )


ONE = [Span(0, 1, 0, None)]
SNAPSHOTS = [snapshot(0, 0), snapshot(0, 100), snapshot(0, 200)]
SEGMENTS = [segment(0, first) for first in (1, 51, 101, 151, 201)]


def test_the_newest_snapshots_stay_with_the_differentials_after_the_oldest_of_them() -> None:
    plan = planned(ONE, SNAPSHOTS, SEGMENTS, snapshots=2)
    assert names(plan) == (["i0-s0"], ["i0-s1.seg", "i0-s51.seg"])
    assert plan.kept == (Kept(100, None, "the newest snapshots"),)
    assert plan.collected == ((0, 1, 100),)
    assert (plan.bytes_removed, plan.bytes_kept) == (12, 23)
    assert names(planned(ONE, SNAPSHOTS, SEGMENTS, snapshots=1)) == (
        ["i0-s0", "i0-s100"],
        ["i0-s1.seg", "i0-s51.seg", "i0-s101.seg", "i0-s151.seg"],
    )


def test_nothing_goes_while_there_are_not_more_snapshots_than_to_be_kept() -> None:
    for policy in ({"snapshots": 3}, {"snapshots": 4}, {"snapshots": None}):
        assert planned(ONE, SNAPSHOTS, SEGMENTS, **policy).removals == ()
    assert planned([], [], [], snapshots=1) == CollectionPlan()
    assert planned([], SNAPSHOTS, SEGMENTS, snapshots=1).removals == ()


def test_a_segment_that_reaches_beyond_the_oldest_kept_snapshot_stays() -> None:
    segments = [segment(0, 1), segment(0, 102), segment(0, 201)]
    assert names(planned(ONE, SNAPSHOTS, segments)) == (["i0-s0"], [])


def test_the_newest_segment_of_the_newest_incarnation_always_stays() -> None:
    assert names(planned(ONE, SNAPSHOTS, [segment(0, 1)], snapshots=1))[1] == []


def test_segments_of_an_earlier_life_end_where_the_later_one_begins() -> None:
    spans = [Span(0, 1, 0, 150), Span(1, 1, 150, None)]
    segments = [segment(0, 1), segment(0, 101), segment(1, 151)]
    snapshots = [snapshot(0, 100), snapshot(1, 200), snapshot(1, 300)]
    assert names(planned(spans, snapshots, segments, snapshots=3))[1] == ["i0-s1.seg"]
    plan = planned(spans, snapshots, segments, snapshots=2)
    assert names(plan)[1] == ["i0-s1.seg", "i0-s101.seg"]
    assert plan.collected == ((0, 1, 150), (1, 151, 200))


def test_snapshots_off_the_lineage_are_never_counted_as_kept() -> None:
    # Life 1 rewound to 100: what life 0 saved at 200 and 300 is void.
    spans = [Span(0, 1, 0, 100), Span(1, 1, 100, None)]
    snapshots = [snapshot(0, 100), snapshot(0, 200), snapshot(0, 300)]
    assert names(planned(spans, snapshots, [segment(0, 1)])) == ([], [])
    snapshots.append(snapshot(1, 200))
    assert names(planned(spans, snapshots, [segment(0, 1)])) == ([], ["i0-s1.seg"])
    snapshots.append(snapshot(1, 350))
    assert names(planned(spans, snapshots, [segment(0, 1)]))[0] == ["i0-s100"]
    assert names(planned(spans, snapshots, [segment(0, 1)], snapshots=1))[0] == [
        "i0-s100",
        "i0-s200",
        "i1-s200",
        "i0-s300",
    ]


def test_two_snapshots_of_one_step_count_once() -> None:
    spans = [Span(0, 1, 0, 100), Span(1, 1, 100, None)]
    snapshots = [snapshot(0, 50), snapshot(0, 100), snapshot(1, 100)]
    assert planned(spans, snapshots).removals == ()


def test_what_a_crash_left_of_older_snapshots_goes_too() -> None:
    leftovers = [snapshot(0, 50, complete=False), snapshot(0, 250, complete=False)]
    assert names(planned(ONE, SNAPSHOTS + leftovers))[0] == ["i0-s0", "i0-s50"]


def test_what_is_being_written_is_left_alone() -> None:
    # Life 1 begins afresh: its first snapshot, of step 0, is not complete yet.
    beginning = [snapshot(1, 0, complete=False), snapshot(1, 50)]
    plan = planned(ONE, SNAPSHOTS + beginning, [segment(1, 1), segment(1, 20)], snapshots=1)
    assert names(plan) == (["i0-s0", "i0-s100"], [])
    # Life 1 went back to 20, and is about to complete its first snapshot.
    spans = [Span(0, 1, 0, 20), Span(1, 1, 20, None)]
    snapshots = [snapshot(0, 0), snapshot(0, 10), snapshot(0, 20), snapshot(1, 15, complete=False)]
    assert names(planned(spans, snapshots, snapshots=1))[0] == ["i0-s0", "i0-s10"]


def test_the_step_an_incarnation_is_about_to_begin_from_stays() -> None:
    plan = planned(ONE, SNAPSHOTS, SEGMENTS, snapshots=1, bases=(60,))
    assert names(plan) == (["i0-s100"], ["i0-s101.seg", "i0-s151.seg"])


# The other rules


def test_every_kth_step_stays_with_the_snapshot_before_it() -> None:
    plan = planned(ONE, SNAPSHOTS, SEGMENTS, snapshots=1, every_steps=40)
    assert [(k.first, k.last) for k in plan.kept] == [(0, 80), (100, 160), (200, None)]
    assert plan.collected == ((0, 81, 100), (0, 161, 200))
    assert plan.removals == ()  # each segment has a step that is needed


def test_a_snapshot_at_a_kth_step_stays_alone() -> None:
    plan = planned(ONE, SNAPSHOTS, SEGMENTS, snapshots=1, every_steps=100)
    assert [(k.first, k.last) for k in plan.kept] == [(100, 100), (200, None)]
    assert names(plan) == (
        ["i0-s0"],
        ["i0-s1.seg", "i0-s51.seg", "i0-s101.seg", "i0-s151.seg"],
    )


def test_a_pinned_step_stays_with_what_leads_to_it() -> None:
    plan = planned(ONE, SNAPSHOTS, SEGMENTS, [Pin("best", 70, 0)], snapshots=1)
    assert names(plan) == (["i0-s100"], ["i0-s101.seg", "i0-s151.seg"])
    assert plan.kept[0] == Kept(0, 70, "pinned: best")
    pins = [Pin("a", 100, 0), Pin("b", 120, 0)]
    plan = planned(ONE, SNAPSHOTS, SEGMENTS, pins, snapshots=1)
    assert names(plan) == (["i0-s0"], ["i0-s1.seg", "i0-s51.seg", "i0-s151.seg"])
    assert plan.kept[0] == Kept(100, 120, "pinned: a; pinned: b")


def test_a_pin_of_a_step_that_the_run_went_back_before_keeps_nothing() -> None:
    spans = [Span(0, 1, 0, 50), Span(1, 1, 50, None)]
    snapshots = [snapshot(0, 0), snapshot(1, 100), snapshot(1, 200)]
    segments = [segment(0, 1), segment(0, 51), segment(1, 51), segment(1, 101), segment(1, 201)]
    void, valid = Pin("x", 70, 0), Pin("x", 70, 1)
    assert len(planned(spans, snapshots, segments, [void], snapshots=1).kept) == 1
    plan = planned(spans, snapshots, segments, [valid], snapshots=1)
    assert plan.kept[0] == Kept(0, 70, "pinned: x")
    assert [str(r.path) for r in plan.removals] == ["i1-s100", "r0/i0-s51.seg", "r0/i1-s101.seg"]


def test_young_snapshots_stay_and_the_newest_do_whatever_their_age() -> None:
    hour = 3600.0
    snapshots = [snapshot(0, s, written_seconds=s * hour) for s in (0, 1, 2, 3, 4)]
    for age_hours, now, oldest in ((2.5, 4, 2), (0.1, 4, 4), (0.1, 1000, 4), (100, 4, 0)):
        plan = planned(ONE, snapshots, snapshots=1, age_hours=age_hours, now_seconds=now * hour)
        assert plan.kept == (Kept(oldest, None, "the newest snapshots"),)
    # A clock that jumps back makes everything young.
    assert planned(ONE, snapshots, snapshots=1, age_hours=1, now_seconds=-9e9).removals == ()


def test_the_window_shrinks_until_all_fits() -> None:
    # 3 snapshots of 10 bytes, 5 segments of 1.
    for limit, oldest in ((35, 0), (34, 100), (23, 100), (22, 200), (11, 200), (1, 200)):
        plan = planned(ONE, SNAPSHOTS, SEGMENTS, snapshots=None, total_bytes=limit)
        assert plan.kept[-1].first == oldest, limit
    assert plan.bytes_kept == 11
    plan = planned(ONE, SNAPSHOTS, SEGMENTS, [Pin("x", 0, 0)], snapshots=3, total_bytes=1)
    assert names(plan)[0] == ["i0-s100"]


def test_what_is_void_goes_first_when_space_is_short() -> None:
    spans = [Span(0, 1, 0, 100), Span(1, 1, 100, None)]
    snapshots = [snapshot(0, 0), snapshot(0, 100), snapshot(0, 200), snapshot(1, 150)]
    segments = [segment(0, 1), segment(0, 101), segment(1, 101), segment(1, 151)]
    plan = planned(spans, snapshots, segments, snapshots=3, total_bytes=43)
    assert names(plan) == (["i0-s200"], ["i0-s101.seg"])
    assert {r.reason for r in plan.removals} == {"void: the run went back before it"}


@pytest.mark.parametrize(
    "policy",
    [
        {"snapshots": 0},
        {"every_steps": 0},
        {"age_hours": 0},
        {"age_hours": float("nan")},
        {"total_bytes": 0},
    ],
    ids=str,
)
def test_a_policy_that_cannot_work_is_refused(policy: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=str(next(iter(policy.values())))):
        Retention(**policy)


# A run with ranks, segments and retention, against what can really be rebuilt


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


# On files


def complete_run(root: Path, steps: list[int], world_size: int = 2) -> RunFolder:
    folder = RunFolder(root)
    create_run(folder, RUN_ID)
    for rank in range(world_size):
        write_fence(folder, fence(0, None, 0, world_size, rank))
        make_directory(folder.segments_of(rank))
        for step in steps:
            path = folder.snapshot(0, step)
            make_directory(path)
            shard_file(path, rank).write_bytes(b"shard")
            manifest = Manifest(RUN_ID, 0, step, rank, world_size, bytes=5, checksum=0)
            write_json(manifest_file(path, rank), asdict(manifest))
            folder.segment(0, rank, step + 1).write_bytes(b"segment")
    return folder


def on_disk(folder: RunFolder) -> tuple[list[int], list[tuple[int, int]]]:
    return (
        [step for _, step, _ in folder.snapshots()],
        [(rank, first) for _, rank, first, _ in folder.segments()],
    )


def test_collecting_removes_the_files_of_every_rank(tmp_path: Path) -> None:
    folder = complete_run(tmp_path / "run", [0, 10, 20, 30])
    collect(folder, RUN_ID, Retention(2))
    assert on_disk(folder) == ([20, 30], [(0, 21), (0, 31), (1, 21), (1, 31)])
    collect(folder, RUN_ID, Retention(2))  # nothing more to do
    assert on_disk(folder) == ([20, 30], [(0, 21), (0, 31), (1, 21), (1, 31)])


def test_a_snapshot_without_the_manifests_of_all_ranks_is_not_counted(tmp_path: Path) -> None:
    folder = complete_run(tmp_path / "run", [0, 10, 20])
    manifest_file(folder.snapshot(0, 20), 1).unlink()
    collect(folder, RUN_ID, Retention(1))
    assert on_disk(folder)[0] == [10, 20]


def test_a_collection_that_was_killed_halfway_is_finished_by_the_next(tmp_path: Path) -> None:
    folder = complete_run(tmp_path / "run", [0, 10, 20])
    for rank in range(2):  # its manifests went first
        manifest_file(folder.snapshot(0, 0), rank).unlink()
    collect(folder, RUN_ID, Retention(2))
    assert on_disk(folder)[0] == [10, 20]


class Killed(BaseException):
    """SIGKILL, as far as files are concerned."""


def test_killed_before_any_deletion_it_leaves_only_complete_things(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unlink, left = os.unlink, 0

    def counted(*arguments: Any, **options: Any) -> None:
        nonlocal left
        if left == 0:
            raise Killed
        left -= 1
        unlink(*arguments, **options)

    monkeypatch.setattr(os, "unlink", counted)
    for deletions in range(100):
        folder = complete_run(tmp_path / str(deletions), [0, 10, 20])
        left = deletions
        try:
            collect(folder, RUN_ID, Retention(1))
        except Killed:
            found = {s.step for s in complete_snapshots(folder, RUN_ID)}
            for step in found:  # whoever is listed is whole
                assert len(list(folder.snapshot(0, step).glob("rank-*.safetensors"))) == 2
            assert 20 in found
            assert read_notes(folder, RUN_ID).collected == Collected(((0, 1, 20),))
        else:
            break
    assert deletions == 2 * (2 + 2) + 2 * 2  # manifests and shards, then segments
    assert on_disk(folder) == ([20], [(0, 21), (1, 21)])


def test_a_power_failure_cannot_bring_back_manifests_without_their_tensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = complete_run(tmp_path / "run", [0, 10])
    unlink, fsync, done = os.unlink, os.fsync, list[str]()

    def log_unlink(path: Path, **options: Any) -> None:
        done.append(path.suffix)
        unlink(path, **options)

    def log_fsync(descriptor: int) -> None:
        done.append(f"fsync {Path(os.readlink(f'/proc/self/fd/{descriptor}')).name}")
        fsync(descriptor)

    monkeypatch.setattr(os, "unlink", log_unlink)
    monkeypatch.setattr(os, "fsync", log_fsync)
    collect(folder, RUN_ID, Retention(1))
    assert done[1:] == [
        "fsync run",  # what will be missing is written down
        *(".json", ".json", "fsync i000000-s0000000000", ".safetensors", ".safetensors"),
        *(".seg", ".seg"),
    ]


def test_where_an_incarnation_is_about_to_begin_is_read_from_its_first_fence(
    tmp_path: Path,
) -> None:
    folder = complete_run(tmp_path / "run", [0, 10, 20, 30])
    write_fence(folder, fence(1, 0, 15, 2))
    collect(folder, RUN_ID, Retention(1))
    assert on_disk(folder) == ([10, 30], [(0, 11), (0, 31), (1, 11), (1, 31)])
    write_fence(folder, fence(1, 0, 15, 2, rank=1))
    collect(folder, RUN_ID, Retention(1))  # it has begun: all beyond its base is void
    assert [step for step in on_disk(folder)[0] if step <= 15] == [10]


def test_a_shard_of_another_length_than_its_manifest_says_does_not_count(tmp_path: Path) -> None:
    folder = complete_run(tmp_path / "run", [0, 10, 20])
    shard_file(folder.snapshot(0, 20), 1).write_bytes(b"shar")
    collect(folder, RUN_ID, Retention(1))
    assert on_disk(folder)[0] == [10, 20]


def test_nothing_appears_where_a_run_was_unmounted(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        collect(RunFolder(tmp_path / "run"), RUN_ID, Retention(1))
    assert not (tmp_path / "run").exists()
