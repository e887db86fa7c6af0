"""A Checkpointer belongs to the process that attached it: a forked child can do the parent no harm."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import lowdiff
from lowdiff.persistence.files.locks import FileLock
from tests.processes import Script
from tests.unit.loop import forked
from tests.unit.loop.forked import STEPS
from tests.unit.loops import wait_until


def start(rank: int, world_size: int, folder: Path, *options: str) -> subprocess.Popen[str]:
    words = [str(rank), str(world_size), str(folder), *options]
    return subprocess.Popen(
        [sys.executable, "-m", "tests.unit.loop.forked", *words],
        cwd=Path(__file__).parents[3],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
@pytest.mark.turns(2)
@pytest.mark.parametrize(
    ("compressor", "world_size"), [("topk", 1), ("none", 1), ("topk", 2), ("powersgd", 2)]
)
def test_every_call_is_refused_there_and_leaving_does_nothing(
    tmp_path: Path, compressor: str, world_size: int
) -> None:
    ranks = [start(rank, world_size, tmp_path, compressor) for rank in range(world_size)]
    outputs = [rank.communicate(timeout=100) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * world_size, outputs
    assert outputs[0][0].split() == ["child", "7", "restarts", "0"]
    told = json.loads((tmp_path / "told.json").read_text())
    assert told.pop("close") == "nothing"
    for call, text in told.items():
        assert text.startswith("UsageError: this Checkpointer belongs to the process"), call
    if world_size == 1:
        assert (
            lowdiff.recover(tmp_path / "another", staging=tmp_path / "staging-of-child").step == 2
        )
    recovered = lowdiff.recover(tmp_path / "run", staging=tmp_path / "staging")
    assert recovered.step == STEPS
    weights = torch.load(tmp_path / "weights.pt")
    found = {name.removeprefix("module."): value for name, value in weights.items()}
    for name, value in recovered.model_state_dict().items():
        assert torch.equal(value, found[name.removeprefix("module.")]), name


def test_a_child_that_outlives_its_trainer_holds_neither_writer_nor_lock(tmp_path: Path) -> None:
    trainer = Script(forked.main, 0, 1, tmp_path, "topk", "--die", output=tmp_path / "output.txt")
    assert trainer.wait() == -signal.SIGKILL, trainer.printed()
    began = time.monotonic()
    (stage,) = (tmp_path / "staging").glob("*/*")
    for name in ("trainer.lock", "writer.lock"):
        lock = FileLock(stage / name)
        assert lock.acquire("a test", timeout_seconds=10), name
        lock.release()
    assert time.monotonic() - began < 10
    wait_until((tmp_path / "told.json").exists)  # the last that the child does
