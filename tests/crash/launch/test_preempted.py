"""SIGTERM while a collective blocks the main thread, then SIGKILL: the disk alone has every step."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

import lowdiff
from lowdiff.demo.launch import child_processes
from lowdiff.persistence.files.paths import RunFolder
from lowdiff.persistence.run.catalog import scan
from tests.crash.launch import preempted
from tests.processes import Script

pytestmark = pytest.mark.launch

STEPS = 6


def durable(folder: Path) -> list[int]:
    """Last step of each rank on disk."""
    catalog = scan(RunFolder(folder / "run"))
    return [catalog.of(0, rank).newest for rank in range(2)]


def wait_until(folder: Path, condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, (folder / "output.txt").read_text()[-3000:]
        time.sleep(0.01)


def test_the_tail_is_durable_before_the_blocked_trainers_are_killed(tmp_path: Path) -> None:
    output = tmp_path / "output.txt"
    ranks = [Script(preempted.main, tmp_path, r, STEPS, output=output) for r in range(2)]
    try:
        wait_until(tmp_path, lambda: all((tmp_path / f"blocked-{r}").exists() for r in range(2)))
        assert durable(tmp_path) == [0, 0]
        for process in ranks:
            process.send_signal(signal.SIGTERM)
        wait_until(tmp_path, lambda: durable(tmp_path) == [STEPS, STEPS])
        assert [process.poll() for process in ranks] == [None, None]
    finally:
        writers = [pid for process in ranks for pid in child_processes(process.pid)]
        for process in ranks:
            process.kill()
            process.wait()
        for writer in writers:  # or it would drain what is left
            with suppress(ProcessLookupError):  # it had all, and has ended
                os.kill(writer, signal.SIGKILL)
    shutil.rmtree(tmp_path / "staging")
    assert lowdiff.recover(tmp_path / "run", staging=tmp_path / "none").step == STEPS
