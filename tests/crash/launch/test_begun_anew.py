"""Ranks that fail, begun anew in the processes that live or all by torchrun: the bits of nobody's failure."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lowdiff.demo.launch import child_processes
from tests.crash.launch import failing
from tests.crash.launch.failing import STRATEGIES, WORLD_SIZE
from tests.processes import PATIENCE_SECONDS, ROOT, Script

pytestmark = [pytest.mark.launch, pytest.mark.timeout(300)]

needs_package = pytest.mark.skipif(
    importlib.util.find_spec("nvidia_resiliency_ext") is None,
    reason="nvidia-resiliency-ext is not installed; it has no wheel for every Python",
)

FAILURES = {
    "an error": ["0:5:error"],
    "a kill": ["0:5:kill"],
    "two kills in a row": ["0:5:kill", "1:6:kill"],
    "a kill before the first step": ["0:5:kill", "1:5:kill"],
    "a kill while the other is in its optimizer": ["0:4:slow", "0:5:kill"],
    "a hang": ["0:5:hang"],
}


def run_in_place(folder: Path, strategy: str, failures: list[str], num_spares: int) -> str:
    """Train; what all ranks printed."""
    folder.mkdir(exist_ok=True)
    output, num_processes = folder / "output.txt", WORLD_SIZE + num_spares
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    words = [num_processes, store.port, folder, strategy, *failures]
    processes = [
        Script(failing.in_place, rank, *words, output=output) for rank in range(num_processes)
    ]
    try:
        codes = [process.wait() for process in processes]
    finally:
        for process in processes:
            process.kill()
    printed = output.read_text()
    num_dead = sum(words.endswith(("kill", "hang")) for words in failures)
    assert codes.count(0) == num_processes - num_dead, printed[-3000:]
    return printed


def run_under_torchrun(folder: Path, strategy: str, failures: list[str]) -> str:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts=3"]
    worker = [f"--nproc-per-node={WORLD_SIZE}", "-m", failing.__name__, str(folder), strategy]
    ran = subprocess.run(
        [*launcher, *worker, *failures],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=2.5 * PATIENCE_SECONDS,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-5000:]
    return ran.stdout


def final(folder: Path) -> list[dict[str, Any]]:
    return [torch.load(folder / f"final-{rank}.pt") for rank in range(WORLD_SIZE)]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Final states of a strategy's training that did not fail."""
    known: dict[str, list[dict[str, Any]]] = {}

    def states(strategy: str) -> list[dict[str, Any]]:
        if strategy not in known:
            folder = tmp_path_factory.mktemp("uninterrupted")
            if importlib.util.find_spec("nvidia_resiliency_ext"):
                run_in_place(folder, strategy, [], 0)
            else:
                run_under_torchrun(folder, strategy, [])
            known[strategy] = final(folder)
        return known[strategy]

    return states


def steps_attached_at(printed: str) -> list[int]:
    return [int(line.split()[-1]) for line in printed.splitlines() if " attached at " in line]


def cases(begins: int) -> list[Any]:
    """With the slow tests each failure has one strategy, in turns."""
    return [
        pytest.param(
            strategy,
            name,
            marks=pytest.mark.slow
            if (number + begins) % len(STRATEGIES) == turn
            else pytest.mark.campaign,
        )
        for turn, strategy in enumerate(STRATEGIES)
        for number, name in enumerate(FAILURES)
    ]


def check(folder: Path, strategy: str, name: str, printed: str, uninterrupted: Any) -> None:
    failures = [words.split(":") for words in FAILURES[name]]
    failed_before = [int(at) for _, at, kind in failures if kind != "slow"]
    expected = sorted([0, *failed_before] * WORLD_SIZE)
    assert sorted(steps_attached_at(printed)) == expected, printed[-5000:]
    torch.testing.assert_close(final(folder), uninterrupted(strategy), rtol=0, atol=0)


