"""Copies of shards that are on no other node: what is sent, and what happens where it comes otherwise."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import lowdiff
from lowdiff.compressors import TopK
from lowdiff.core.placement import Peers, peers_of
from lowdiff.errors import ConfigError
from lowdiff.persistence.files.paths import StagingFolder
from lowdiff.protect.copies.line import Sender
from lowdiff.testing import wait_until
from tests.crash.pool import Pool
from tests.crash.trainings import batch
from tests.unit.protect.copies.test_copies import Said, remove_while_used

_WIDTH = 256
#: Elements of one rank's shards.
_SHARD = (_WIDTH * _WIDTH + _WIDTH) // 2


class Training:
    """A rank on a node of its own, whose shards nobody else holds."""

    def __init__(self, rank: int, folder: str) -> None:
        torch.manual_seed(0)
        self.rank = rank
        self.staging = Path(folder) / f"staging-{rank}"
        self.model = nn.Linear(_WIDTH, _WIDTH)
        fully_shard(self.model, mesh=init_device_mesh("cpu", (2,)))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.1)
        self.checkpointer = lowdiff.Checkpointer(
            f"{folder}/run", staging=self.staging, copies=2, snapshot_every=100
        )
        self.checkpointer.attach(self.model, self.optimizer)

    def train(self, *steps: int) -> None:
        for step in steps:
            self.optimizer.zero_grad()
            self.model(batch(step, self.rank, 6, _WIDTH)).square().mean().backward()
            self.optimizer.step()
            self.checkpointer.commit()

    def hold(self, step: int) -> None:
        """Wait until this rank has its copies of a step."""
        wait_until(self.checkpointer, partial(reaches, "held_step", step), seconds=20)


def reaches(figure: str, step: int, stats: dict[str, Any]) -> bool:
    return bool(stats[figure] >= step)


def sent(rank: int, world_size: int, folder: str) -> tuple[int, int]:
    training = Training(rank, folder)
    first = training.checkpointer.stats()["copies_bytes_sent"]
    training.train(*range(10))
    training.hold(10)
    found = first, training.checkpointer.stats()["copies_bytes_sent"] - first
    training.checkpointer.close()
    return found


def test_a_step_sends_a_gradient_and_the_base_once_all_of_the_state(
    pool: Pool, tmp_path: Path
) -> None:
    for base, steps in pool.run(sent, 2, str(tmp_path)):
        # Adam's state is made in the first step, so the base has parameters alone.
        assert 4 * _SHARD < base < 4 * _SHARD + 32768
        assert 9 * 4 * _SHARD < steps < 10 * (4 * _SHARD + 4096)


def changed(rank: int, world_size: int, folder: str) -> tuple[list[str], int]:
    """What rank 0 sends of step 3 has one other bit."""
    said = Said()
    logging.getLogger("lowdiff").addHandler(said)
    training = Training(rank, folder)
    training.train(0, 1)
    send = Sender.send

    def wrong(self: Sender, message: bytes, step: int, mark: Any, behind: Any) -> None:
        behind[0][0] ^= 1
        send(self, message, step, mark, behind)

    if rank == 0:
        Sender.send = wrong  # type: ignore[method-assign, assignment]
    training.train(2)
    Sender.send = send  # type: ignore[method-assign]
    training.train(3)
    if (
        rank == 1
    ):  # whoever keeps the copy makes the step in a process of its own, when it comes to it
        wait_until(training.checkpointer, lambda _: any("LD901" in text for text in said.texts))
    training.train(4, 5)
    training.hold(6)
    training.train(6, 7)
    replicated = training.checkpointer.stats()["replicated_step"]
    training.checkpointer.close()
    logging.getLogger("lowdiff").removeHandler(said)
    return [text for text in said.texts if "LD901" in text], replicated


def test_a_gradient_that_came_otherwise_is_noticed_and_an_image_is_sent(
    pool: Pool, tmp_path: Path
) -> None:
    (none, first), (said, second) = pool.run(changed, 2, str(tmp_path))
    assert not none
    assert "no copy of rank 0's steps is kept until the next full snapshot" in said[0]
    assert min(first, second) >= 6


def removed(rank: int, world_size: int, folder: str) -> int:
    """Somebody removes the staging folder of rank 0's node."""
    training = Training(rank, folder)
    training.train(0, 1, 2)
    if rank == 0:
        remove_while_used(training.staging)
    training.train(3, 4, 5)
    training.hold(6)
    training.train(6, 7)
    replicated: int = training.checkpointer.stats()["replicated_step"]
    training.checkpointer.close()
    return replicated


def test_copies_of_shards_are_made_again_where_somebody_removed_staging(
    pool: Pool, tmp_path: Path
) -> None:
    assert min(pool.run(removed, 2, str(tmp_path))) >= 6
    assert not list(StagingFolder.all(tmp_path / "staging-0"))


def replaced(rank: int, world_size: int, folder: str) -> int:
    """A state that is loaded into an optimizer costs a snapshot, which is sent."""
    training = Training(rank, folder)
    training.train(0, 1, 2)
    training.optimizer.load_state_dict(training.optimizer.state_dict())
    training.train(3, 4, 5)
    training.hold(6)
    found: int = training.checkpointer.stats()["copies_bytes_sent"]
    training.checkpointer.close()
    return found


def test_a_snapshot_in_mid_run_is_sent(pool: Pool, tmp_path: Path) -> None:
    base, steps, image = 4 * _SHARD, 5 * 4 * _SHARD, 12 * _SHARD  # which stands for step 4
    for num_bytes in pool.run(replaced, 2, str(tmp_path)):
        assert num_bytes > base + steps + image


def refused(rank: int, world_size: int, folder: str) -> str:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("rep", "shard"))
    model = nn.Linear(4, 4)
    fully_shard(model, mesh=mesh["shard"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    staging = f"{folder}/staging"
    checkpointer = lowdiff.Checkpointer(
        f"{folder}/run", compressor=TopK(0.1), staging=staging, copies=2
    )
    try:
        checkpointer.attach(model, optimizer, replicate=mesh["rep"])
    except ConfigError as error:
        return str(error)
    return ""


def test_shards_of_one_node_have_no_copies(pool: Pool, tmp_path: Path) -> None:
    for said in pool.run(refused, 2, str(tmp_path)):
        assert "copies=2 needs 2 nodes, and there are 1" in said


@pytest.mark.parametrize(
    ("of_rank", "trained", "expected"),
    [
        # HSDP with a copy of the model on each node, whatever the order of its ranks.
        ("0011", "abab", Peers((2,), (2,))),
        ("0011", "abba", Peers((3,), (3,))),
        # FSDP, and HSDP whose copies lie within a node.
        ("01", "ab", Peers((1,), (1,), (1,), True)),
        ("0101", "aabb", Peers((1,), (1,))),
        ("0101", "abab", Peers((1,), (1,), (1,), True)),
        # DDP on nodes with different numbers of ranks.
        ("0111", "aaaa", Peers((1,), (1, 2, 3))),
    ],
)
def test_a_copy_is_kept_where_the_same_is_trained(
    of_rank: str, trained: str, expected: Peers
) -> None:
    assert peers_of(0, [int(node) for node in of_rank], 2, trained) == expected


def test_ranks_that_train_the_same_divide_the_work() -> None:
    nodes, trained = [0, 0, 0, 0, 1, 1, 1, 1], "ababbbaa"
    keepers = [peers_of(rank, nodes, 2, trained).keepers for rank in range(4)]
    assert keepers == [(6,), (4,), (7,), (5,)]
