"""A rank that dies inside a collective: the others say so at once, and fewer ranks go on."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.crash.launch import lost_rank
from tests.processes import Script


def start(rank: int, world_size: int, folder: Path, compressor: str, *options: str) -> Script:
    words = [rank, world_size, folder / f"store-{world_size}", folder, compressor, *options]
    output = folder / f"output-{rank}-of-{world_size}.txt"
    return Script(lost_rank.main, *words, output=output)


@pytest.mark.launch
@pytest.mark.parametrize(
    ("compressor", "die_at"),
    [("topk", 4), ("none", 4), pytest.param("powersgd", 12, marks=pytest.mark.slow)],
)
def test_the_survivor_names_it_and_one_rank_goes_on(
    tmp_path: Path, compressor: str, die_at: int
) -> None:
    survivor = start(0, 2, tmp_path, compressor)
    victim = start(1, 2, tmp_path, compressor, "--die-at", str(die_at))
    assert survivor.wait() == 3, survivor.printed()
    assert victim.wait() == -9
    lines = survivor.printed().splitlines()
    assert any(
        line.startswith("RankLost: an exchange between ranks failed, most likely") for line in lines
    )
    assert lines[-1] == "closed: True"
    alone = start(0, 1, tmp_path, compressor)
    assert alone.wait() == 0, alone.printed()
    assert alone.printed().splitlines()[-1] == "resumed 3"


@pytest.mark.slow
@pytest.mark.launch
def test_a_rank_that_hangs_between_its_optimizer_and_its_commit_keeps_nobody_from_closing(
    tmp_path: Path,
) -> None:
    survivor = start(0, 2, tmp_path, "topk", "--timeout", "3")
    stopped = start(1, 2, tmp_path, "topk", "--timeout", "3", "--stop-at", "4")
    try:
        assert survivor.wait() == 3, survivor.printed()
    finally:
        stopped.kill()
    assert survivor.printed().splitlines()[-1] == "closed: True"
    alone = start(0, 1, tmp_path, "topk")
    assert alone.wait() == 0, alone.printed()
    # The rank that was stopped had not staged its share of the fourth step.
    assert alone.printed().splitlines()[-1] == "resumed 3"
