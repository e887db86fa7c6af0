"""Copies on other nodes, while training runs: equal to the bit, given up where not, made again after a removal."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lowdiff
from lowdiff.compressors import Cast, CyclicTopK, PowerSGD, Quantize, RandomK, TopK
from lowdiff.errors import ConfigError
from lowdiff.persistence.files.paths import StagingFolder
from lowdiff.persistence.format.framing import RecordKind
from lowdiff.persistence.staging.log import staged_records
from lowdiff.protocols import Compressor
from lowdiff.testing import parts_of, wait_until
from tests.crash.pool import Pool
from tests.crash.trainings import batch, wrapped

COMPRESSORS: list[Compressor] = [
    TopK(0.1),
    TopK(0.1, dense_below=64, value_bits=2),
    CyclicTopK(0.1),
    RandomK(0.1),
    PowerSGD(1, dense_below=8),
    Quantize(8),
    Cast(),
]


def remove_while_used(staging: Path) -> None:
    """Remove a folder in which a thread that keeps copies may be making files."""
    removed = staging.rename(staging.with_name("removed"))
    shutil.rmtree(removed, ignore_errors=True)  # of a copy that is just being written, a part stays


class Training:
    """A rank on a node of its own, with copies on another one."""

    def __init__(
        self, rank: int, folder: str, compressor: Compressor | None, **settings: Any
    ) -> None:
        torch.manual_seed(0)
        self.rank = rank
        self.staging = Path(folder) / f"staging-{rank}"
        self.ddp = wrapped(nn.Sequential(nn.Linear(12, 40), nn.ReLU(), nn.Linear(40, 30)))
        self.optimizer = torch.optim.Adam(self.ddp.parameters(), lr=0.1)
        self.checkpointer = lowdiff.Checkpointer(
            f"{folder}/run",
            compressor=compressor,
            **{"staging": self.staging, "copies": 2, "batch_size": 64, **settings},
        )
        self.began = self.checkpointer.attach(self.ddp, self.optimizer)

    def train(self, *steps: int) -> None:
        for step in steps:
            self.optimizer.zero_grad()
            self.ddp(batch(step, self.rank, 6, 12)).square().mean().backward()
            self.optimizer.step()
            self.checkpointer.commit()

    def wait_for(self, step: int) -> None:
        """Wait until the copies of a step are here, which the step after it tells."""
        wait_until(self.checkpointer, lambda stats: stats["replicated_step"] >= step, seconds=20)


def records(stage: StagingFolder) -> dict[int, bytes]:
    """Step -> body of its record."""
    return {
        record.header.step: bytes(record.body)
        for _, record in staged_records(stage)
        if record.header.kind is RecordKind.DIFFERENTIAL
    }


def both(folder: str) -> list[tuple[dict[int, bytes], dict[int, bytes]]]:
    """For each rank: what it staged, and what the other one keeps of it."""
    found = []
    for rank in range(2):
        (own,) = (
            s for s in StagingFolder.all(Path(folder) / f"staging-{rank}") if s.keeper is None
        )
        (copy,) = (
            s for s in StagingFolder.all(Path(folder) / f"staging-{1 - rank}") if s.rank == rank
        )
        assert copy.keeper == 1 - rank
        found.append((records(own), records(copy)))
    return found


def copied(rank: int, world_size: int, folder: str, compressor: Compressor) -> Any:
    training = Training(rank, folder, compressor)
    training.train(*range(5))
    wait_until(training.checkpointer, lambda stats: stats["held_step"] >= 5, seconds=20)
    # What the next commit tells is heard in the one after it.
    training.train(5, 6)
    training.wait_for(4)
    found = both(folder) if rank == 0 else []
    stats = training.checkpointer.stats()
    training.checkpointer.close()
    return found, stats["copied_ranks"], stats["copies_bytes_sent"]


@pytest.mark.cases(1)
@pytest.mark.parametrize("compressor", COMPRESSORS, ids=lambda c: c.name)
def test_every_record_of_a_copy_is_equal_to_that_of_its_rank(
    pool: Pool, tmp_path: Path, compressor: Compressor
) -> None:
    (found, *_), _ = told = pool.run(copied, 2, str(tmp_path), compressor)
    for own, copy in found:
        assert {1, 2, 3, 4, 5} <= own.keys() & copy.keys()
        assert all(copy[step] == own[step] for step in own.keys() & copy.keys())
    assert [ranks for _, ranks, _ in told] == [[1], [0]]
    # Numbers of a step; no gradient.
    assert all(sent < 6 * 4096 for *_, sent in told)
    assert not list(StagingFolder.all(tmp_path / "staging-0"))
    assert not list(StagingFolder.all(tmp_path / "staging-1"))


class Said(logging.Handler):
    """Texts of warnings."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def unequal(rank: int, world_size: int, folder: str) -> Any:
    """The copy that rank 0 makes of step 3 has one other bit."""
    said = Said()
    logging.getLogger("lowdiff").addHandler(said)
    training = Training(rank, folder, Cast(), snapshot_every=6)
    training.train(0, 1)
    if rank == 0:
        reducer: Any = parts_of(training.checkpointer).session.recorder.reducer
        payload = reducer.payload

        def wrong(of: int | None = None) -> Any:
            found = payload(of)
            if of is not None:
                found.sections[0].data[0] ^= 1
                reducer.payload = payload
            return found

        reducer.payload = wrong
    training.train(2, 3, 4)
    before = records_of_copy(folder, 1) if rank == 0 else {}
    told = training.checkpointer.stats()["replicated_step"]
    training.train(5, 6)
    wait_until(training.checkpointer, lambda stats: stats["held_step"] >= 6, seconds=20)
    training.train(7, 8)
    training.wait_for(6)
    after = records_of_copy(folder, 1) if rank == 0 else {}
    training.checkpointer.close()
    logging.getLogger("lowdiff").removeHandler(said)
    return sorted(before), told, sorted(after), [text for text in said.texts if "LD901" in text]


