"""Listing a run folder that is in use."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from lowdiff.persistence.files.durable import make_directory
from lowdiff.persistence.files.paths import RunFolder
from lowdiff.persistence.store.fetch import Listing


def test_what_vanishes_while_a_folder_is_listed_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Partial files come and go, and retention removes whole snapshots."""
    folder = RunFolder(tmp_path)
    for name in ("run.json", "pins/a.json", "pins/a.json.1234.partial"):
        make_directory((tmp_path / name).parent)
        (tmp_path / name).write_bytes(b"12345")
    (tmp_path / "link").symlink_to(tmp_path / "run.json")
    lstat = Path.lstat

    def looking(path: Path) -> os.stat_result:
        if path.suffix == ".partial":
            path.unlink()
        return lstat(path)

    monkeypatch.setattr(Path, "lstat", looking)
    assert Listing.of_folder(folder).sizes == {"run.json": 5, "pins/a.json": 5}
    assert Listing.of_folder(RunFolder(tmp_path / "nowhere")).sizes == {}


def test_a_folder_that_cannot_be_listed_is_no_empty_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(path: object) -> object:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "scandir", broken)
    with pytest.raises(OSError, match="Input/output"):
        Listing.of_folder(RunFolder(tmp_path))


def test_what_else_lies_in_a_run_folder_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A volume's root has a ``lost+found`` that only root may list."""
    for name in ("run.json", "pins/a.json", "lost+found/file", "data/images/file"):
        make_directory((tmp_path / name).parent)
        (tmp_path / name).write_bytes(b"12345")
    (tmp_path / "segments").symlink_to(tmp_path / "data")
    listed = os.scandir

    def scandir(path: Path) -> Iterator[os.DirEntry[str]]:
        if Path(path).name in ("lost+found", "data"):
            raise PermissionError(13, "Permission denied", str(path))
        return listed(path)

    monkeypatch.setattr(os, "scandir", scandir)
    assert Listing.of_folder(RunFolder(tmp_path)).sizes == {"run.json": 5, "pins/a.json": 5}
