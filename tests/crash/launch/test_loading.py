"""PyTorch's own DataLoader with workers, in processes that SIGKILL ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lowdiff.demo.launch import child_processes
from tests.crash.launch.test_sigkill import finish, lines, losses, start, wait_for_step

pytestmark = pytest.mark.launch

SCRIPT = Path(__file__).parent / "loading.py"
STEPS = 90


def command(folder: Path, ranks: int) -> list[str]:
    words = [sys.executable]
    if ranks > 1:
        words += ["-m", "torch.distributed.run", "--standalone", "--max-restarts=0"]
        words += [f"--nproc-per-node={ranks}"]
    places = (folder / "run", folder / "staging", STEPS, folder / "report")
    return [*words, str(SCRIPT), *map(str, places)]


def kill_all(process: subprocess.Popen[bytes]) -> None:
    """End a process and all below it, its workers too, at one instant."""
    pids, found = [process.pid], []
    while pids:
        pid = pids.pop()
        found.append(pid)
        pids += child_processes(pid)
    for pid in found:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    process.wait()


@pytest.mark.slow
@pytest.mark.turns(2)
@pytest.mark.parametrize("ranks", [2, 1])
def test_killed_in_mid_epoch_and_at_an_edge_it_sees_the_same_batches(
    tmp_path: Path, ranks: int
) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    finish(start(command(whole, ranks), whole), whole)
    per_epoch = 19 if ranks == 1 else 10
    for more in (per_epoch - 2, per_epoch + 3):
        before = max(losses(killed), default=0)
        process = start(command(killed, ranks), killed)
        wait_for_step(killed, before + more)
        kill_all(process)
    finish(start(command(killed, ranks), killed), killed)
    for rank in range(ranks):
        assert losses(killed, rank) == losses(whole, rank)
        assert lines(killed, rank)[-1]["state"] == lines(whole, rank)[-1]["state"]
    resumed = [line["resumed"] for line in lines(killed) if "resumed" in line]
    assert len(resumed) == 3
    assert 0 == resumed[0] < resumed[1] < resumed[2]
