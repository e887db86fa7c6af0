"""What a command leaves that somebody ends: no process, and after SIGTERM no folder."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from benches import ending
from tests.processes import PATIENCE_SECONDS, ROOT, is_alive


def long_work() -> None:
    """Have a folder, and a process in a session of its own; then work for ever."""
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, "-c", "import time; time.sleep(1000)"]
        process = subprocess.Popen(words, start_new_session=True)
        print(folder, process.pid, flush=True)  # noqa: T201
        time.sleep(1000)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_command_that_is_ended_leaves_nothing(number: signal.Signals, tmp_path: Path) -> None:
    environment = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    code = "from benches import ending; from tests.benches import test_ending as t; ending.run(t.long_work)"
    with subprocess.Popen(
        [sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True
    ) as command:
        assert command.stdout is not None
        folder, process = command.stdout.readline().split()
        assert is_alive(int(process))
        command.send_signal(number)
        assert command.wait(PATIENCE_SECONDS) == (143 if number == signal.SIGTERM else -number)
    deadline = time.monotonic() + PATIENCE_SECONDS
    while is_alive(int(process)):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert Path(folder).exists() == (number == signal.SIGKILL)


def test_the_tests_are_such_a_command() -> None:
    """So that a run of them that is ended leaves nothing, whatever a test has started."""
    before = os.environ["LOWDIFF_STARTED_BY"]
    ending.leave_nothing()
    assert os.environ["LOWDIFF_STARTED_BY"] == before


def test_every_command_is_one() -> None:
    commands = [*ROOT.glob("benches/bench_*.py"), *ROOT.glob("tests/**/__main__.py")]
    commands += [ROOT / "tests/faults" / name for name in ("soak.py", "peers.py")]
    assert not [f for f in commands if "ending.run(" not in f.read_text(encoding="utf-8")]