@needs_package
@pytest.mark.turns(2)
@pytest.mark.parametrize(("strategy", "name"), cases(0))
def test_in_place_nothing_is_lost(
    tmp_path: Path, strategy: str, name: str, uninterrupted: Any
) -> None:
    num_spares = sum(words.endswith(("kill", "hang")) for words in FAILURES[name])
    printed = run_in_place(tmp_path, strategy, FAILURES[name], num_spares)
    check(tmp_path, strategy, name, printed, uninterrupted)


@pytest.mark.turns(2)
@pytest.mark.parametrize(("strategy", "name"), cases(1))
def test_under_torchrun_nothing_is_lost(
    tmp_path: Path, strategy: str, name: str, uninterrupted: Any
) -> None:
    printed = run_under_torchrun(tmp_path, strategy, FAILURES[name])
    check(tmp_path, strategy, name, printed, uninterrupted)


@pytest.mark.slow
@needs_package
def test_a_spare_that_is_not_needed_ends_with_the_others(tmp_path: Path) -> None:
    printed = run_in_place(tmp_path, "log", [], 1)
    assert printed.count("was not needed") == 1
    assert printed.count("trained") == WORLD_SIZE


@needs_package
@pytest.mark.slow
def test_without_a_spare_all_end_and_say_what_to_do(tmp_path: Path) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    words = [WORLD_SIZE, store.port, tmp_path, "survivors", "0:5:kill"]
    output = tmp_path / "output.txt"
    ranks = [Script(failing.in_place, r, *words, output=output) for r in range(WORLD_SIZE)]
    assert [rank.wait() for rank in ranks] == [1, -9]
    assert "1 processes are left, and 2 train: start all again" in output.read_text()
    assert lowdiff_step(tmp_path) == 5


def lowdiff_step(folder: Path) -> int:
    import lowdiff

    return lowdiff.recover(folder / "run", staging=folder / "staging").step


# docs/survivors.md, whose commands are run as well, starts both without a kill.
@pytest.mark.campaign
@pytest.mark.parametrize("name", [pytest.param("in_place", marks=needs_package), "torchrun"])
def test_the_example_goes_on_after_a_kill_as_if_there_were_none(tmp_path: Path, name: str) -> None:
    """The rank that prints is not killed."""
    launcher = {
        "in_place": ["-m", "lowdiff.integrations.nvrx", "--processes=3"],
        "torchrun": [
            *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"),
            "--max-restarts=3",
        ],
    }[name]
    printed = {}
    for run, dies in (("whole", False), ("killed", True)):
        output = tmp_path / f"{run}.txt"
        words = [*launcher, f"examples/restart_{name}.py", str(tmp_path / run)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        with output.open("wb") as file:
            process = subprocess.Popen(
                [sys.executable, *words], cwd=ROOT, env=environment, stdout=file, stderr=file
            )
        deadline = time.monotonic() + PATIENCE_SECONDS
        while dies and "step 300:" not in output.read_text():
            assert time.monotonic() < deadline, output.read_text()[-3000:]
            time.sleep(0.01)
        if dies:
            os.kill(pid_of_rank(1, process.pid), signal.SIGKILL)
        assert process.wait(PATIENCE_SECONDS) == 0, output.read_text()[-3000:]
        printed[run] = output.read_text()
    losses = {
        run: set(re.findall(r"^step .*", text, re.MULTILINE)) for run, text in printed.items()
    }
    assert losses["killed"] == losses["whole"]
    assert len(losses["whole"]) == 20
    assert printed["whole"].count("starting at step") == 2
    assert printed["killed"].count("starting at step") == 4


def pid_of_rank(rank: int, launcher: int) -> int:
    """The worker among a launcher's children that was started with this rank."""
    for pid in child_processes(launcher):
        environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        if f"RANK={rank}".encode() in environment and b"examples/restart" in command:
            return pid
    raise AssertionError("no such worker")
