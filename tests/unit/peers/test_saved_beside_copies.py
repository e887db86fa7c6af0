"""A node is lost while a rank on another node lives, which saves a newer step than the copies have: bits count first."""

from __future__ import annotations

import logging
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lowdiff.compressors import TopK
from lowdiff.errors import DamagedFile, LowDiffError
from lowdiff.persistence.files.paths import RunFolder
from lowdiff.persistence.run.catalog import scan
from lowdiff.recovery.plan import RecoveryPlan
from lowdiff.recovery.replay.replayer import ReplayOptions
from lowdiff.recovery.replica.recover import MemoryPlan
from lowdiff.recovery.search import Search
from lowdiff.recovery.state import RecoveredState
from lowdiff.testing import kill, parts_of, wait_until
from tests.crash.pool import Pool
from tests.crash.trainings import batch
from tests.unit.peers.test_copies import Said, Training
from tests.unit.peers.test_replicated import is_held

SETTINGS: dict[str, dict[str, Any]] = {
    "residual": {"compressor": TopK(0.1), "residual": "replicated"},
    "replica": {"compressor": None, "strategy": "replica", "reproducible": True},
}


def _step(training: Training, step: int) -> None:
    """All of a body but its commit; each rank draws from a generator of its own."""
    training.optimizer.zero_grad()
    found = training.ddp(batch(step, training.rank, 6, 12))
    (found * torch.rand_like(found)).square().mean().backward()
    training.optimizer.step()


def lived(
    rank: int,
    world_size: int,
    folder: str,
    kind: str,
    until: int,
    *,
    saves: bool,
    snapshot_every: int = 100,
) -> Any:
    """A life until a step; then, perhaps, all others are lost in the next body, and rank 0 saves that."""
    said = Said()
    logging.getLogger("lowdiff").addHandler(said)
    training = Training(rank, folder, snapshot_every=snapshot_every, **SETTINGS[kind])
    checkpointer = training.checkpointer
    began = training.began
    if not began:
        torch.manual_seed(100 + rank)
    for step in range(began, until):
        _step(training, step)
        checkpointer.commit()
        wait_until(checkpointer, partial(is_held, step + 1))
        dist.barrier()  # no residual is sent while one rank is in the next exchange
    state = [p.detach().clone() for p in training.ddp.parameters()]
    if saves:
        _step(training, until)
        dist.barrier()
        if rank == 0:  # the others do not come to their commit
            checkpointer.commit()
            survivor = parts_of(checkpointer).survivor
            assert survivor is not None
            assert survivor.save("the others are lost") is not None
        dist.barrier()
    kill(checkpointer)
    logging.getLogger("lowdiff").removeHandler(said)
    return began, state, said.texts


@pytest.mark.slow
@pytest.mark.parametrize("kind", SETTINGS)
def test_training_goes_on_from_the_copies_as_if_nothing_had_failed(
    pool: Pool, tmp_path: Path, kind: str
) -> None:
    folder = str(tmp_path / "run")
    pool.run(partial(lived, saves=True), 2, folder, kind, 4)
    shutil.rmtree(tmp_path / "run/staging-1")
    again = pool.run(partial(lived, saves=False), 2, folder, kind, 8)
    whole = pool.run(partial(lived, saves=False), 2, str(tmp_path / "whole"), kind, 8)
    for (began, state, said), (_, expected, _) in zip(again, whole, strict=True):
        assert began == 4
        assert all(map(torch.equal, state, expected))
        assert not [text for text in said if "LD31" in text or "LD803" in text]
    assert any(
        "step 5, which survivors saved, is passed over" in text
        for *_, said in again
        for text in said
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", SETTINGS)
def test_what_was_saved_counts_where_a_lost_rank_has_no_copy(
    pool: Pool, tmp_path: Path, kind: str
) -> None:
    """Nodes 1 and 2 are lost, and node 2 had the copy of rank 1."""
    folder = str(tmp_path)
    pool.run(partial(lived, saves=True), 3, folder, kind, 4)
    shutil.rmtree(tmp_path / "staging-1")
    shutil.rmtree(tmp_path / "staging-2")
    assert [began for began, *_ in pool.run(partial(lived, saves=False), 3, folder, kind, 5)] == [
        5
    ] * 3


@pytest.mark.cases(1)
@pytest.mark.parametrize("kind", SETTINGS)
def test_memory_that_cannot_be_used_is_tried_once(pool: Pool, tmp_path: Path, kind: str) -> None:
    """What an attempt finds damaged is left out in the next one, with the copies."""
    pool.run(partial(lived, saves=False, snapshot_every=2), 2, str(tmp_path), kind, 6)
    shutil.rmtree(tmp_path / "staging-1")
    tried: list[MemoryPlan | RecoveryPlan] = []

    def act(_: Any, plan: MemoryPlan | RecoveryPlan, *__: Any) -> RecoveredState:
        tried.append(plan)
        raise DamagedFile(tmp_path, "damage that only an attempt finds")

    catalog = scan(RunFolder(tmp_path / "run"), [tmp_path / "staging-0"])
    with pytest.raises(LowDiffError):
        Search(catalog, None, goes_back=True, act=act).run(ReplayOptions())
    assert [isinstance(plan, MemoryPlan) for plan in tried] == [True] + [False] * (len(tried) - 1)
