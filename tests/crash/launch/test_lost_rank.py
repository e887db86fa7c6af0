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
