"""Several ranks replay one run together: each does a part, all end with the live bits."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lowdiff.persistence.values import same
from lowdiff.recovery.blocks import Unit
from lowdiff.recovery.sharing import owners_of
from lowdiff.types import Block
from tests.recovery.training import adamw, flip, train, two_optimizers

ROOT = Path(__file__).parents[2]
STEPS = 8


def torchrun(num_ranks: int, *words: object) -> subprocess.CompletedProcess[str]:
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *("--nproc-per-node", str(num_ranks), "-m", *map(str, words)),
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, timeout=120
    )


@pytest.mark.launch
@pytest.mark.parametrize(
    ("num_ranks", "build"), [(2, adamw), pytest.param(3, two_optimizers, marks=pytest.mark.slow)]
)
def test_ranks_of_torchrun_replay_parts_and_each_has_the_whole(
    num_ranks: int, build: Any, tmp_path: Path
) -> None:
    trained = train(tmp_path, STEPS, build=build, end="crash", snapshot_every=100)
    done = torchrun(
        num_ranks, "tests.recovery.shared_replay", trained.run, trained.staging, tmp_path / "out"
    )
    assert done.returncode == 0, done.stderr
    units = 0
    for rank in range(num_ranks):
        found = torch.load(tmp_path / f"out-{rank}.pt")
        assert same(dict(found["model"]), dict(trained.models[STEPS]))
        for index, live in enumerate(trained.optimizers[STEPS]):
            assert same(found["optimizers"][index]["state"], live["state"])
        assert found["own"] < found["all"], "nobody replays everything"
        units += found["own"]
        total = found["all"]
    assert units == total


@pytest.mark.launch
@pytest.mark.slow
def test_the_command_shares_the_work_and_writes_once(tmp_path: Path) -> None:
    trained = train(tmp_path, STEPS, end="crash", snapshot_every=100)
    out = tmp_path / "state.pt"
    words = ("lowdiff", "recover", trained.run, "--staging", trained.staging, "--out", out)
    done = torchrun(2, *words)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("step 8 of") == 1
    assert same(dict(torch.load(out)["model"]), dict(trained.models[STEPS]))

    for path in trained.run.rglob("rank-0000.safetensors"):
        flip(path, 3000)
    again = torchrun(2, *words, "--force")
    assert again.returncode != 0
    assert "fails its checksum" in again.stderr


@pytest.mark.launch
def test_ranks_hear_of_the_one_that_cannot_go_on(tmp_path: Path) -> None:
    trained = train(tmp_path, STEPS, end="crash", snapshot_every=100)
    words = ("tests.recovery.shared_replay", trained.run, trained.staging, tmp_path / "out", 1)
    done = torchrun(2, *words)
    assert done.returncode != 0
    assert "RecoveryError: rank 1 cannot go on: no room for a step" in done.stderr
    for rank in (0, 1):
        assert (tmp_path / f"out-{rank}.txt").read_text() == "RecoveryError"


@given(sizes=st.lists(st.integers(1, 100), min_size=1, max_size=40), num_ranks=st.integers(1, 6))
def test_every_unit_has_one_owner_and_shares_are_even(sizes: list[int], num_ranks: int) -> None:
    units = [Unit(0, (Block(i, 0, size),)) for i, size in enumerate(sizes)]
    owners = owners_of(units, num_ranks)
    assert owners == sorted(owners)
    assert set(owners) <= set(range(num_ranks))
    shares = [
        sum(s for s, o in zip(sizes, owners, strict=True) if o == r) for r in range(num_ranks)
    ]
    assert max(shares) <= sum(sizes) / num_ranks + max(sizes)
