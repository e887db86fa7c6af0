"""Compressed gradients of sharded models: whatever kills ranks, the bits of an uninterrupted run come back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import lowdiff
from lowdiff.recovery.compare import has_same_bits
from lowdiff.recovery.inspect.verify import verify
from tests.contract.compressors import FAMILY
from tests.crash.sharded import log_training
from tests.processes import Script

UNTIL, WORLD_SIZE = 10, 4
_SLOW, _CAMPAIGN = pytest.mark.slow, pytest.mark.campaign
_FEATURED = ("topk", "powersgd", "8 bits", "randomk")
_FEATURES = ("accumulated", "several passes", "scaled", "half", "half reduced", "partly used")
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
        *(
            pytest.param(n, "", marks=_SLOW if n in (FAST, "dense") else _CAMPAIGN, id=n)
            for n in (*FAMILY, "dense")
        ),
        # With the slow tests each feature has one compressor, in turns.
        *(
            pytest.param(
                name,
                features,
                marks=_SLOW if _FEATURED[number % len(_FEATURED)] == name else _CAMPAIGN,
                id=f"{name}, {features}",
            )
            for name in _FEATURED
            for number, features in enumerate(_FEATURES)
        ),
    ],
)
@pytest.mark.turns(2)
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
        # Else gradients would not lie where they were exchanged, and be stored whole.
        assert "was changed between its exchange" not in (calm / f"out.{rank}").read_text()
    assert_recovered(torn, UNTIL)
    if name != "dense":  # which keeps the newest step alone
        for step in (3, 6):
            assert_recovered(torn, step)
    report = verify(torn / "run", torn / "staging")
    assert report.ok, report.failures


@pytest.mark.slow
@pytest.mark.launch
@pytest.mark.parametrize(
    "name", [FAST, *(pytest.param(n, marks=_CAMPAIGN) for n in FAMILY if n != FAST)]
)
def test_a_lost_node_costs_no_replicated_step(tmp_path: Path, name: str) -> None:
    residual = "exact" if name.startswith("cast") else "replicated"
    words = name, UNTIL, "--nodes", "0011", "--residual", residual
    calm, torn = tmp_path / "calm", tmp_path / "torn"
    ended(life(calm, 0, *words))
    died(life(torn, 0, *words, "--die-at", 7, "--dying", "all"))
    (torn / "node-1").rename(tmp_path / "lost")  # its processes may still write
    ended(life(torn, 1, *words))
    for rank in range(WORLD_SIZE):
        assert resumed(torn, rank)[1] >= 5
        assert steps(torn, rank) == steps(calm, rank)


@pytest.mark.launch
def test_shards_without_a_copy_on_another_node_have_no_compressor(tmp_path: Path) -> None:
    ranks = life(tmp_path, 0, FAST, 2, "--nodes", "0101")
    died(ranks)
    for rank in ranks:
        assert "no rank on another node holds those of rank(s)" in rank.printed()


@pytest.mark.slow
@pytest.mark.launch
@pytest.mark.parametrize(
    ("copies", "features"),
    [
        (2, ""),
        pytest.param(2, "accumulated", marks=_SLOW),
        pytest.param(2, "several passes", marks=_SLOW),
        pytest.param(2, "half", marks=_SLOW),
        pytest.param(2, "half reduced", marks=_SLOW),
        pytest.param(3, "", marks=_SLOW),
    ],
)
def test_without_a_compressor_the_bits_are_those_of_native_hsdp(
    tmp_path: Path, copies: int, features: str
) -> None:
    size = 3 if copies == 3 else WORLD_SIZE
    for name in ("dense", "native"):
        words = name, 5, "--copies", copies, "--features", features
        ended(life(tmp_path / name, 0, *words, world_size=size))
    for rank in range(size):
        assert steps(tmp_path / "dense", rank) == steps(tmp_path / "native", rank)


@pytest.mark.slow
@pytest.mark.launch
def test_a_change_of_the_mesh_leaves_the_state_exact(tmp_path: Path) -> None:
    ended(life(tmp_path, 0, "topk", 4))
    ended(life(tmp_path, 1, "topk", 6, "--copies", 4))
    ended(life(tmp_path, 2, "topk", 8, world_size=2))
    assert resumed(tmp_path, 0) == [0, 4, 6]
    for step in (3, 6, 8):
        assert_recovered(tmp_path, step)
    # The last two have one shard each, and ranks that join or leave it go on with the mean.
    assert (tmp_path / "out.0").read_text().count("starts at zero") == 1


@pytest.mark.slow
@pytest.mark.launch
def test_the_residual_of_a_snapshot_goes_on_with_an_exact_state(tmp_path: Path) -> None:
    words = "topk", 8, "--residual", "snapshot"
    died(life(tmp_path, 0, *words, "--die-at", 6, "--dying", "all"))
    ended(life(tmp_path, 1, *words))
    assert resumed(tmp_path, 0) == [0, 6]
    assert "that of snapshot 4" in (tmp_path / "out.0").read_text()
    for step in (5, 8):
        assert_recovered(tmp_path, step)


@pytest.mark.slow
@pytest.mark.launch
def test_a_copy_that_died_is_a_lost_rank_out_of_backward(tmp_path: Path) -> None:
    died(life(tmp_path, 0, "topk", UNTIL, "--die-at", 2, "--dying", "last before backward"))
    assert "lowdiff.errors.RankLost" in (tmp_path / "out.1").read_text()


@pytest.mark.launch
def test_what_cannot_work_says_what_does(tmp_path: Path) -> None:
    ranks = [
        Script(log_training.refusals, rank, WORLD_SIZE, tmp_path, output=tmp_path / f"out.{rank}")
        for rank in range(WORLD_SIZE)
    ]
    ended(ranks)
    expected = {
        "no replicate": 'replicate=mesh["rep"]). Or leave gradients as they are: strategy="replica"',
        "two dimensions": "a DeviceMesh of one dimension",
        "the shards": "that FSDP averages over them before lowdiff could",
        "native": "that FSDP averages over them before lowdiff could",
        "not sharded": "this model is not sharded",
        "partly sharded": "'extra' is trained by the ranks [0, 1, 2, 3]",
        "another hook": "'middle' has the all-reduce hook 'print' already",
    }
    for rank in range(WORLD_SIZE):
        said = json.loads((tmp_path / f"said.{rank}").read_text())
        assert said.keys() == expected.keys()
        for name, text in expected.items():
            assert text in said[name]


@pytest.mark.slow
@pytest.mark.launch
def test_copies_are_averaged_or_nobody_trains(tmp_path: Path) -> None:
    ranks = [
        Script(log_training.endings, rank, WORLD_SIZE, tmp_path, output=tmp_path / f"out.{rank}")
        for rank in range(WORLD_SIZE)
    ]
    ended(ranks)
    found = [json.loads((tmp_path / f"found.{rank}").read_text()) for rank in range(WORLD_SIZE)]
    for shard in (0, 1):
        assert found[shard]["detached"] == found[shard + 2]["detached"], "copies are the same"
    for of_rank in found:
        assert of_rank["closed"][0] == "UsageError"
        assert "outside the life of its Checkpointer" in of_rank["closed"][1]
        assert of_rank["partly used"][0] == "UnsupportedModel"
        assert "some got no gradient" in of_rank["partly used"][1]
