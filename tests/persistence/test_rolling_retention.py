"""Retention of rolling snapshots: a cycle's differentials stay with it, in a folder and in a store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lowdiff.persistence.durable import make_directory, write_json
from lowdiff.persistence.fences import create_run, write_fence
from lowdiff.persistence.fetching import Listing
from lowdiff.persistence.lineage import Span
from lowdiff.persistence.policy import Retention
from lowdiff.persistence.remote_retention import spent
from lowdiff.persistence.retention_plan import Kept, Pin
from lowdiff.persistence.snapshots import Manifest, manifest_file
from lowdiff.persistence.writer_settings import WriterSettings
from tests.persistence.made_runs import RUN_ID
from tests.persistence.retained import (
    ONE,
    SEGMENTS,
    fence,
    names,
    planned,
    segment,
    snapshot,
)

ROLLING = [snapshot(0, 0), snapshot(0, 100, first_base=1), snapshot(0, 200, first_base=101)]


ATOMIC = snapshot(0, 300)


def test_the_differentials_of_its_cycle_stay_with_a_snapshot() -> None:
    plan = planned(ONE, [*ROLLING, ATOMIC], SEGMENTS, snapshots=2)
    assert names(plan) == (["i0-s0", "i0-s100"], ["i0-s1.seg", "i0-s51.seg"])
    assert plan.kept == (Kept(200, None, "the newest snapshots", 101),)
    assert plan.collected == ((0, 1, 101),)


@pytest.mark.parametrize("policy", [{"snapshots": 1}, {"snapshots": None, "total_bytes": 1}])
def test_a_rolling_snapshot_is_never_the_only_one(policy: dict[str, Any]) -> None:
    """An atomic one may take its place: while it does, there is neither."""
    plan = planned(ONE, ROLLING, SEGMENTS, **policy)
    assert names(plan) == (["i0-s0"], [])
    assert plan.kept == (Kept(100, None, "the newest snapshots", 1),)
    replaced = [*ROLLING[:-1], snapshot(0, 200)]
    plan = planned(ONE, replaced, SEGMENTS, **policy)
    assert names(plan)[0] == ["i0-s0", "i0-s100"]
    assert plan.kept == (Kept(200, None, "the newest snapshots"),)
    # Where the run was opened again at that step, the other one stays what it is.
    again = [Span(0, 1, 0, 200), Span(1, 1, 200, None)]
    plan = planned(again, [*ROLLING, snapshot(1, 200)], SEGMENTS, **policy)
    assert names(plan)[0] == ["i0-s0", "i0-s100"]


def test_what_is_void_goes_under_pressure_beside_a_single_rolling_snapshot() -> None:
    void = [Span(0, 1, 0, 100), Span(2, 1, 100, None)]
    snapshots = [snapshot(0, 100, first_base=1), snapshot(1, 300)]
    plan = planned(void, snapshots, SEGMENTS, snapshots=None, total_bytes=1)
    assert names(plan)[0] == ["i1-s300"]


def test_a_first_cycle_needs_all_that_was_ever_logged() -> None:
    plan = planned(ONE, ROLLING, SEGMENTS, snapshots=2)
    assert names(plan) == (["i0-s0"], [])
    assert plan.collected == ((0, 1, 1),)


def test_a_pinned_step_keeps_the_cycle_it_is_replayed_on() -> None:
    later = [snapshot(0, step, first_base=step - 99) for step in (300, 400, 500)]
    segments = [segment(0, first) for first in range(1, 500, 50)]
    plan = planned(ONE, [*ROLLING, *later], segments, [Pin("best", 210, 0)], snapshots=2)
    assert plan.kept[0] == Kept(200, 210, "pinned: best", 101)
    gone = [f"i0-s{first}.seg" for first in (1, 51, 251)]
    assert names(plan) == (["i0-s0", "i0-s100", "i0-s300"], gone)
    assert plan.collected == ((0, 1, 101), (0, 211, 301))


def test_what_an_earlier_life_logged_goes_though_a_cycle_follows() -> None:
    spans = [Span(0, 1, 0, 150), Span(1, 1, 150, None)]
    snapshots = [snapshot(0, 100), snapshot(1, 200, first_base=151), snapshot(1, 300)]
    segments = [segment(0, 1), segment(0, 101), segment(1, 151)]
    plan = planned(spans, snapshots, segments, snapshots=2)
    assert names(plan) == (["i0-s100"], ["i0-s1.seg", "i0-s101.seg"])
    assert plan.collected == ((0, 1, 150), (1, 151, 151))


@pytest.mark.parametrize(
    ("is_rolling", "is_here", "is_there", "oldest"),
    [
        (True, True, True, 101),
        (False, True, True, 201),
        (False, True, False, 101),
        (False, False, False, 101),
    ],
)
def test_a_store_keeps_all_that_a_cycle_may_need(
    tmp_path: Path, is_rolling: bool, is_here: bool, is_there: bool, oldest: int
) -> None:
    """It is judged by names alone where a node does not have the store's manifest.

    ``is_there``: whether the store has the manifest that is here, or a longer one: a rolling shard's.
    Where a cycle began names lack.
    """
    settings = WriterSettings(
        run=str(tmp_path / "run"),
        staging_root="",
        run_id=RUN_ID,
        incarnation=0,
        rank=0,
        world_size=1,
        base_step=0,
        trainer_pid=1,
        batch_size=1,
        flush_seconds=1.0,
        retention=Retention(2),
        is_rolling=is_rolling,
    )
    create_run(settings.folder, RUN_ID)
    write_fence(settings.folder, fence(0, None, 0, 1))
    sizes: dict[str, int] = {}
    for step in (0, 100, 200, 300):
        name = settings.folder.name(settings.folder.snapshot(0, step))
        sizes |= {f"{name}/rank-0000.json": 10, f"{name}/rank-0000.safetensors": 10}
        if is_here:
            found = Manifest(RUN_ID, 0, step, 0, 1, 10, 0, 0 if is_rolling else None)
            path = manifest_file(settings.folder.snapshot(0, step), 0)
            make_directory(path.parent)
            write_json(path, found.document())
            sizes[settings.folder.name(path)] = path.stat().st_size + 20 * (not is_there)
    segments = [settings.folder.name(settings.folder.segment(0, 0, s.first)) for s in SEGMENTS]
    listing = Listing({**sizes, **dict.fromkeys(segments, 10)})
    gone = {path.name for path in spent(settings, listing, listing, segments)}
    left = sorted(Path(n).name for n in segments if Path(n).name not in gone)
    assert left[0] == f"i000000-s{oldest:010d}.seg"
