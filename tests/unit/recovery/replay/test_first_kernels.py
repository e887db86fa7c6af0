"""The first optimizer step of a process has the bits of any other."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.processes import Script
from tests.unit.recovery import first_step


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_first_step_of_a_process_can_be_replayed(tmp_path: Path) -> None:
    # On a busy machine; before kernels were settled about one process in seven failed. They are forked from one
    # that has loaded torch and called no kernel.
    for trial in range(12):
        folders = [tmp_path / f"{trial}-{number}" for number in range(3)]
        started = [
            Script(first_step.main, folder, output=folder.with_suffix(".txt")) for folder in folders
        ]
        assert [process.wait(100) for process in started] == [0, 0, 0]
