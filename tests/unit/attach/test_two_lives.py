"""A run that went on in two places from one step: the two are never mixed, and neither is lost."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest
import torch

import lowdiff
from lowdiff.errors import RunMismatch
from tests.crash.pool import Pool
from tests.crash.trainings import wrapped
from tests.unit.commit.test_store import loop_in, reached, wait_until
from tests.unit.loops import Loop


@pytest.fixture
def url(tmp_path: Path) -> str:
    """A store in a folder, which needs no server."""
    return f"file://{tmp_path}/store"


def train(loop: Loop, until: int, other_data: int = 0) -> None:
    for number in loop.checkpointer.steps(until):
        loop.step(number + other_data)


def parted(tmp_path: Path, url: str) -> tuple[Loop, Loop]:
    """Two nodes that went on from step 2, one of them while the store did not answer.

    Both are dead; what the first made is in its staging memory only.
    """
    loop_in(tmp_path / "a", url).run(2)
    here = loop_in(tmp_path / "a", None, batch_size=1000, snapshot_every=1000)
    assert here.attach() == 2
    train(here, 9, other_data=1000)
    here.die()
    there = loop_in(tmp_path / "b", url)
    assert there.attach() == 2
    train(there, 6)
    wait_until(there, reached(6))
    there.die()
    return here, there


@pytest.mark.slow
def test_a_node_that_comes_back_is_refused(tmp_path: Path, url: str) -> None:
    here, _ = parted(tmp_path, url)
    with pytest.raises(RunMismatch, match="different histories"):
        loop_in(tmp_path / "a", url).attach()
    again = loop_in(tmp_path / "a", None)
    assert again.attach() == 9
    assert all(torch.equal(again.weights()[name], w) for name, w in here.weights().items())
    again.checkpointer.close()


@pytest.mark.slow
def test_a_node_that_goes_on_with_the_stores_history_leaves_its_own_memory_alone(
    tmp_path: Path, url: str, caplog: pytest.LogCaptureFixture
) -> None:
    here, there = parted(tmp_path, url)
    run = tmp_path / "a" / "run"
    elsewhere = run.rename(tmp_path / "elsewhere")
    with caplog.at_level(logging.WARNING):
        back = loop_in(tmp_path / "a", url)
        assert back.attach() == 6
    assert all(torch.equal(back.weights()[name], w) for name, w in there.weights().items())
    assert "i000001-r0000 is of a life 1 that" in caplog.text
    train(back, 7)
    wait_until(back, reached(7))
    back.checkpointer.close()
    found = lowdiff.recover(url, step=6, staging=tmp_path / "none").model_state_dict()
    assert all(torch.equal(found[name], w) for name, w in there.weights().items())
    # Its steps are still there for the run folder that they belong to.
    shutil.rmtree(run)
    elsewhere.rename(run)
    own = loop_in(tmp_path / "a", None)
    assert own.attach() == 9
    assert all(torch.equal(own.weights()[name], w) for name, w in here.weights().items())
    own.checkpointer.close()


def attach(rank: int, world_size: int, run: str, restore: str = "all") -> str:
    """What a rank with a run folder of its own is told."""
    model = wrapped(torch.nn.Linear(20, 3))
    optimizer = torch.optim.AdamW(model.parameters())
    checkpointer = lowdiff.Checkpointer(
        run.format(rank=rank),
        compressor=lowdiff.compressors.TopK(0.1),
        staging=f"{run.format(rank=rank)}-staging",
    )
    try:
        checkpointer.attach(model, optimizer, restore=restore)
        checkpointer.close()
    except RunMismatch as error:
        return str(error)
    return ""


@pytest.mark.slow
def test_folders_of_nodes_that_hold_two_lives_of_one_number_are_refused(
    pool: Pool, tmp_path: Path
) -> None:
    run = f"{tmp_path}/run-{{rank}}"
    assert pool.run(attach, 2, run) == ["", ""]
    for rank in range(
        2
    ):  # each goes on alone, as the same life, without the other's half of the state
        shutil.copytree(tmp_path / f"run-{rank}", tmp_path / f"alone-{rank}" / "run")
    alone = f"{tmp_path}/alone-{{rank}}/run"
    for rank in range(2):
        assert pool.run(attach, 1, alone.format(rank=rank), "none") == [""]
    for said in pool.run(attach, 2, alone):
        assert "ranks 0 and 1 hold different histories: another life 1 each" in said
