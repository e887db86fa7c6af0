"""Every orderly end makes the newest committed step durable: a container takes its memory along."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import lowdiff
from lowdiff import testing
from lowdiff.compressors import PowerSGD
from lowdiff.testing import limits
from tests.crash.pool import JobFailed, Pool
from tests.crash.trainings import batch, wrapped
from tests.unit.loops import Loop, close_after_error, small_model

_STEPS = 7
STRATEGIES: dict[str, dict[str, Any]] = {
    "log": {"compressor": PowerSGD(2), "batch_size": 64},
    "gradients": {"compressor": None, "strategy": "gradients"},
    "replica": {"compressor": None, "strategy": "replica"},
    "survivors": {"compressor": None, "strategy": "survivors"},
}


def loop_of(folder: Path, strategy: str) -> Loop:
    return Loop(folder, settings={**STRATEGIES[strategy], "snapshot_every": 100})


def resumed(folder: Path, strategy: str) -> int:
    """Where it goes on without the memory."""
    shutil.rmtree(folder / "staging")
    again = loop_of(folder, strategy)
    step = again.attach()
    again.die()
    return step


def broken(loop: Loop, error: BaseException, where: str) -> None:
    """Train until an error comes in the middle of a step."""
    with loop.checkpointer:
        loop.attach()
        for number in loop.checkpointer.steps(100):
            if number == _STEPS and where == "before the forward pass":
                raise error
            loss = loop.model(torch.full((8, 20), float(number))).square().mean()
            loop.optimizer.zero_grad()
            loss.backward()
            if number == _STEPS:
                raise error
            loop.optimizer.step()


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, ZeroDivisionError])
@pytest.mark.parametrize("where", ["before the forward pass", "behind the backward pass"])
@pytest.mark.cases(9)
def test_an_error_costs_no_committed_step(
    tmp_path: Path,
    strategy: str,
    error: type[BaseException],
    where: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with pytest.raises(error):
        broken(loop_of(tmp_path, strategy), error(), where)
    if strategy == "gradients" and where == "behind the backward pass":
        # The forward pass has moved buffers: the live state is no snapshot of the step, and memory alone has it.
        assert "LD409" in caplog.text
        again = loop_of(tmp_path, strategy)
        assert again.attach() == _STEPS
        again.checkpointer.close()
        return
    assert "LD409" not in caplog.text
    assert resumed(tmp_path, strategy) == _STEPS
    assert "LD315" not in caplog.text


SCRIPT = """
import sys, pathlib
from tests.unit.attach.test_ends import limits, loop_of
# Beside other work a replica process starts for longer than the ten seconds that an end takes at most.
limits(abandon_seconds=45.0).__enter__()
loop = loop_of(pathlib.Path(sys.argv[1]), sys.argv[2])
loop.attach()
for number in loop.checkpointer.steps(7 if sys.argv[3] == "return" else 100):
    if number == 7:
        print("ready", flush=True)
        if sys.argv[3] == "exit":
            sys.exit(3)
        if sys.argv[3] == "error":
            raise ValueError
        while True:
            pass
    loop.step(number)
"""


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("end", ["exit", "error", "return", "interrupted"])
def test_so_does_the_end_of_a_script_that_never_calls_close(
    tmp_path: Path, strategy: str, end: str
) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(tmp_path), strategy, end],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    if end == "interrupted":
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == {"exit": 3, "return": 0, "error": 1, "interrupted": -2}[end], said
    assert "LD409" not in said
    assert resumed(tmp_path, strategy) == _STEPS


def test_what_cannot_be_made_durable_in_time_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loop = loop_of(tmp_path, "log")
    loop.attach()
    parts = testing.parts_of(loop.checkpointer)
    for number in loop.checkpointer.steps(3):
        loop.step(number)
    (tmp_path / "run/run.json").rename(tmp_path / "aside")
    began = time.monotonic()
    with limits(abandon_seconds=0.5):
        close_after_error(loop.checkpointer)
    assert time.monotonic() - began < 10
    assert "LD409" in caplog.text
    assert "to 3 are committed and lie in memory alone" in caplog.text
    assert str(parts.staging.folder.root) in caplog.text
    (tmp_path / "aside").rename(tmp_path / "run/run.json")
    again = loop_of(tmp_path, "log")
    assert again.attach() == 3
    again.die()


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["log", "gradients", "replica"])
def test_a_second_interrupt_ends_at_once(tmp_path: Path, strategy: str) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(tmp_path), strategy, "interrupted"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    (tmp_path / "run/run.json").rename(tmp_path / "aside")  # nothing becomes durable
    process.send_signal(signal.SIGINT)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(timeout=3)
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert time.monotonic() - began < 4
    (tmp_path / "aside").rename(tmp_path / "run/run.json")
    again = loop_of(tmp_path, strategy)
    assert again.attach() == _STEPS
    again.die()


def fails(rank: int, world_size: int, folder: str, strategy: str) -> None:
    """Rank 1 raises an error; the other one hears that it is gone."""
    torch.manual_seed(0)
    ddp = wrapped(small_model())
    optimizer = torch.optim.Adam(ddp.parameters(), lr=0.1)
    checkpointer = lowdiff.Checkpointer(
        f"{folder}/run",
        staging=f"{folder}/staging",
        snapshot_every=100,
        **STRATEGIES[strategy],
    )
    with checkpointer:
        checkpointer.attach(ddp, optimizer)
        for step in checkpointer.steps(100):
            if (rank, step) == (1, _STEPS):
                raise ZeroDivisionError
            optimizer.zero_grad()
            ddp(batch(step, rank, 8, 20)).square().mean().backward()
            optimizer.step()


def goes_on(rank: int, world_size: int, folder: str, strategy: str) -> int:
    """Return where it resumes."""
    ddp = wrapped(small_model())
    optimizer = torch.optim.Adam(ddp.parameters(), lr=0.1)
    checkpointer = lowdiff.Checkpointer(
        f"{folder}/run", staging=f"{folder}/staging", **STRATEGIES[strategy]
    )
    step = checkpointer.attach(ddp, optimizer)
    checkpointer.close()
    return step


@pytest.mark.cases(1)
@pytest.mark.parametrize("strategy", ["gradients", "replica", "log", "survivors"])
def test_each_rank_secures_its_own_share(pool: Pool, tmp_path: Path, strategy: str) -> None:
    with pytest.raises(JobFailed, match="ZeroDivisionError"):
        pool.run(fails, 2, str(tmp_path), strategy)
    shutil.rmtree(tmp_path / "staging")
    assert pool.run(goes_on, 2, str(tmp_path), strategy) == [_STEPS, _STEPS]
