"""Objects that arrived are kept when a later one does not."""

from __future__ import annotations

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
