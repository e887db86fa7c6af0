"""An index that is wrong about files it fits costs a reading, and no step that is there."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lowdiff.errors import StepNotFound
from lowdiff.persistence import segment_index, segment_scan
from lowdiff.persistence.catalog import scan
from lowdiff.persistence.fetching import fetch_history
from lowdiff.persistence.framing import HEADER_BYTES, FileHeader
from lowdiff.persistence.object_store import ObjectStore
from lowdiff.persistence.paths import RunFolder
from lowdiff.persistence.segment_file import SegmentFile
from lowdiff.persistence.segment_index import write_index
from lowdiff.recovery.plan import plan_recovery, recoverable
from tests.persistence.indexed_runs import (
    index_file,
    index_of,
    indexed,
    made,
    records_end,
    tampered,
)
from tests.persistence.made_runs import RUN_ID


@pytest.fixture(autouse=True)
def _small_runs_are_worth_an_index(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment_index, "_WORTH_RECORDS", 1)


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """A run of four segments, with an index of all of them."""
    return indexed(tmp_path / "run")


def rot(path: Path, step: int) -> None:
    """Let a bit of a step's record flip."""
    record = SegmentFile(path).record(step)
    assert record is not None
    data = bytearray(path.read_bytes())
    data[record.offset + HEADER_BYTES] ^= 1
    tampered(path, bytes(data))


@pytest.mark.parametrize("step", [None, 4])
def test_bits_that_flip_behind_the_index_are_found_before_they_are_used(
    folder: RunFolder, step: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    path = folder.segment(0, 0, 3)
    data = bytearray(path.read_bytes())
    data[records_end(path) - 10] ^= 1  # in the record of step 4
    tampered(path, bytes(data))
    assert recoverable(scan(folder)) == [(0, 7)], "as the index has it"

    found = scan(folder)
    if step is None:
        assert plan_recovery(found).step == 3, "the last good one"
    else:
        with pytest.raises(StepNotFound, match="step 4 is missing"):
            plan_recovery(found, step)
    assert f"{path.parent} do not hold what their index says" in caplog.text
    assert f"{path} is damaged" in caplog.text
    assert [error.path for error in found.damage] == [path]
    assert not index_file(folder).exists()
    checked = scan(folder, check_all=True)
    assert [error.path for error in checked.damage] == [path]
    assert recoverable(scan(folder)) == recoverable(checked) == [(0, 3)]


@pytest.mark.parametrize(
    ("first", "changes", "listed"),
    [
        (7, {"last": 8}, 8),
        (5, {"last": 5}, 5),
        (7, {"rebases": (7,)}, 6),
        (3, {"rebases": (4,)}, 3),
        (5, {"last": 5, "bytes": 1000}, 7),
        (5, {"last": 5, "mtime_ns": 1}, 7),
        (2, {"first": 2}, 7),
    ],
    ids=[
        *("a step more", "a step less", "the last cannot be replayed", "another cannot"),
        *("another length", "another time", "no such file"),
    ],
)
def test_an_index_that_lies_leads_to_no_wrong_plan(
    folder: RunFolder, first: int, changes: dict[str, Any], listed: int
) -> None:
    entries = index_of(folder)
    lie = replace(entries.get((0, first), entries[0, 1]), **changes)
    for step in (None, 7):
        write_index(folder.segments_of(0), RUN_ID, 0, {**entries, lie.key: lie}.values())
        found = scan(folder)
        assert recoverable(found)[0] == (0, listed)
        plan = plan_recovery(found, step)
        shards = [shard for planned in plan.steps for shard in planned.shards]
        assert [shard.record.header.step for shard in shards] == list(range(1, 8))
        if step is None:
            assert recoverable(found) == [(0, 7)]


def test_nothing_is_believed_when_everything_is_checked(folder: RunFolder) -> None:
    path = folder.segment(0, 0, 3)
    tampered(path, bytes(path.stat().st_size))
    before = index_file(folder).read_bytes()
    found = scan(folder, check_all=True)
    assert recoverable(found) == [(0, 2)]
    assert [error.path for error in found.damage] == [path]
    assert index_file(folder).read_bytes() == before
    index_file(folder).unlink()
    scan(folder, check_all=True)
    assert not index_file(folder).exists(), "verify writes nothing"


@pytest.mark.parametrize("is_read_only", [False, True])
def test_a_header_that_rots_behind_the_index_ends_the_way_before_it(
    folder: RunFolder, is_read_only: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_read_only:
        monkeypatch.setattr(segment_scan, "forget_index", lambda path: None)
    path = folder.segment(0, 0, 3)
    data = bytearray(path.read_bytes())
    data[20] ^= 1
    tampered(path, bytes(data))
    for _ in range(2):
        found = scan(folder)
        assert plan_recovery(found).step == 2
        assert [error.path for error in found.damage] == [path]


def test_what_another_segment_has_of_a_damaged_one_is_found(tmp_path: Path) -> None:
    run = indexed(tmp_path / "run", [[1, 2, 3, 4, 5, 6], [3, 4, 5, 6]])
    rot(run.segment(0, 0, 1), 4)
    found = scan(run)
    assert plan_recovery(found).step == 6
    assert [error.path for error in found.damage] == [run.segment(0, 0, 1)]


def test_damage_is_listed_once(folder: RunFolder) -> None:
    torn = folder.segment(0, 0, 7)
    torn.write_bytes(torn.read_bytes()[:-3])
    rot(folder.segment(0, 0, 3), 4)
    found = scan(folder)
    assert [error.path for error in found.damage] == [torn]
    plan_recovery(found)
    assert [error.path for error in found.damage] == [folder.segment(0, 0, 3), torn]


@pytest.mark.parametrize("change", [{"run_id": "ff" * 16}, {"incarnation": 1}, {"rank": 1}])
def test_a_segment_of_another_owner_is_none(folder: RunFolder, change: dict[str, Any]) -> None:
    path = folder.segment(0, 0, 3)
    data = path.read_bytes()
    header = replace(FileHeader.unpack(data, path), **change)
    tampered(path, header.pack() + data[HEADER_BYTES:])
    found = scan(folder)
    assert plan_recovery(found).step == 2
    assert ["it belongs to another" in str(error) for error in found.damage] == [True]


def test_a_store_gives_what_rotted_behind_the_index(tmp_path: Path) -> None:
    run = indexed(tmp_path / "run", [[1, 2, 3, 4], [5, 6]])
    store = made(tmp_path / "store" / "run", [[1, 2], [3, 4], [5, 6]])
    for name in ("incarnations", "snapshots"):
        shutil.rmtree(store.root / name)
        shutil.copytree(run.root / name, store.root / name)
    shutil.copy(run.run_file, store.run_file)
    rot(run.segment(0, 0, 1), 4)
    fetch_history(ObjectStore(f"file://{store.root}"), run, None)
    assert plan_recovery(scan(run)).step == 6


def test_each_part_of_a_segment_is_confirmed(tmp_path: Path) -> None:
    run = made(tmp_path / "run", [[1, 2, 7], [3, 4, 5, 6, 7, 8]])  # the first has a gap
    scan(run)
    assert list(index_of(run)) == [(0, 3)]
    rot(run.segment(0, 0, 3), 4)
    records = scan(run).of(0, 0)
    assert records.confirm(8, 8)
    assert not records.confirm(3, 4)