def records_of_copy(folder: str, rank: int) -> dict[int, bytes]:
    (copy,) = (s for s in StagingFolder.all(Path(folder) / f"staging-{1 - rank}") if s.rank == rank)
    return records(copy)


def test_a_copy_that_is_not_equal_is_given_up_until_the_next_snapshot(
    pool: Pool, tmp_path: Path
) -> None:
    (before, told, after, said), (_, _, _, others) = pool.run(unequal, 2, str(tmp_path))
    assert before == [1, 2]
    assert told == 2
    assert 7 in after
    assert 3 not in after
    assert len(said) == 1
    assert "no copy of rank 1's steps is kept until the next full snapshot" in said[0]
    assert not others


def removed(rank: int, world_size: int, folder: str) -> Any:
    """Somebody removes the staging folder of rank 0's node."""
    training = Training(rank, folder, Cast(), snapshot_every=100)
    training.train(0, 1, 2)
    if rank == 0:
        remove_while_used(training.staging)
    training.train(3, 4, 5, 6)
    wait_until(training.checkpointer, lambda stats: stats["held_step"] >= 6, seconds=20)
    training.train(7, 8)
    training.wait_for(6)
    found = both(folder) if rank == 0 else []
    training.checkpointer.close()
    return found


def test_copies_are_made_again_where_somebody_removed_staging(pool: Pool, tmp_path: Path) -> None:
    found, _ = pool.run(removed, 2, str(tmp_path))
    for own, copy in found:
        assert 7 in own
        assert all(copy[step] == own[step] for step in own.keys() & copy.keys())
        assert 7 in copy


def refused(rank: int, world_size: int, folder: str) -> str:
    try:
        Training(rank, folder, Cast(), staging=f"{folder}/staging")
    except ConfigError as error:
        return str(error)
    return ""


def test_ranks_of_one_node_have_no_peers(pool: Pool, tmp_path: Path) -> None:
    for said in pool.run(refused, 2, str(tmp_path)):
        assert "copies=2 needs 2 nodes, and there are 1" in said


def named(rank: int, world_size: int, folder: str) -> list[int]:
    training = Training(rank, folder, Cast(), staging=f"{folder}/staging", node=f"rack {rank}")
    training.train(0, 1)
    found: list[int] = training.checkpointer.stats()["copied_ranks"]
    training.checkpointer.close()
    return found


def test_nodes_may_be_named(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(named, 2, str(tmp_path)) == [[1], [0]]
