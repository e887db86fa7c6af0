"""Real processes, real SIGKILL."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from lowdiff.demo.launch import child_processes
from tests.crash.launch import worker
from tests.crash.lives import Life, live
from tests.crash.pool import Pool
from tests.crash.trainings import cnn_sgd
from tests.processes import Script

pytestmark = pytest.mark.launch

WORKER = Path(__file__).parent / "worker.py"
ROOT = Path(__file__).parents[3]


def command(builder: str, folder: Path, until: int, ranks: int | None = None) -> list[str]:
    """What starts the worker: alone, or ``ranks`` of it under torchrun."""
    launcher = [sys.executable]
    if ranks is not None:
        launcher += ["-m", "torch.distributed.run", "--standalone", "--max-restarts=2"]
        launcher += [f"--nproc-per-node={ranks}"]
    arguments = [builder, folder / "run", folder / "staging", until, folder / "report"]
    return [*launcher, str(WORKER), *map(str, arguments)]


def start(words: list[str], folder: Path) -> subprocess.Popen[bytes]:
    """Start it in the repository's root."""
    folder.mkdir(exist_ok=True, parents=True)
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # for the example: see examples/README.md
    }
    with (folder / "output.txt").open("ab") as output:
        return subprocess.Popen(words, env=environment, stdout=output, stderr=output)


def started(folder: Path, ranks: int) -> list[Script]:
    """The same, as processes that torchrun knows nothing of."""
    folder.mkdir(parents=True)
    words = ["cnn_sgd", folder / "run", folder / "staging", 60, folder / "report"]
    together = {"WORLD_SIZE": str(ranks), "STORE": str(folder / "store")}
    return [
        Script(
            worker.main, *words, output=folder / "output.txt", env={"RANK": str(rank), **together}
        )
        for rank in range(ranks)
    ]


def finish(process: subprocess.Popen[bytes], folder: Path) -> None:
    """Wait for a clean end."""
    code = process.wait(90)
    assert code == 0, (folder / "output.txt").read_text()[-3000:]


def lines(folder: Path, rank: int = 0) -> list[dict[str, Any]]:
    """What a rank reported, in all its lives; a torn last line of a killed one is left out."""
    path = folder / f"report.{rank}"
    found = []
    for text in path.read_text().splitlines() if path.exists() else []:
        if text.endswith("}"):
            found.append(json.loads(text))
    return found


def losses(folder: Path, rank: int = 0) -> dict[int, str]:
    """Loss of every step; a later life's replaces an earlier's."""
    return {line["step"]: line["loss"] for line in lines(folder, rank) if "step" in line}


def wait_for_step(folder: Path, step: int) -> None:
    """Wait until rank 0 has reported a step."""
    deadline = time.monotonic() + 60
    while step not in losses(folder):
        assert time.monotonic() < deadline, (folder / "output.txt").read_text()[-3000:]
        time.sleep(0.01)


@pytest.mark.slow  # tests/loops kills trainers in every test run
def test_a_process_killed_at_random_instants_loses_no_committed_step(tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    finish(start(command("plain_module", whole, 400), whole), whole)
    chance = random.Random(5)
    for target in (90, 210, 330):
        process = start(command("plain_module", killed, 400), killed)
        wait_for_step(killed, target)
        time.sleep(chance.random() * 0.02)
        process.send_signal(signal.SIGKILL)
        process.wait()
        reported = lines(killed)[-1]["step"]
        process = start(command("plain_module", killed, reported + 1), killed)
        finish(process, killed)
        resumed = [line["resumed"] for line in lines(killed) if "resumed" in line][-1]
        # A line is written before its body commits, so it proves only the steps before it.
        assert resumed >= reported
    finish(start(command("plain_module", killed, 400), killed), killed)
    assert losses(killed) == losses(whole)
    assert lines(killed)[-1]["state"] == lines(whole)[-1]["state"]


@pytest.mark.parametrize(
    "launcher", [pytest.param("processes", marks=pytest.mark.slow), "torchrun"]
)
def test_all_ranks_killed_at_once_resume_bit_for_bit(
    tmp_path: Path, pool: Pool, launcher: str
) -> None:
    def lived(folder: Path) -> list[Life]:
        return pool.run(
            live, 2, cnn_sgd, str(folder / "run"), str(folder / "staging"), 60, None, {}
        )

    whole, folder = lived(tmp_path / "whole"), tmp_path / "killed"
    if launcher == "torchrun":
        agent = start(command("cnn_sgd", folder, 60, ranks=2), folder)
        wait_for_step(folder, 25)
        pids = child_processes(agent.pid)
        agent.kill()
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        agent.wait()
    else:
        ranks = started(folder, 2)
        wait_for_step(folder, 25)
        for process in ranks:
            process.kill()
        assert [process.wait() for process in ranks] == [-signal.SIGKILL] * 2
    for rank, (expected, resumed) in enumerate(zip(whole, lived(folder), strict=True)):
        killed = {step + 1: loss for step, loss in losses(folder, rank).items()}
        assert 25 <= resumed.resumed <= max(killed)
        assert killed | resumed.losses == expected.losses
        assert resumed.state == expected.state


def run_example(folder: Path, kill_after: str | None = None) -> list[str]:
    """Lines that the example prints under torchrun, whose last worker may be killed on the way."""
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts=2"]
    words += ["--nproc-per-node=2", str(ROOT / "examples/ddp_gpt.py"), str(folder / "run")]
    agent = start([*words, "--steps=200", f"--staging={folder / 'staging'}"], folder)
    output = folder / "output.txt"
    if kill_after is not None:
        deadline = time.monotonic() + 60
        while kill_after not in output.read_text():
            assert time.monotonic() < deadline, output.read_text()[-3000:]
            time.sleep(0.002)
        os.kill(child_processes(agent.pid)[-1], signal.SIGKILL)
    finish(agent, folder)
    return output.read_text().splitlines()


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_the_example_with_a_worker_killed_under_torchrun_ends_as_if_it_were_not(
    tmp_path: Path,
) -> None:
    whole = run_example(tmp_path / "whole")
    killed = run_example(tmp_path / "killed", kill_after="step 60:")
    first, second = [line for line in killed if line.startswith("starting at")]
    assert first == "starting at step 0"
    # The killed rank may not have come to the commit of the step that the other one printed.
    assert 59 <= int(second.split()[-1]) < 200

    def results(lines: list[str]) -> set[str]:
        # Two ranks may print into one line.
        pattern = r"step \d+: loss [-+.\de]+|rank \d: weights [\da-f]{16}"
        return set(re.findall(pattern, "\n".join(lines)))

    assert len(results(whole)) == 200 + 2
    assert results(killed) == results(whole)  # steps made twice had the same loss, too
