"""Retention frees what is old and never what the newest recoverable step needs."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowdiff.persistence.catalog import SnapshotSet
from lowdiff.persistence.durable import make_directory, write_json
from lowdiff.persistence.fences import create_run, write_fence
from lowdiff.persistence.lineage import Span, lineage
from lowdiff.persistence.paths import RunFolder
from lowdiff.persistence.retention import Collection, StoredSegment, collect, plan_collection
from lowdiff.persistence.snapshots import Manifest, manifest_file, shard_file
from lowdiff.types import Environment, Fence, Layout

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
        layout=Layout(()),
        optimizers=(),
        compressor={},
        names={},
    )


def snapshot(incarnation: int, step: int) -> SnapshotSet:
    return SnapshotSet(incarnation, step, Path(f"i{incarnation}-s{step}"), ())


def segment(incarnation: int, first: int) -> StoredSegment:
    return StoredSegment(incarnation, first, Path(f"i{incarnation}-s{first}.seg"))


def plan(
    spans: list[Span], snapshots: list[SnapshotSet], segments: list[StoredSegment], keep: int
) -> tuple[list[str], list[str]]:
    folders = [(s.step, s.folder) for s in snapshots]
    planned = plan_collection(spans, snapshots, segments, keep, folders=folders)
    return [p.name for p in planned.snapshots], [p.name for p in planned.segments]


ONE = [Span(0, 1, 0, None)]
SNAPSHOTS = [snapshot(0, 0), snapshot(0, 100), snapshot(0, 200)]
SEGMENTS = [segment(0, first) for first in (1, 51, 101, 151, 201)]


def test_the_newest_snapshots_stay_with_the_differentials_after_the_oldest_of_them() -> None:
    assert plan(ONE, SNAPSHOTS, SEGMENTS, keep=2) == (["i0-s0"], ["i0-s1.seg", "i0-s51.seg"])
    assert plan(ONE, SNAPSHOTS, SEGMENTS, keep=1) == (
        ["i0-s0", "i0-s100"],
        ["i0-s1.seg", "i0-s51.seg", "i0-s101.seg", "i0-s151.seg"],
    )


def test_nothing_goes_while_there_are_not_more_snapshots_than_to_be_kept() -> None:
    assert plan(ONE, SNAPSHOTS, SEGMENTS, keep=3) == ([], [])
    assert plan(ONE, SNAPSHOTS, SEGMENTS, keep=4) == ([], [])
    assert plan_collection([], [], [], 1) == Collection((), ())


def test_a_segment_that_reaches_beyond_the_oldest_kept_snapshot_stays() -> None:
    segments = [segment(0, 1), segment(0, 102), segment(0, 201)]
    assert plan(ONE, SNAPSHOTS, segments, keep=2) == (["i0-s0"], [])


def test_the_newest_segment_of_the_newest_incarnation_always_stays() -> None:
    assert plan(ONE, SNAPSHOTS, [segment(0, 1)], keep=1)[1] == []


def test_segments_of_an_earlier_life_end_where_the_later_one_begins() -> None:
    spans = [Span(0, 1, 0, 150), Span(1, 1, 150, None)]
    segments = [segment(0, 1), segment(0, 101), segment(1, 151)]
    snapshots = [snapshot(0, 100), snapshot(1, 200), snapshot(1, 300)]
    assert plan(spans, snapshots, segments, keep=3)[1] == ["i0-s1.seg"]
    assert plan(spans, snapshots, segments, keep=2)[1] == ["i0-s1.seg", "i0-s101.seg"]


def test_snapshots_off_the_lineage_are_never_counted_as_kept() -> None:
    # Life 1 rewound to 100: what life 0 saved at 200 and 300 is void.
    spans = [Span(0, 1, 0, 100), Span(1, 1, 100, None)]
    snapshots = [snapshot(0, 100), snapshot(0, 200), snapshot(0, 300)]
    assert plan(spans, snapshots, [segment(0, 1)], keep=2) == ([], [])
    snapshots.append(snapshot(1, 200))
    assert plan(spans, snapshots, [segment(0, 1)], keep=2) == ([], ["i0-s1.seg"])
    snapshots.append(snapshot(1, 350))
    assert plan(spans, snapshots, [segment(0, 1)], keep=2)[0] == ["i0-s100"]
    assert plan(spans, snapshots, [segment(0, 1)], keep=1)[0] == [
        "i0-s100",
        "i0-s200",
        "i0-s300",
        "i1-s200",
    ]


def test_two_snapshots_of_one_step_count_once() -> None:
    spans = [Span(0, 1, 0, 100), Span(1, 1, 100, None)]
    snapshots = [snapshot(0, 50), snapshot(0, 100), snapshot(1, 100)]
    assert plan(spans, snapshots, [], keep=2) == ([], [])


def test_what_a_crash_left_of_older_snapshots_goes_too() -> None:
    folders = [(50, Path("half-written")), (200, Path("being-written"))]
    planned = plan_collection(ONE, SNAPSHOTS, [], 2, folders=folders)
    assert planned.snapshots == (Path("half-written"),)


# A run with ranks, segments and retention, against what can really be rebuilt


class Run:
    def __init__(self, keep: int) -> None:
        self.keep = keep
        self.fences: dict[int, Fence] = {}
        self.num_incarnations = 0
        self.step = 0
        self.snapshots: list[SnapshotSet] = []
        #: (rank, segment) -> its steps
        self.segments: dict[tuple[int, StoredSegment], list[int]] = {}
        self.open: dict[int, list[int]] = {}
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
                    self.segments[rank, segment(number, self.step)] = self.open[rank]
                self.open[rank].append(self.step)

    def snapshot(self) -> None:
        self.snapshots.append(snapshot(max(self.fences), self.step))
        self.open = {}

    def usable(self) -> set[int]:
        spans = {s.incarnation: s for s in lineage(self.fences)}
        return {
            s.step
            for s in self.snapshots
            if s.incarnation in spans and spans[s.incarnation].holds(s.step)
        }

    def recoverable(self) -> set[int]:
        stored = {
            (segment.incarnation, rank, step)
            for (rank, segment), steps in self.segments.items()
            for step in steps
        }
        found = set()
        for base in self.usable():
            step = base
            while True:
                found.add(step)
                step += 1
                owner = next((s for s in lineage(self.fences) if s.owns(step)), None)
                if owner is None or not all(
                    (owner.incarnation, rank, step) in stored for rank in range(owner.world_size)
                ):
                    break
        return found

    def collect(self) -> None:
        spans = lineage(self.fences)
        folders = [(s.step, s.folder) for s in self.snapshots]
        for rank in range(3):
            own = [segment for r, segment in self.segments if r == rank]
            spent = plan_collection(spans, self.snapshots, own, self.keep).segments
            for segment in own:
                if segment.path in spent:
                    del self.segments[rank, segment]
        old = plan_collection(spans, self.snapshots, (), self.keep, folders=folders).snapshots
        self.snapshots = [s for s in self.snapshots if s.folder not in old]


actions: st.SearchStrategy[tuple[str, dict[str, Any]]] = st.one_of(
    st.tuples(
        st.just("train"),
        st.fixed_dictionaries({"rolls": st.lists(st.integers(0, 7), min_size=1, max_size=6)}),
    ),
    st.tuples(st.just("snapshot"), st.just({})),
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


@given(st.lists(actions, max_size=25), st.integers(1, 3))
def test_no_step_after_the_oldest_kept_snapshot_is_ever_lost(
    sequence: list[tuple[str, dict[str, Any]]], keep: int
) -> None:
    run = Run(keep)
    for name, arguments in sequence:
        getattr(run, name)(**arguments)
        usable, before = run.usable(), run.recoverable()
        run.collect()
        kept = sorted(usable)[-keep:]
        assert set(kept) <= run.usable()
        assert run.recoverable() >= {step for step in before if step >= kept[0]}
        assert max(run.recoverable()) == max(before) == run.step


@given(st.lists(actions, max_size=25), st.integers(1, 3))
def test_whatever_is_kept_is_of_use(sequence: list[tuple[str, dict[str, Any]]], keep: int) -> None:
    run = Run(keep)
    for name, arguments in sequence:
        getattr(run, name)(**arguments)
    usable = sorted(run.usable())
    run.collect()
    if len(usable) >= keep:
        oldest = usable[-keep]
        assert all(s.step >= oldest for s in run.snapshots)
        for (rank, kept), steps in run.segments.items():
            later = [s for r, s in run.segments if r == rank and s.incarnation == kept.incarnation]
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


def names(folder: RunFolder) -> tuple[list[int], list[tuple[int, int]]]:
    return (
        [step for _, step, _ in folder.snapshots()],
        [(rank, first) for _, rank, first, _ in folder.segments()],
    )


def test_collecting_removes_the_files_of_every_rank(tmp_path: Path) -> None:
    folder = complete_run(tmp_path / "run", [0, 10, 20, 30])
    collect(folder, RUN_ID, 2)
    assert names(folder) == ([20, 30], [(0, 21), (0, 31), (1, 21), (1, 31)])
    collect(folder, RUN_ID, 2)  # nothing more to do
    assert names(folder) == ([20, 30], [(0, 21), (0, 31), (1, 21), (1, 31)])


def test_a_snapshot_without_the_manifests_of_all_ranks_is_not_counted(tmp_path: Path) -> None:
    folder = complete_run(tmp_path / "run", [0, 10, 20])
    manifest_file(folder.snapshot(0, 20), 1).unlink()
    collect(folder, RUN_ID, 1)
    assert names(folder)[0] == [10, 20]


def test_a_collection_that_was_killed_halfway_is_finished_by_the_next(tmp_path: Path) -> None:
    folder = complete_run(tmp_path / "run", [0, 10, 20])
    for rank in range(2):  # its manifests went first
        manifest_file(folder.snapshot(0, 0), rank).unlink()
    collect(folder, RUN_ID, 2)
    assert names(folder)[0] == [10, 20]


def test_a_snapshots_manifests_go_before_its_tensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = complete_run(tmp_path / "run", [0, 10])
    monkeypatch.setattr("shutil.rmtree", lambda *_, **__: None)  # killed right before it
    collect(folder, RUN_ID, 1)
    left = sorted(path.name for path in folder.snapshot(0, 0).iterdir())
    assert left == ["rank-0000.safetensors", "rank-0001.safetensors"]
