"""What a fetch brings: objects that arrived are kept, and what is damaged in a run folder comes again."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from lowdiff.errors import DamagedFile, RunMismatch, StoreError
from lowdiff.persistence.files.paths import RunFolder
from lowdiff.persistence.format.document import copy_of
from lowdiff.persistence.format.framing import HEADER_BYTES, FileHeader, RecordRef, read_records
from lowdiff.persistence.run.catalog import scan
from lowdiff.persistence.run.fences import write_fence
from lowdiff.persistence.store.client import ObjectStore
from lowdiff.persistence.store.fetch import download, fetch_differentials, fetch_history
from tests.unit.persistence.made_runs import began, fence
from tests.unit.persistence.writers import append, log_of, settings_in, writing
from tests.unit.recovery.training import flip


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


def store_of(run: RunFolder) -> ObjectStore:
    """A store that has all of it."""
    return ObjectStore(f"file://{shutil.copytree(run.root, run.root.with_name('store'))}")


@pytest.mark.parametrize("step", [0, 1, 5, 20])
def test_a_damaged_segment_is_replaced_by_the_stores(run: RunFolder, step: int) -> None:
    store = store_of(run)
    path = run.segment(0, 0, 1)
    whole = path.read_bytes()
    flip(path, records_of(path)[step - 1].offset + HEADER_BYTES if step else 8)
    fetch_history(store, run, None)
    assert scan(run, check_all=True).of(0, 0).ranges == [(1, 20)]
    assert path.read_bytes() == whole


def test_a_segment_that_is_shorter_here_is_replaced(run: RunFolder) -> None:
    store = store_of(run)
    path = run.segment(0, 0, 1)
    path.write_bytes(path.read_bytes()[: records_of(path)[11].end])
    fetch_history(store, run, None)
    assert scan(run, check_all=True).of(0, 0).ranges == [(1, 20)]


def test_a_damaged_object_takes_nothings_place(run: RunFolder, tmp_path: Path) -> None:
    store = store_of(run)
    path = run.segment(0, 0, 1)
    for damaged, step in ((path, 12), (tmp_path / "store" / run.name(path), 6)):
        flip(damaged, records_of(damaged)[step - 1].offset + HEADER_BYTES)
    fetch_history(store, run, None)
    assert scan(run, check_all=True).of(0, 0).ranges == [(1, 11)]


@pytest.mark.parametrize("num_items", [49, 51])
def test_a_segment_of_another_history_is_not_mended(
    run: RunFolder, tmp_path: Path, num_items: int
) -> None:
    store = store_of(run)
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
def test_a_damaged_fence_is_named(run: RunFolder, sought: bytes) -> None:
    """Wherever the bit flips: in a value, in a name, or so that it is no document any more."""
    store = store_of(run)
    path = run.fence(0, 0)
    whole = path.read_bytes()
    flip(path, whole.index(sought) + len(sought) // 2)
    fetch_history(store, run, None)  # its copy serves
    path.write_bytes(whole)
    copy_of(path).unlink()
    flip(path, whole.index(sought) + len(sought) // 2)
    damaged = path.read_bytes()
    with pytest.raises(DamagedFile, match=r"rank-0000\.json.*; remove it to take that of file:"):
        fetch_history(store, run, None)
    assert path.read_bytes() == damaged
    path.unlink()
    fetch_history(store, run, None)
    assert path.read_bytes() == whole


def test_a_damaged_fence_in_the_store_is_named(run: RunFolder) -> None:
    store = store_of(run)
    flip(run.root.with_name("store") / "incarnations/i000000/rank-0000.json", 1)
    with pytest.raises(DamagedFile, match=r"file:.*rank-0000\.json is damaged"):
        fetch_history(store, run, None)


@pytest.mark.cases(1)
@pytest.mark.parametrize("together", [False, True])
def test_a_fetch_that_ends_early_leaves_what_it_has_and_nothing_else(
    tmp_path: Path, together: bool
) -> None:
    store = ObjectStore(f"file://{tmp_path}/store", make=True)
    contents = {
        "segments/rank-0000/i000000-s0000000001.seg": b"",
        "segments/rank-0000/i000000-s0000000002.seg": b"one",
        "segments/rank-0001/i000000-s0000000002.seg": bytes(range(256)) * 130_000,  # three pieces
    }
    for name, data in contents.items():
        store.create(name, data)
    folder = RunFolder(tmp_path / "run")
    gone = "segments/rank-0001/i000000-s0000000009.seg"
    sizes = {**{name: len(data) for name, data in contents.items()}, gone: 5}
    with pytest.raises(StoreError, match="s0000000009"):
        download(store, folder, [*contents, gone], sizes, together=together)
    found = {folder.name(p): p.read_bytes() for p in folder.root.rglob("*") if p.is_file()}
    assert found == ({} if together else contents)
    download(store, folder, [*contents], sizes, together=together)
    found = {folder.name(p): p.read_bytes() for p in folder.root.rglob("*") if p.is_file()}
    assert found == contents


@pytest.mark.parametrize(
    "name",
    [
        "run.json",
        "segments/rank-0000/i000000-s0000000001.seg",
        "snapshots/i000000-s0000000000/rank-0000.safetensors",
    ],
)
def test_a_fetch_removes_what_a_killed_one_left_and_nothing_of_one_that_runs(
    tmp_path: Path, name: str
) -> None:
    store = ObjectStore(f"file://{tmp_path}/store", make=True)
    store.create(name, b"whole")
    folder = RunFolder(tmp_path / "run")
    path = folder.root / name
    path.parent.mkdir(parents=True)
    gone = 1 << 23  # above the kernel's largest process id
    for pid in (gone, os.getpid(), os.getppid()):
        path.with_name(f"{path.name}.{pid}.partial").write_bytes(b"longer than the whole file")
    download(store, folder, [name], {name: 5})
    found = {p.name: p.read_bytes() for p in path.parent.iterdir()}
    running = f"{path.name}.{os.getppid()}.partial"
    assert found == {path.name: b"whole", running: b"longer than the whole file"}


def test_behind_a_state_no_snapshot_is_fetched_and_what_it_passed_goes(
    run: RunFolder, tmp_path: Path
) -> None:
    store, here = store_of(run), RunFolder(shutil.copytree(run.root, tmp_path / "here"))
    assert fetch_differentials(store, here, 5) == [0]
    found = scan(here, check_all=True)
    assert (found.snapshots, list(found.incarnations)) == ((), [0])
    assert found.of(0, 0).ranges == [(1, 20)]
    path = here.segment(0, 0, 1)
    path.unlink()
    fetch_differentials(store, here, 5)
    assert path.is_file()
