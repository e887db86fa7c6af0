"""The README tells the truth: its example runs, resumes and leaves a run that verifies."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.launch
@pytest.mark.timeout(300)
def test_the_first_example_runs_and_its_commands_work_on_the_result(tmp_path: Path) -> None:
    text = (ROOT / "README.md").read_text()
    example = re.search(r"```python\n(.*?)```", text, re.DOTALL)
    assert example is not None
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}

    def run(*words: str) -> str:
        return subprocess.run(
            words, cwd=tmp_path, env=environment, check=True, capture_output=True, text=True
        ).stdout

    run(sys.executable, "-c", example.group(1))
    run(sys.executable, "-c", example.group(1))  # nothing left to do: resumes at the end
    for line in re.findall(r"^lowdiff (\w+ runs/readme[^#\n]*)", text, re.MULTILINE):
        run(sys.executable, "-m", "lowdiff", *line.split())
    assert (tmp_path / "step150.pt").stat().st_size > 1000
    assert (tmp_path / "step150.safetensors").stat().st_size > 1000
