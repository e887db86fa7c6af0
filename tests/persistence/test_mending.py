"""What is damaged in a long segment is fetched again, though the store's objects are shorter."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from lowdiff.errors import DamagedFile, RunMismatch
from lowdiff.persistence.catalog import scan
from lowdiff.persistence.fences import write_fence
from lowdiff.persistence.fetching import fetch_history
from lowdiff.persistence.framing import HEADER_BYTES, FileHeader, FileKind, RecordRef, read_records
from lowdiff.persistence.object_store import ObjectStore
from lowdiff.persistence.paths import RunFolder
from tests.persistence.made_runs import began, fence
from tests.persistence.writers import RUN_ID, append, log_of, settings_in, stored, writing
from tests.recovery.training import flip


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    """A closed life with steps 1 to 20 in one segment."""
    settings = settings_in(tmp_path)
    began(settings.folder)
    log = log_of(settings)
    for step in range(1, 21):
        append(log, step)
    with writing(settings):
        pass
    shutil.rmtree(settings.staging_root)
    return settings.folder


def records_of(path: Path) -> list[RecordRef]:
    data = path.read_bytes()
    return list(read_records(memoryview(data), FileHeader.unpack(data, path)))


def store_of(run: RunFolder, steps: range, objects: int) -> ObjectStore:
    """A store whose objects hold so many steps each."""
    store = shutil.copytree(run.root, run.root.with_name("store"))
    whole = run.segment(0, 0, 1).read_bytes()
    records = records_of(run.segment(0, 0, 1))
    (store / "segments/rank-0000/i000000-s0000000001.seg").unlink()
    for first in range(steps.start, steps.stop, objects):
        last = min(first + objects, steps.stop) - 1
        head = FileHeader(FileKind.SEGMENT, RUN_ID, 0, 0, 1, first).pack()
        data = head + whole[records[first - 1].offset : records[last - 1].end]
        (store / f"segments/rank-0000/i000000-s{first:010d}.seg").write_bytes(data)
    return ObjectStore(f"file://{store}")


@pytest.mark.parametrize("objects", [2, 7, 20])
@pytest.mark.parametrize("step", [1, 2, 5, 20])
def test_every_step_of_the_store_is_there_afterwards(
    run: RunFolder, objects: int, step: int
) -> None:
    store = store_of(run, range(1, 21), objects)
    path = run.segment(0, 0, 1)
    whole = path.read_bytes()
    flip(path, records_of(path)[step - 1].offset + HEADER_BYTES)
    fetch_history(store, run, None)
    assert scan(run).of(0, 0).ranges == [(1, 20)]
    assert sorted(set(stored(run))) == list(range(1, 21))
    if step <= objects:
        assert path.read_bytes() == whole


def test_what_follows_the_damage_counts_again_also_where_the_store_lacks_it(
    run: RunFolder,
) -> None:
    store = store_of(run, range(1, 7), 2)
    path = run.segment(0, 0, 1)
    flip(path, 8)  # its header
    fetch_history(store, run, None)
    assert scan(run).of(0, 0).ranges == [(1, 20)]


def test_a_damaged_object_takes_nothings_place(run: RunFolder, tmp_path: Path) -> None:
    store = store_of(run, range(1, 21), 20)
    path = run.segment(0, 0, 1)
    for damaged, step in ((path, 12), (tmp_path / "store" / run.name(path), 6)):
        flip(damaged, records_of(damaged)[step - 1].offset + HEADER_BYTES)
    fetch_history(store, run, None)
    assert scan(run).of(0, 0).ranges == [(1, 11)]


@pytest.mark.parametrize("num_items", [49, 51])
def test_a_segment_of_another_history_is_not_mended(
    run: RunFolder, tmp_path: Path, num_items: int
) -> None:
    store = store_of(run, range(1, 21), 20)
    path = run.segment(0, 0, 1)
    other = settings_in(tmp_path / "other")
    log = log_of(other)
    for step in range(1, 21):
        append(log, step, num_items=num_items)
    with writing(other):
        pass
    shutil.copy(other.folder.segment(0, 0, 1), path)
    flip(path, records_of(path)[11].offset + HEADER_BYTES)
    write_fence(run, fence(1, base=11))
    before = path.read_bytes()
    with pytest.raises(RunMismatch, match="different histories"):
        fetch_history(store, run, None)
    assert path.read_bytes() == before


@pytest.mark.parametrize("sought", [b'"run_id"', b'"float32"', b"{"])
def test_a_damaged_fence_is_replaced_by_the_stores(run: RunFolder, sought: bytes) -> None:
    """Wherever the bit flips: in a value, in a name, or so that it is no document any more."""
    store = store_of(run, range(1, 21), 20)
    path = run.fence(0, 0)
    whole = path.read_bytes()
    flip(path, whole.index(sought) + len(sought) // 2)
    fetch_history(store, run, None)
    assert path.read_bytes() == whole


def test_a_damaged_fence_is_named_where_the_stores_may_be_another_lifes(run: RunFolder) -> None:
    store = store_of(run, range(1, 21), 20)
    path = run.fence(0, 0)
    path.write_bytes(damaged := path.read_bytes()[:100])
    with pytest.raises(DamagedFile, match=r"rank-0000\.json.*; remove it to take that of file:"):
        fetch_history(store, run, None)
    assert path.read_bytes() == damaged


def test_a_damaged_fence_in_the_store_is_named(run: RunFolder) -> None:
    store = store_of(run, range(1, 21), 20)
    flip(run.root.with_name("store") / "incarnations/i000000/rank-0000.json", 1)
    with pytest.raises(DamagedFile, match=r"file:.*rank-0000\.json is damaged"):
        fetch_history(store, run, None)
