"""A container's /dev/shm of 64 MiB: the default place is refused, and a folder on disk serves."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.crash.launch import small_memory
from tests.mounts import CannotMount
from tests.processes import Script

pytestmark = pytest.mark.launch

UNTIL = 8
PATIENCE_SECONDS = 180


def ended(process: Script) -> int:
    """Its exit status; the test is skipped where nothing can be mounted."""
    code = process.wait()
    if CannotMount.__name__ in process.printed():
        pytest.skip(process.printed().splitlines()[-1])
    return code


def trained(folder: Path, staging: Path, kill_after: int | None = None) -> list[str]:
    """Train to the end, or to a SIGKILL once a step was begun; what was reported, in all lives."""
    folder.mkdir(exist_ok=True)
    report = folder / "report.txt"
    process = Script(small_memory.main, folder, staging, UNTIL, output=folder / "output.txt")
    if kill_after is not None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not (report.exists() and f"step {kill_after}\n" in report.read_text()):
            assert time.monotonic() < deadline, process.printed()[-3000:]
            if process.poll() is not None:
                break
            time.sleep(0.005)
        process.kill()
    assert ended(process) == (0 if kill_after is None else -9), process.printed()[-3000:]
    return report.read_text().splitlines()


def test_where_it_does_not_fit_the_default_place_is_refused_with_the_ways_out(
    tmp_path: Path,
) -> None:
    process = Script(small_memory.main, tmp_path, "", UNTIL, output=tmp_path / "output.txt")
    assert ended(process) == 1
    said = process.printed().splitlines()[-1]
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


@pytest.mark.slow
def test_a_folder_on_disk_serves_there_and_survives_a_kill_bit_for_bit(tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    expected = trained(whole, whole / "staging")
    trained(killed, killed / "staging", kill_after=3)
    resumed = trained(killed, killed / "staging")
    (second,) = [line for line in resumed[1:] if line.startswith("resumed")]
    assert 3 <= int(second.split()[1]) <= 5
    assert resumed[-1] == expected[-1]
    assert expected[-1].startswith("state ")
