"""The first optimizer step of a process has the bits of any other."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_first_step_of_a_process_can_be_replayed(tmp_path: Path) -> None:
    # On a busy machine; before kernels were settled about one process in seven failed.
    for trial in range(12):
        folders = [tmp_path / f"{trial}-{number}" for number in range(3)]
        started = [
            subprocess.Popen(
                [sys.executable, "-m", "tests.unit.recovery.first_step", str(folder)], cwd=ROOT
            )
            for folder in folders
        ]
        assert [process.wait(100) for process in started] == [0, 0, 0]
