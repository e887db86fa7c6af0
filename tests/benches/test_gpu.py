"""The command of the GPU day, tried on the CPU at smoke size."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benches.gpu import day
from benches.gpu.parts import (
    LEAST_ROUNDS,
    PARTS,
    SUMMARY,
    Figures,
    compared,
    counts_in,
    summary_of,
)
from benches.gpu.training import ARMS
from benches.harness import versions

ROOT = Path(__file__).parents[2]
ON_CPU = ("--device", "cpu", "--smoke")


def command(*words: object, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "benches.gpu", *map(str, words)],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def parts_in(folder: Path) -> dict[str, Figures]:
    found: dict[str, Figures] = json.loads((folder / "gpu.json").read_text())["samples"]
    return found


@pytest.fixture
def two_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The parts are ``bits`` and ``machine``, with a second each."""
    monkeypatch.setattr(day, "_LEAST_SECONDS", 0.5)
    monkeypatch.setattr(day, "PARTS", {name: (PARTS[name][0], 1.0) for name in ("bits", "machine")})


@pytest.mark.slow
@pytest.mark.launch
@pytest.mark.timeout(400)
def test_every_part_runs_at_smoke_size_and_leaves_the_figures_that_others_read(
    tmp_path: Path,
) -> None:
    ended = command("--out", tmp_path, *ON_CPU)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    record = json.loads((tmp_path / "gpu.json").read_text())
    assert record["samples"].keys() == PARTS.keys()
    assert record["summary"].keys() == SUMMARY.keys()
    assert record["summary"]["bit_identical"] is True
    assert record["samples"]["rotation"]["rounds"] == 2
    assert (tmp_path / "gpu.png").stat().st_size > 1000
    assert not list(Path("/dev/shm").glob("lowdiff-gpu-*"))


@pytest.mark.slow
def test_without_a_gpu_it_says_so_in_one_line(tmp_path: Path) -> None:
    ended = command("--out", tmp_path / "none", CUDA_VISIBLE_DEVICES="")
    assert ended.returncode == 1
    assert ended.stdout == "make gpu: torch finds no CUDA device here; nothing was measured\n"
    assert not ended.stderr
    assert not (tmp_path / "none").exists()


@pytest.mark.slow
def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    ended = command("--out", tmp_path / "file", *ON_CPU)
    assert ended.returncode == 1
    assert ended.stdout.startswith("make gpu: ")
    assert "Traceback" not in ended.stdout + ended.stderr


@pytest.mark.usefixtures("two_parts")
def test_a_part_that_fails_and_one_that_hangs_are_noted_and_end_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code = {
        "bits": "import time; print('begun', flush=True); time.sleep(60)",
        "machine": "raise ValueError('of a part')",
    }
    monkeypatch.setattr(day, "command_of", lambda name, *_: [sys.executable, "-c", code[name]])
    began = time.monotonic()
    assert day.main(["--out", str(tmp_path), *ON_CPU]) == 1
    assert time.monotonic() - began < 30
    assert "ended after 1 s" in parts_in(tmp_path)["bits"]["error"]
    assert (tmp_path / "gpu-bits.log").read_text() == "begun\n"
    error = parts_in(tmp_path)["machine"]["error"]
    assert error.startswith("Traceback")
    assert error.endswith("ValueError: of a part")
    assert "ValueError: of a part" in capsys.readouterr().out


@pytest.mark.usefixtures("two_parts")
def test_figures_stay_where_a_later_run_fails_and_go_with_other_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = argparse.Namespace(out=tmp_path, device="cpu", smoke=True, seed=0)
    day.note(arguments, "profile", {"host_waits": 3}, {})
    assert "error" not in parts_in(tmp_path)["profile"]
    monkeypatch.setattr(day, "_LEAST_SECONDS", 5.0)
    assert day.main(["--out", str(tmp_path), *ON_CPU]) == 1
    assert parts_in(tmp_path)["bits"]["error"] == "not run: no time was left"
    day.note(arguments, "profile", {"error": "ended"}, {})
    assert parts_in(tmp_path)["profile"]["host_waits"] == 3
    assert parts_in(tmp_path)["profile"]["error"] == "ended"
    assert json.loads((tmp_path / "gpu.json").read_text())["summary"] == {"host_waits": 3}
    arguments.device = "cuda"
    day.note(arguments, "bits", {"cases": 1}, {})
    assert parts_in(tmp_path).keys() == {"bits"}


def test_arms_are_compared_round_by_round_less_what_two_equal_ones_differ() -> None:
    rounds = LEAST_ROUNDS
    taken: dict[str, list[float | None]] = {
        "none": [1.0, 2.0] * (rounds // 2),
        # The machine is 2 % slower for whoever is not "none".
        "again": [1.02, 2.04] * (rounds // 2),
        "hook": [1.52, 3.04] * (rounds // 2),
        "log": [2.02, 4.04] * (rounds // 2),
        "survivors": [1.02, 2.04] * (rounds // 2),
        "powersgd": [3.02, 6.04] * (rounds // 2),
        "gradients": [11.02, None] * (rounds // 2),
    }
    assert taken.keys() == {"again", *ARMS}
    figures = compared(taken, seed=0)
    assert figures["rounds"] == rounds
    assert figures["null_median"] == pytest.approx(0.02)
    assert figures["hook_over_none"] == pytest.approx(0.50)
    assert figures["survivors_over_none"] == pytest.approx(0.0)
    assert figures["survivors_over_none_upper95"] == pytest.approx(0.0)
    assert figures["log_over_hook"] == pytest.approx(2.02 / 1.52 - 1.02)
    assert figures["gradients_over_none"] == pytest.approx(10.0)
    assert "gradients_over_none_upper95" not in figures, "it had too few turns"


def test_pytests_last_line_is_read() -> None:
    assert counts_in("....\n12 passed, 3 skipped in 4.1s\n") == {
        "passed": 12,
        "failed": 0,
        "skipped": 3,
    }
    assert counts_in("1 failed, 2 passed, 7 deselected in 1s")["failed"] == 1
    assert counts_in("") == {"passed": 0, "failed": 0, "skipped": 0}


def test_the_summary_takes_what_is_there() -> None:
    found: dict[str, Figures] = {
        "profile": {"host_waits": 2, "largest": {}},
        "rotation": {"error": "ended after 90 s"},
    }
    assert summary_of(found) == {"host_waits": 2}
    assert set(SUMMARY.values()) <= PARTS.keys()
    assert list(PARTS)[:4] == ["machine", "bits", "profile", "rotation"]


def test_a_machine_without_git_has_an_unknown_commit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert versions()["commit"] == "unknown"
