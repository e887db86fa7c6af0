"""Compressed gradients of sharded models: whatever kills ranks, the bits of an uninterrupted run come back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import lowdiff
from lowdiff.recovery.compare import has_same_bits
from tests.contract.compressors import FAMILY
from tests.crash.sharded import log_training
from tests.processes import Script

UNTIL, WORLD_SIZE = 10, 4
_SLOW = pytest.mark.slow
#: The others run with the slow tests.
FAST = "topk"


def life(folder: Path, number: int, *words: object, world_size: int = WORLD_SIZE) -> list[Script]:
    """Start all ranks of one life of a run."""
    folder.mkdir(exist_ok=True)
    return [
        Script(
            log_training.main,
            rank,
            world_size,
            number,
            folder,
            *words,
            output=folder / f"out.{rank}",
        )
        for rank in range(world_size)
    ]


def ended(ranks: list[Script]) -> None:
    """Wait until all ranks have trained to the end."""
    assert [rank.wait() for rank in ranks] == [0] * len(ranks), ranks[0].printed()[-4000:]


def died(ranks: list[Script]) -> None:
    """Wait until no rank is left."""
    assert all(rank.wait() for rank in ranks)


def lines(folder: Path, rank: int) -> list[list[Any]]:
    """What a rank has reported, over all its lives."""
    return [json.loads(line) for line in (folder / f"report.{rank}").read_text().splitlines()]


def steps(folder: Path, rank: int) -> dict[int, list[Any]]:
    """Loss and digests of each step, as the last life that made it left it."""
    return {line[0]: line[1:] for line in lines(folder, rank) if line[0] != "resumed"}


def resumed(folder: Path, rank: int) -> list[int]:
    """Where each life of a rank began."""
    return [line[1] for line in lines(folder, rank) if line[0] == "resumed"]


def assert_recovered(folder: Path, step: int) -> None:
    """See that one machine puts a step together as the ranks had it."""
    expected = torch.load(folder / f"whole-{step}.pt")
    state = lowdiff.recover(folder / "run", step, staging=folder / "staging")
    found = state.model_state_dict()
    assert found.keys() == expected["model"].keys()
    for name, tensor in expected["model"].items():
        assert has_same_bits(found[name], tensor), name
    kept = state.optimizer_state_dict()["state"]
    for index, theirs in enumerate(expected["state"]):
        assert kept[index].keys() == theirs.keys()
        for key, value in theirs.items():
            assert has_same_bits(kept[index][key].float(), value.float()), key


@pytest.mark.launch
@pytest.mark.parametrize(
    ("name", "features"),
    [
        *(pytest.param(n, "", marks=[] if n == FAST else _SLOW, id=n) for n in FAMILY),
        *(
            pytest.param(name, features, marks=_SLOW, id=f"{name}, {features}")
            for name in ("topk", "powersgd", "8 bits", "randomk")
            for features in (
                "accumulated",
                "several passes",
                "scaled",
                "half",
                "half reduced",
                "partly used",
            )
        ),
    ],
)
def test_killed_ranks_cost_no_committed_step(tmp_path: Path, name: str, features: str) -> None:
    words = name, UNTIL, "--features", features
    calm, torn = tmp_path / "calm", tmp_path / "torn"
    ended(life(calm, 0, *words))
    died(life(torn, 0, *words, "--die-at", 4))
    died(life(torn, 1, *words, "--die-at", 7, "--dying", "all"))
    ended(life(torn, 2, *words))
    for rank in range(WORLD_SIZE):
        assert resumed(torn, rank) == [0, 4, 7]
        assert steps(torn, rank) == steps(calm, rank)
    for step in (3, 6, UNTIL):
        assert_recovered(torn, step)
