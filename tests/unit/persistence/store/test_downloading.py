"""Objects that arrived are kept when a later one does not."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lowdiff.errors import StoreError
from lowdiff.persistence.files.paths import RunFolder
from lowdiff.persistence.store.client import ObjectStore
from lowdiff.persistence.store.fetch import download


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
