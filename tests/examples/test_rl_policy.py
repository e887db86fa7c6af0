"""The sampler's weights are the trainer's at every version, whichever of them is killed."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.persistence.s3_server import S3Server, running_server

pytestmark = [pytest.mark.launch, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]
STEPS = 1000


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with running_server() as made:
        yield made


def start(folder: Path, kind: str, *arguments: str) -> subprocess.Popen[bytes]:
    """Start one of the two; its output is appended to a file."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    words = [sys.executable, "examples/rl_policy.py", kind, *arguments, f"--steps={STEPS}"]
    with (folder / f"{kind}.txt").open("ab") as output:
        return subprocess.Popen(words, cwd=ROOT, env=environment, stdout=output, stderr=output)


def told(folder: Path, kind: str) -> dict[int, str]:
    """Return the digest of the weights of each step that one of the two printed."""
    text = (folder / f"{kind}.txt").read_text()
    found: dict[int, str] = {}
    for step, digest in re.findall(r"step (\d+)\)?: reward [\d.]+ (\w{12})\n", text):
        # A step that is made anew after a kill has the same bits.
        assert found.setdefault(int(step), digest) == digest
    return found


@pytest.mark.slow
@pytest.mark.turns(2)
@pytest.mark.parametrize("place", ["folder", "s3"])
def test_the_sampler_has_the_trainers_bits_although_both_are_killed(
    tmp_path: Path, server: S3Server, place: str
) -> None:
    target = str(tmp_path / "target") if place == "folder" else server.url("policy")
    dice = random.Random(random.randrange(1 << 32))
    arguments = {
        "train": (str(tmp_path / "run"), f"--target={target}", f"--staging={tmp_path / 'staging'}"),
        "sample": (target,),
    }
    running = {kind: start(tmp_path, kind, *arguments[kind]) for kind in arguments}
    for _ in range(4):
        before = len(told(tmp_path, "sample"))
        deadline = time.monotonic() + 60
        while len(told(tmp_path, "sample")) == before and running["train"].poll() is None:
            assert time.monotonic() < deadline, (tmp_path / "sample.txt").read_text()[-2000:]
            time.sleep(0.05)
        time.sleep(dice.uniform(0, 0.5))
        kind = dice.choice(["train", "sample"])
        if running[kind].poll() is None:
            running[kind].send_signal(signal.SIGKILL)
            running[kind].wait()
            running[kind] = start(tmp_path, kind, *arguments[kind])
    for kind, process in running.items():
        assert process.wait(120) == 0, (tmp_path / f"{kind}.txt").read_text()[-3000:]
    trained, sampled = told(tmp_path, "train"), told(tmp_path, "sample")
    assert max(sampled) == max(trained) == STEPS
    assert len(sampled) >= 2
    assert {step: trained[step] for step in sampled if step} == {
        step: digest for step, digest in sampled.items() if step
    }
