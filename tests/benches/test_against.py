"""Two commits under one bench."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from benches import against


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_this_tree_is_as_fast_as_its_last_commit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    against.main(["HEAD", "bench_codec", "--out", str(tmp_path), "--smoke"])
    summary = json.loads((tmp_path / "against.json").read_text())["summary"]
    assert "encode_entries_per_second/upper95" in summary
    assert summary["bytes_per_entry_float32/difference"] == 0
    assert "bytes_per_entry_float32" in capsys.readouterr().out
    trees = subprocess.check_output(["git", "worktree", "list"], cwd=against.ROOT, text=True)
    assert "lowdiff-against" not in trees


def test_an_unknown_commit_is_named(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="no work tree of 'nonsense'"):
        against.main(["nonsense", "bench_codec", "--out", str(tmp_path)])


@pytest.mark.slow
def test_a_slower_tree_is_told_from_noise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    turns = {"this": iter([1.2, 1.3, 1.25, 1.2]), "other": iter([1.0, 1.1, 0.95, 1.05] * 4)}

    def run(tree: Path, bench: str, options: list[str]) -> against.Figures:
        arm = "this" if tree == against.ROOT else "other"
        return {"seconds": next(turns[arm]), "zero": 0.0, f"only_{arm}": 1.0}

    monkeypatch.setattr(against, "run", run)
    against.main(
        ["HEAD", "bench_codec", "--out", str(tmp_path), "--rounds", "2", "--", "--steps", "3"]
    )
    record = json.loads((tmp_path / "against.json").read_text())
    assert {name.rpartition("/")[0] for name in record["summary"]} == {"seconds"}
    assert record["settings"]["options"] == ["--steps", "3"]
    summary = record["summary"]
    assert 0.1 < summary["seconds/difference"] <= summary["seconds/upper95"]
    assert len(record["samples"]["other"]) == 12
    assert (tmp_path / "against.png").stat().st_size > 1000
