"""The README tells the truth: its examples run, resume and leave runs that verify."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.processes import Script, run_file
from tests.unit.cli.commands import Command, command

__all__ = ["command"]

ROOT = Path(__file__).parents[2]


@pytest.mark.launch
@pytest.mark.timeout(300)
def test_its_examples_run_and_its_commands_work_on_the_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    text = (ROOT / "README.md").read_text()
    first, with_log = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    imports, made = with_log.split("checkpointer = ")
    logged = first.replace('lowdiff.Checkpointer("runs/readme")', made.strip())
    assert '"runs/log"' in logged
    # The second time there is nothing left to do: it resumes at the end.
    for example in (first, first, imports + logged):
        (tmp_path / "example.py").write_text(example)
        process = Script(run_file, "example.py", output=tmp_path / "output.txt", cwd=tmp_path)
        assert process.wait() == 0, process.printed()
    monkeypatch.chdir(tmp_path)
    lines = re.findall(r"^lowdiff (\w+ runs/\w+[^#\n]*)", text, re.MULTILINE)
    assert len(lines) > 5
    for line in lines:
        assert command(*line.split()).code == 0, line
    for file in ("newest.pt", "weights.safetensors", "step150.pt"):
        assert (tmp_path / file).stat().st_size > 1000
