"""``lowdiff inspect --watch``, as a user runs it: in a process of its own, ended by Ctrl-C."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.loops import Loop

ROOT = Path(__file__).parents[3]


def command(folder: Path, *options: str) -> list[str]:
    words = ["inspect", str(folder / "run"), "--staging", str(folder / "staging"), "--watch"]
    return [sys.executable, "-m", "lowdiff", *words, "--every", "0.1", *options]


@pytest.mark.slow
@pytest.mark.launch
def test_a_terminal_gets_a_table_that_is_refreshed(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    loop.attach()
    ours, theirs = os.openpty()
    environment = {**os.environ, "COLUMNS": "160", "TERM": "xterm"}
    with subprocess.Popen(
        command(tmp_path), cwd=ROOT, stdout=theirs, stderr=theirs, env=environment
    ) as process:
        os.close(theirs)
        wait_for(ours, b"incarnation 0", b"running", b"committed 0, durable 0")
        for step in loop.checkpointer.steps(until=3):
            loop.step(step)
        loop.checkpointer.close()
        wait_for(ours, b"gone", b"committed 3, durable 3")
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0
    os.close(ours)


def wait_for(terminal: int, *texts: bytes) -> None:
    """Read what is shown until all of it was there; a hang is ended by pytest."""
    shown = b""
    while not all(text in shown for text in texts):
        shown += os.read(terminal, 4096)


@pytest.mark.launch
def test_a_folder_that_is_no_run_is_bad_data(tmp_path: Path) -> None:
    result = subprocess.run(
        command(tmp_path), cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert result.returncode == 1
    assert "is not a lowdiff run" in result.stderr
