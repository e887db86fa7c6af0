"""Sharded trainings: whatever kills them, the bits of an uninterrupted run come back, on any mesh."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import lowdiff
import lowdiff.testing
from lowdiff.recovery.compare import has_same_bits
from lowdiff.recovery.inspect.export import export
from lowdiff.recovery.inspect.weights import recover_weights
from tests.crash.sharded import beginning, loading, publishing, training
from tests.processes import Script
from tests.unit.cli.commands import Command, command

__all__ = ["command"]

UNTIL, DIES_AT = 9, 6
_SLOW = pytest.mark.slow
_WORLDS = {"even": 2, "uneven": 2, "tp": 2, "sp": 2, "hsdp": 4, "fsdp+tp": 4}


def life(folder: Path, number: int, kind: str, *words: object, world_size: int = 0) -> list[Script]:
    """Start all ranks of one life of a run; the words of the last rank may end it."""
    size = world_size or _WORLDS[kind]
    folder.mkdir(exist_ok=True)
    return [
        Script(
            training.main, rank, size, number, folder, kind, *words, output=folder / f"out.{rank}"
        )
        for rank in range(size)
    ]


def ended(ranks: list[Script]) -> None:
    """Wait until all ranks have trained to the end."""
    assert [rank.wait() for rank in ranks] == [0] * len(ranks), ranks[0].printed()[-4000:]


def lines(folder: Path, rank: int) -> list[list[Any]]:
    """What a rank has reported, over all its lives."""
    return [json.loads(line) for line in (folder / f"report.{rank}").read_text().splitlines()]


def steps(folder: Path, rank: int) -> dict[int, list[Any]]:
    """Loss and digest of each step, as the last life that made it left it."""
    return {line[0]: line[1:] for line in lines(folder, rank) if line[0] != "resumed"}


def assert_a_kill_costs_nothing(
    folder: Path, kind: str, optimizer: str, features: str, strategy: str
) -> None:
    """Kill all ranks of a training, resume it, and compare it with one that nobody killed."""
    words = kind, optimizer, UNTIL, "--features", features, "--strategy", strategy
    calm, torn = folder / "calm", folder / "torn"
    ended(life(calm, 0, *words))
    ranks = life(torn, 0, *words, "--die-at", DIES_AT)
    for killed in ranks:
        killed.wait()
    ended(life(torn, 1, *words))
    for rank in range(len(ranks)):
        begun = [number for word, number, *_ in lines(torn, rank) if word == "resumed"]
        assert begun == [0, DIES_AT]
        assert steps(torn, rank) == steps(calm, rank)


@pytest.mark.slow
@pytest.mark.turns(2)
@pytest.mark.launch
@pytest.mark.parametrize(
    ("kind", "optimizer", "features"),
    [
        ("uneven", "loop", "evaluated,ema"),
        ("hsdp", "fused", ""),
        ("tp", "foreach", ""),
        ("fsdp+tp", "loop", ""),
        *(
            # With the slow tests each kind has one of them, in turns.
            pytest.param(
                kind,
                optimizer,
                "",
                marks=() if number % len(training.OPTIMIZERS) == turn else pytest.mark.campaign,
            )
            for number, kind in enumerate(_WORLDS)
            for turn, optimizer in enumerate(training.OPTIMIZERS)
        ),
        *(
            ("even", "fused", feature)
            for feature in ("accumulated", "half", "checkpointed", "compiled", "frozen", "scaled")
        ),
        ("hsdp", "loop", "accumulated,half,frozen,ema"),
    ],
)
@pytest.mark.parametrize("strategy", ["gradients", "replica"])
def test_a_killed_rank_costs_no_committed_step(
    tmp_path: Path, kind: str, optimizer: str, features: str, strategy: str
) -> None:
    assert_a_kill_costs_nothing(tmp_path, kind, optimizer, features, strategy)


@pytest.mark.slow
@pytest.mark.turns(3)
@pytest.mark.launch
@pytest.mark.parametrize(
    ("kind", "nodes"),
    [
        # Nobody else holds a rank's shards; the copies of HSDP on another node do, or not.
        ("uneven", "01"),
        ("hsdp", "0011"),
        ("hsdp", "0101"),
        ("even", "01"),
        ("fsdp+tp", "0011"),
    ],
)
@pytest.mark.parametrize("lost", [0, 1])
def test_a_lost_node_costs_no_replicated_step(
    tmp_path: Path, kind: str, nodes: str, lost: int
) -> None:
    words = kind, "fused", UNTIL, "--nodes", nodes, "--snapshot-every", 100
    calm, torn = tmp_path / "calm", tmp_path / "torn"
    ended(life(calm, 0, *words))
    ranks = life(torn, 0, *words, "--die-at", DIES_AT)
    for killed in ranks:
        killed.wait()
    # Its processes may still write.
    (torn / f"node-{lost}").rename(tmp_path / "lost")
    ended(life(torn, 1, *words))
    for rank, ending in enumerate(ranks):
        begun = [number for word, number, *_ in lines(torn, rank) if word == "resumed"]
        assert begun[1] >= DIES_AT - 2, ending.printed()
        assert steps(torn, rank) == steps(calm, rank)


@pytest.mark.slow
@pytest.mark.launch
def test_copies_of_a_shard_that_part_are_named(tmp_path: Path) -> None:
    ranks = life(tmp_path, 0, "hsdp", "loop", 8, "--features", "parted")
    ended(ranks)
    for rank in ranks:
        assert "rank(s) 3 differ from the others in parameter '0.weight@8,0'" in rank.printed()


def recovered(folder: Path) -> dict[str, Any]:
    """The newest state on this one machine, as `training.whole` has it."""
    state = lowdiff.recover(folder / "run", staging=folder / "staging")
    kept = state.optimizer_state_dict()["state"]
    return {"model": state.model_state_dict(), "state": [kept[i] for i in sorted(kept)]}


def assert_weights_come_alone(folder: Path, step: int | None = None) -> None:
    """Compare what is put together tensor by tensor with an export of the whole state."""
    run, staging = folder / "run", folder / "staging"
    whole = export(lowdiff.recover(run, step, staging=staging), folder / "whole.safetensors")
    alone = folder / "alone.safetensors"
    with lowdiff.testing.limits(weights_group_bytes=1):
        recover_weights(run, alone, step, staging=staging)
    assert alone.read_bytes() == whole.read_bytes()
    whole.unlink()


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["model"].keys() == expected["model"].keys()
    for name, tensor in expected["model"].items():
        assert has_same_bits(found["model"][name], tensor), name
    for mine, theirs in zip(found["state"], expected["state"], strict=True):
        assert mine.keys() == theirs.keys()
        for key, value in theirs.items():
            assert has_same_bits(mine[key].float(), value.float()), key


@pytest.mark.slow
@pytest.mark.launch
@pytest.mark.parametrize("features", ["", "frozen"])
def test_a_run_goes_on_on_any_mesh(tmp_path: Path, features: str) -> None:
    until = 0
    for number, (kind, size) in enumerate(
        [("uneven", 2), ("uneven", 4), ("uneven", 1), ("uneven", 3)]
    ):
        until += 2
        words = kind, "fused", until, "--features", features
        ended(life(tmp_path, number, *words, world_size=size))
        assert lines(tmp_path, 0)[-3] == ["resumed", until - 2]
        assert_same(recovered(tmp_path), torch.load(tmp_path / "whole.pt"))


@pytest.mark.slow
@pytest.mark.launch
@pytest.mark.parametrize("features", ["", "frozen"])
def test_shards_copies_and_whole_models_change_places(tmp_path: Path, features: str) -> None:
    lives = [
        ("even", 2),
        ("hsdp", 4),
        ("ddp", 2),
        ("fsdp+tp", 4),
        ("single", 1),
        ("tp", 2),
        ("even", 2),
    ]
    for number, (kind, size) in enumerate(lives):
        until = 2 * (number + 1)
        words = kind, "loop", until, "--features", features
        ended(life(tmp_path, number, *words, world_size=size))
        assert lines(tmp_path, 0)[-3] == ["resumed", until - 2]
        assert_same(recovered(tmp_path), torch.load(tmp_path / "whole.pt"))


@pytest.mark.slow
@pytest.mark.launch
@pytest.mark.parametrize(
    ("kinds", "size"),
    [
        (("ddp", "tp"), 2),
        (("tp", "ddp"), 2),
        (("ddp", "fsdp+tp", "hsdp", "fsdp+tp"), 4),
        (("ddp+tp", "fsdp+tp", "ddp+tp"), 4),
    ],
)
def test_ranks_draw_alike_where_the_mesh_says_so(
    tmp_path: Path, kinds: tuple[str, ...], size: int
) -> None:
    before: dict[int, float] = {}  # replica of the model -> what it would have drawn next
    for number, kind in enumerate(kinds):
        until = 2 * (number + 1)
        words = kind, "loop", until, "--features", "drawn"
        ranks = life(tmp_path, number, *words, world_size=size)
        ended(ranks)
        drawn: dict[int, float] = {}
        for rank, process in enumerate(ranks):
            assert "differ from the others" not in process.printed()
            begun, first, last = lines(tmp_path, rank)[-3:]
            assert begun == ["resumed", until - 2]
            replica = training.replica_of(kind, rank)
            assert drawn.setdefault(replica, last[-1]) == last[-1], f"{kind}: rank {rank}"
            assert first[-2] == before.get(replica, first[-2]), f"{kind}: rank {rank}"
        assert len({*drawn.values()}) == len(drawn)
        before = drawn


@pytest.mark.launch
def test_frozen_shards_are_put_together(tmp_path: Path) -> None:
    ended(life(tmp_path, 0, "uneven", "fused", 2, "--features", "frozen"))
    assert_same(recovered(tmp_path), torch.load(tmp_path / "whole.pt"))
    assert_weights_come_alone(tmp_path)


@pytest.mark.slow
@pytest.mark.launch
def test_weights_alone_come_back_on_another_mesh(tmp_path: Path) -> None:
    ended(life(tmp_path, 0, "uneven", "fused", 2, "--features", "frozen"))
    weights = torch.load(tmp_path / "whole.pt")["model"]
    words = "uneven", "sgd", 0, "--features", "frozen", "--restore", "model"
    ended(life(tmp_path, 1, *words, world_size=3))
    found = torch.load(tmp_path / "whole.pt")["model"]
    assert found.keys() == weights.keys()
    assert all(has_same_bits(found[name], weights[name]) for name in weights)


@pytest.mark.slow
@pytest.mark.launch
def test_an_export_loads_into_a_sharded_model(tmp_path: Path) -> None:
    ended(life(tmp_path, 0, "uneven", "fused", 2))
    state = lowdiff.recover(tmp_path / "run", staging=tmp_path / "staging")
    export(state, tmp_path / "exported")
    ranks = [
        Script(loading.main, rank, 3, tmp_path, "uneven", output=tmp_path / f"loaded.{rank}")
        for rank in range(3)
    ]
    ended(ranks)
    assert [rank.printed().splitlines()[-1] for rank in ranks] == ["same: True"] * 3


@pytest.mark.slow
@pytest.mark.launch
@pytest.mark.parametrize("kind", ["uneven", "ddp"])
def test_a_run_begins_with_a_dcp_folder(tmp_path: Path, kind: str) -> None:
    def trained(life: str, dies_at: int) -> list[Script]:
        ranks = range(2)
        started = [
            Script(
                beginning.main,
                rank,
                2,
                life,
                tmp_path,
                kind,
                dies_at,
                output=tmp_path / f"{life}.out",
            )
            for rank in ranks
        ]
        for script in started:
            script.wait()
        return started

    def told(life: str, rank: int) -> list[list[Any]]:
        return [json.loads(line) for line in (tmp_path / f"{life}.{rank}").read_text().splitlines()]

    ended(trained("plain", -1))
    trained("first", 7)
    ended(trained("second", -1))
    for rank in range(2):
        expected = told("plain", rank)
        assert told("first", rank)[:5] == [["resumed", 0], *expected[3:7]]
        assert told("second", rank) == [["resumed", 4], *expected[7:]]


@pytest.mark.slow
@pytest.mark.launch
def test_what_looks_at_a_run_takes_a_sharded_one(tmp_path: Path, command: Command) -> None:
    ended(life(tmp_path, 0, "uneven", "fused", 9))
    run, staging = str(tmp_path / "run"), str(tmp_path / "staging")
    for name in ("inspect", "verify", "timeline"):
        found = command(name, run, "--staging", staging)
        assert found.code == 0, found
    (tmp_path / "branched").mkdir()
    branch = str(tmp_path / "branched" / "run")
    assert command("recover", run, "--as-run", branch, "--staging", staging).code == 0
    ended(life(tmp_path / "branched", 0, "uneven", "fused", 12, world_size=3))
    assert lines(tmp_path / "branched", 0)[0] == ["resumed", 9]


@pytest.mark.cases(1)
@pytest.mark.launch
@pytest.mark.parametrize("kind", ["uneven", "ddp", pytest.param("tp", marks=_SLOW)])
def test_a_training_of_several_ranks_is_followed_and_published_whole(
    tmp_path: Path, kind: str
) -> None:
    ranks = [
        Script(publishing.main, rank, 2, tmp_path, kind, output=tmp_path / f"out.{rank}")
        for rank in range(2)
    ]
    ended(ranks)
    version = lowdiff.Subscriber(tmp_path / "target").newest()
    assert version is not None
    assert version.step == publishing.STEPS
