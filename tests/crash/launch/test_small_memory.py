"""A container's /dev/shm of 64 MiB: the default place is refused, and a folder on disk serves."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.crash.launch.test_sigkill import ROOT, start
from tests.mounts import with_small_shm

pytestmark = pytest.mark.launch

UNTIL = 8
PATIENCE_SECONDS = 180


@pytest.fixture(scope="module")
def launcher() -> list[str]:
    """What starts a command where /dev/shm has 64 MiB."""
    return with_small_shm(64)


def trained(
    launcher: list[str], folder: Path, staging: Path | str, kill_after: int | None = None
) -> list[str]:
    """Train to the end, or to a SIGKILL once a step was begun; what was reported, in all lives."""
    script = [sys.executable, str(ROOT / "tests/crash/launch/small_memory.py")]
    report, output = folder / "report.txt", folder / "output.txt"
    process = start([*launcher, *script, str(folder), str(staging), str(UNTIL)], folder)
    try:
        if kill_after is not None:
            deadline = time.monotonic() + PATIENCE_SECONDS
            while not (report.exists() and f"step {kill_after}\n" in report.read_text()):
                assert time.monotonic() < deadline, output.read_text()[-3000:]
                time.sleep(0.005)
            process.kill()
        code = process.wait(PATIENCE_SECONDS)
    finally:
        process.kill()
        process.wait()
    assert code == (0 if kill_after is None else -9), output.read_text()[-3000:]
    return report.read_text().splitlines()


def test_where_it_does_not_fit_the_default_place_is_refused_with_the_ways_out(
    launcher: list[str], tmp_path: Path
) -> None:
    script = [sys.executable, str(ROOT / "tests/crash/launch/small_memory.py")]
    command = [*launcher, *script, str(tmp_path), "", str(UNTIL)]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert result.returncode == 1
    said = result.stderr.splitlines()[-1]
    for part in (
        "ConfigError: staging needs 88.1 MiB at /dev/shm/lowdiff-",
        "(35.8 MiB residuals, ",
        "but 64.0 MiB are free",
        "--shm-size",
        "emptyDir: {medium: Memory}",
        "staging=FOLDER",
    ):
        assert part in said
    assert not list((tmp_path / "run").glob("incarnations/*"))


def test_a_folder_on_disk_serves_there_and_survives_a_kill_bit_for_bit(
    launcher: list[str], tmp_path: Path
) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    expected = trained(launcher, whole, whole / "staging")
    trained(launcher, killed, killed / "staging", kill_after=3)
    resumed = trained(launcher, killed, killed / "staging")
    (second,) = [line for line in resumed[1:] if line.startswith("resumed")]
    assert 3 <= int(second.split()[1]) <= 5
    assert resumed[-1] == expected[-1]
    assert expected[-1].startswith("state ")
