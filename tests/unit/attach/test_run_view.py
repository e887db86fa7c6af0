"""What ranks share of their run folders is listed, and nothing else is entered."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from lowdiff.attach.discover import visible_files


def test_only_a_runs_own_folders_are_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("segments/rank-0000", "segments/rank-0001", "lost+found", "snapshots/i0"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "file").touch()
    (tmp_path / "segments/link").symlink_to(tmp_path / "snapshots")
    listed = os.scandir

    def scandir(path: str) -> Iterator[os.DirEntry[str]]:
        name = Path(path).name
        if name in ("lost+found", "rank-0001"):
            raise PermissionError(path)
        if name == "i0":
            raise FileNotFoundError(path)
        return listed(path)

    monkeypatch.setattr(os, "scandir", scandir)
    assert sorted(visible_files(tmp_path)) == ["segments/rank-0000/file"]
