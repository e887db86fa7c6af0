"""A rank that dies inside a collective: the others say so at once, and fewer ranks go on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


def start(
    rank: int, world_size: int, folder: Path, compressor: str, *options: str
) -> subprocess.Popen[str]:
    store = folder / f"store-{world_size}"
    words = [str(rank), str(world_size), str(store), str(folder), compressor, *options]
    return subprocess.Popen(
        [sys.executable, "-m", "tests.crash.launch.lost_rank", *words],
        cwd=Path(__file__).parents[3],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.launch
@pytest.mark.parametrize(
    ("compressor", "die_at"),
    [("topk", 4), ("none", 4), pytest.param("powersgd", 15, marks=pytest.mark.slow)],
)
def test_the_survivor_names_it_and_one_rank_goes_on(
    tmp_path: Path, compressor: str, die_at: int
) -> None:
    survivor = start(0, 2, tmp_path, compressor)
    victim = start(1, 2, tmp_path, compressor, "--die-at", str(die_at))
    output, errors = survivor.communicate(timeout=100)
    victim.communicate(timeout=100)
    assert survivor.returncode == 3, errors
    assert victim.returncode == -9
    assert output.splitlines()[1].startswith(
        "RankLost: an exchange between ranks failed, most likely"
    )
    assert output.splitlines()[-1] == "closed: True"
    alone = start(0, 1, tmp_path, compressor)
    output, errors = alone.communicate(timeout=100)
    assert alone.returncode == 0, errors
    assert output.split() == ["resumed", "3"]
