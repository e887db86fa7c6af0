"""A footer lists what its segment holds; a footer that promises too much costs no step that is there."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lowdiff.errors import DamagedFile, StepNotFound
from lowdiff.persistence.files.paths import RunFolder
from lowdiff.persistence.format.framing import HEADER_BYTES, FileHeader, RecordHeader
from lowdiff.persistence.format.image import shard_file
from lowdiff.persistence.format.segment_file import SegmentFile
from lowdiff.persistence.run.catalog import Catalog, scan
from lowdiff.persistence.run.fences import create_run, write_fence
from lowdiff.persistence.store.client import ObjectStore
from lowdiff.persistence.store.fetch import fetch_history
from lowdiff.recovery.inspect.inspection import inspect
from lowdiff.recovery.plan import plan_recovery, recoverable
from tests.unit.persistence.made_runs import RUN_ID, began, fence, segment, stage
from tests.unit.recovery.training import flip


def made(root: Path, batches: Sequence[Sequence[int]], incarnation: int = 0) -> RunFolder:
    """A run of small segments, sealed where their steps are unbroken."""
    run = RunFolder(root)
    create_run(run, RUN_ID)
    if incarnation == 0:
        began(run)
        shard_file(run.snapshot(0, 0), 0).touch()
    staging = root.parent / f"staging-{incarnation}"
    log = stage(staging, sorted({step for batch in batches for step in batch}), incarnation)
    for batch in batches:
        segment(run, log, batch, seals=batch == list(range(batch[0], batch[-1] + 1)))
    shutil.rmtree(staging)
    return run


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """A run of four segments."""
    return made(tmp_path / "run", [[1, 2], [3, 4], [5, 6], [7]])


def rot(path: Path, step: int) -> None:
    """Let a bit of a step's record flip."""
    record = SegmentFile(path).record(step)
    assert record is not None
    flip(path, record.offset + HEADER_BYTES)


def what_it_holds(catalog: Catalog) -> tuple[object, ...]:
    steps = {key: list(records) for key, records in catalog.records.items()}
    bodies = {key: [bytes(r.record.body) for r in v.values()] for key, v in catalog.records.items()}
    sizes = {key: v.framed_bytes(0, 99) for key, v in catalog.records.items()}
    return steps, bodies, sizes, catalog.damage, recoverable(catalog)


def test_footers_list_what_a_reading_finds(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = what_it_holds(scan(folder, check_all=True))
    assert what_it_holds(scan(folder)) == expected
    with monkeypatch.context() as patched:
        patched.setattr(RecordHeader, "unpack", lambda *_: pytest.fail("a record was read"))
        assert recoverable(scan(folder)) == [(0, 7)]


def test_a_plan_reads_only_the_segments_it_uses(folder: RunFolder) -> None:
    for first in (3, 5, 7):
        flip(folder.segment(0, 0, first), HEADER_BYTES)
    assert plan_recovery(scan(folder), 2).step == 2


@pytest.mark.parametrize("place", ["offsets", "trailer", "cut"])
def test_a_segment_with_a_damaged_footer_is_read(folder: RunFolder, place: str) -> None:
    path = folder.segment(0, 0, 3)
    size = path.stat().st_size
    if place == "cut":
        path.write_bytes(path.read_bytes()[:-3])
    else:
        flip(path, size - 65 if place == "offsets" else size - 20)
    found = scan(folder)
    assert recoverable(found) == [(0, 7)]
    assert [error.path for error in found.damage] == [path]


@pytest.mark.parametrize("step", [None, 4])
def test_bits_that_flip_behind_a_footer_are_found_before_they_are_used(
    folder: RunFolder, step: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    path = folder.segment(0, 0, 3)
    rot(path, 4)
    found = scan(folder)
    assert recoverable(found) == [(0, 7)], "as the footer has it"
    if step is None:
        assert plan_recovery(found).step == 3, "the last good one"
    else:
        with pytest.raises(StepNotFound, match="step 4 is missing"):
            plan_recovery(found, step)
    assert f"{path} is damaged" in caplog.text
    assert [error.path for error in found.damage] == [path]
    checked = scan(folder, check_all=True)
    assert [error.path for error in checked.damage] == [path]
    assert recoverable(checked) == recoverable(found) == [(0, 3)]


def test_what_another_segment_has_of_a_damaged_one_is_found(tmp_path: Path) -> None:
    run = made(tmp_path / "run", [[1, 2, 3, 4, 5, 6], [3, 4, 5, 6]])
    rot(run.segment(0, 0, 1), 4)
    found = scan(run)
    assert plan_recovery(found).step == 6
    assert [error.path for error in found.damage] == [run.segment(0, 0, 1)]


def test_each_part_of_a_segment_is_read(tmp_path: Path) -> None:
    run = made(tmp_path / "run", [[1, 2, 7], [3, 4, 5, 6, 7, 8]])  # the first has a gap
    rot(run.segment(0, 0, 3), 4)
    records = scan(run).of(0, 0)
    assert records.confirm(8, 8)
    assert not records.confirm(3, 4)


@pytest.mark.parametrize("change", [{"run_id": "ff" * 16}, {"incarnation": 1}, {"rank": 1}])
def test_a_segment_of_another_owner_is_none(folder: RunFolder, change: dict[str, Any]) -> None:
    path = folder.segment(0, 0, 3)
    data = path.read_bytes()
    header = replace(FileHeader.unpack(data, path), **change)
    path.write_bytes(header.pack() + data[HEADER_BYTES:])
    found = scan(folder)
    assert plan_recovery(found).step == 2
    assert ["it belongs to another" in str(error) for error in found.damage] == [True]


def test_a_segment_that_goes_after_it_was_listed_is_missed_where_it_is_read(
    folder: RunFolder,
) -> None:
    found = scan(folder)
    folder.segment(0, 0, 5).unlink()
    plan = plan_recovery(found)
    with pytest.raises(DamagedFile, match="step 5 should be in it and is not"):
        [planned.shards for planned in plan.steps]


def test_what_a_fence_made_void_stays_void(folder: RunFolder) -> None:
    write_fence(folder, fence(1, base=4))
    made(folder.root, [[5, 6, 7, 8]], incarnation=1)
    plan = plan_recovery(scan(folder))
    assert [(s.incarnation, s.step) for s in plan.steps] == [
        *((0, step) for step in range(1, 5)),
        *((1, step) for step in range(5, 9)),
    ]
    differentials = inspect(folder.root, staging=folder.root / "none").differentials
    assert differentials is not None
    assert (differentials.first, differentials.last, differentials.count) == (1, 8, 8)


def test_a_store_gives_what_rotted_behind_a_footer(tmp_path: Path) -> None:
    run = made(tmp_path / "run", [[1, 2, 3, 4], [5, 6]])
    store = tmp_path / "store"
    shutil.copytree(run.root, store)
    rot(run.segment(0, 0, 1), 4)
    fetch_history(ObjectStore(f"file://{store}"), run, None)
    assert plan_recovery(scan(run)).step == 6
