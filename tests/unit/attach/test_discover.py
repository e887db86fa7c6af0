"""What ranks share of their run folders, and which of them adopts what dead ones left."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lowdiff.attach import discover
from lowdiff.attach.discover import shared_out, visible_files
from lowdiff.compressors import TopK
from lowdiff.model.ranks import Ranks
from lowdiff.persistence.files.paths import StagingFolder
from lowdiff.settings import Settings


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


@pytest.mark.parametrize(
    ("seers", "made_by", "heir"), [((2, 3, 4), 3, 3), ((2, 3, 4), 4, 4), ((2, 3, 4), 0, 2)]
)
def test_the_rank_that_made_a_folder_adopts_it_if_it_sees_it(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    seers: tuple[int, ...],
    made_by: int,
    heir: int,
) -> None:
    monkeypatch.setattr(discover, "is_known", lambda stage, folder: True)
    stage = StagingFolder.of(tmp_path, "0" * 32, 0, made_by)

    class OneOf(Ranks):
        def __init__(self, rank: int) -> None:
            super().__init__(None)
            self.rank = rank

        def gather(self, value: Any) -> list[Any]:
            return [value if rank in seers else type(value)() for rank in range(6)]

    settings = Settings(tmp_path / "run", TopK(0.01), snapshot_every=8, batch_size=2)
    assert [r for r in seers if shared_out(settings, OneOf(r), stage.run_id, [stage])] == [heir]
