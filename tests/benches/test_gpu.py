"""The command of the GPU day, tried on the CPU at smoke size."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benches.gpu import day, parts
from benches.gpu.parts import PARTS, SUMMARY, Bench, Figures, summary_of
from benches.harness import versions

ROOT = Path(__file__).parents[2]


def command(*words: object, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "benches.gpu", *map(str, words)],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.launch
@pytest.mark.timeout(400)
def test_every_part_runs_at_smoke_size_and_leaves_the_figures_that_others_read(
    tmp_path: Path,
) -> None:
    ended = command("--out", tmp_path, "--smoke", "--device", "cpu")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    record = json.loads((tmp_path / "gpu.json").read_text())
    assert record["samples"].keys() == PARTS.keys()
    assert record["summary"].keys() == SUMMARY.keys()
    assert record["summary"]["bit_identical"] is True
    assert record["samples"]["rotation"]["rounds"] == 2
    assert (tmp_path / "gpu.png").stat().st_size > 1000


def test_without_a_gpu_it_says_so_in_one_line(tmp_path: Path) -> None:
    ended = command("--out", tmp_path / "none", CUDA_VISIBLE_DEVICES="")
    assert ended.returncode == 1
    assert ended.stdout == "make gpu: torch finds no CUDA device here; nothing was measured\n"
    assert not ended.stderr
    assert not (tmp_path / "none").exists()


def test_a_part_that_fails_or_finds_no_time_is_noted_and_ends_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def answers(name: str, args: object, seconds: float) -> str:
        return {"machine": "", "bits": "ValueError: of a part"}[name]

    chosen = {name: PARTS[name] for name in ("machine", "bits")} | {
        "profile": (PARTS["profile"][0], 1.0)
    }
    monkeypatch.setattr(day, "PARTS", chosen)
    monkeypatch.setattr(day, "_error_of", answers)
    assert day.main(["--out", str(tmp_path), "--device", "cpu"]) == 1
    noted = json.loads((tmp_path / "gpu.json").read_text())["samples"]
    assert noted["bits"]["error"] == "ValueError: of a part"
    assert noted["profile"]["error"] == "not run: no time was left"
    assert "ValueError: of a part" in capsys.readouterr().out


@pytest.mark.slow
def test_a_part_that_dies_or_hangs_says_how(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path / "missing"))
    ended = command("--out", tmp_path, "--smoke", "--device", "cpu", "--only", "machine")
    assert ended.returncode == 1
    error = json.loads((tmp_path / "gpu.json").read_text())["samples"]["machine"]["error"]
    assert "No usable temporary directory" in error or "missing" in error


def test_a_full_disk_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    ended = command("--out", tmp_path / "file", "--device", "cpu", "--seconds", 1)
    assert ended.returncode == 1
    assert ended.stdout.splitlines()[-1].startswith("make gpu: ")
    assert "Traceback" not in ended.stderr


def test_the_summary_takes_what_is_there() -> None:
    found: dict[str, Figures] = {
        "profile": {"host_waits": 2, "launches": 7},
        "rotation": {"error": "ended after 90 s"},
    }
    assert summary_of(found) == {"host_waits": 2, "launches": 7}
    assert set(SUMMARY.values()) <= PARTS.keys()


def test_time_is_given_to_parts_by_priority(tmp_path: Path) -> None:
    assert list(PARTS)[:3] == ["machine", "bits", "profile"]
    assert sum(seconds for _, seconds in PARTS.values()) > day.SECONDS, "no part has time to spare"
    import torch

    bench = Bench(torch.device("cpu"), True, 0, tmp_path, tmp_path, until=0.0)
    assert not bench.has_seconds(0.0)
    assert bench.model == "tiny"
    assert parts.SNAPSHOT_EVERY == 50


def test_a_machine_without_git_has_an_unknown_commit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert versions()["commit"] == "unknown"
