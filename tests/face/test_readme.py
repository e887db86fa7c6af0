"""The README tells the truth: its example runs, resumes and leaves a run that verifies."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.commands import Command, command

__all__ = ["command"]

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.launch
@pytest.mark.timeout(300)
def test_the_first_example_runs_and_its_commands_work_on_the_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    text = (ROOT / "README.md").read_text()
    example = re.search(r"```python\n(.*?)```", text, re.DOTALL)
    assert example is not None
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    for _ in range(2):  # the second time there is nothing left to do: it resumes at the end
        subprocess.run(
            [sys.executable, "-c", example.group(1)], cwd=tmp_path, env=environment, check=True
        )
    monkeypatch.chdir(tmp_path)
    for line in re.findall(r"^lowdiff (\w+ runs/readme[^#\n]*)", text, re.MULTILINE):
        assert command(*line.split()).code == 0
    assert (tmp_path / "step150.pt").stat().st_size > 1000
    assert (tmp_path / "step150.safetensors").stat().st_size > 1000
