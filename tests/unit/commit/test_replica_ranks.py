"""Several ranks without compression: what one rank's replica or disk does, all of them go by."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import lowdiff
from lowdiff import testing
from lowdiff.commit.storage import Look
from lowdiff.compressors import TopK
from lowdiff.errors import LowDiffError, StorageError, WriterFailed
from lowdiff.persistence.files.paths import StagingFolder
from lowdiff.persistence.format.image import ImageFile
from lowdiff.persistence.staging.log import StagingLog
from lowdiff.persistence.staging.status import (
    Backoff,
    ReplicaStatus,
    TrainerStatus,
    read_status,
)
from lowdiff.persistence.writer.handle import WriterProcess
from lowdiff.protect.replica.queue import ReplicaQueue
from tests.crash.pool import Pool
from tests.faults.victim import TinyTraining
from tests.unit.persistence.s3_server import S3Server

_PATIENCE_SECONDS = 100.0


class RankLife:
    """One rank's checkpointer; made in a pool's process."""

    def __init__(
        self,
        rank: int,
        folder: Path,
        kind: type[TinyTraining] = TinyTraining,
        *,
        environment: Mapping[str, str] | None = None,
        **settings: Any,
    ) -> None:
        os.environ.update(environment or {})
        self.rank = rank
        self.training = kind()
        self.model = DistributedDataParallel(self.training.model)
        self.checkpointer = lowdiff.Checkpointer(
            folder / "run", staging=folder / "staging", **settings
        )
        self.step = self.resumed = self.checkpointer.attach(
            self.model, self.training.optimizer, **self.training.stateful
        )

    @property
    def stage(self) -> StagingFolder:
        """This life's memory."""
        return StagingFolder(Path(self.checkpointer.stats()["staging"]), 0, self.rank)

    def wait(self, is_there: Callable[[], object]) -> None:
        """Wait for what its processes do, as a trainer that asks after each step."""
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while not is_there():
            assert time.monotonic() < deadline, self.checkpointer.stats()
            time.sleep(0.002)

    def train(self, before_commit: Callable[[], object] = lambda: None) -> None:
        self.training.step(self.step, self.model, self.rank)
        before_commit()
        self.checkpointer.commit()
        self.step += 1


def consumed_up_to(look: Look, step: int) -> Look:
    """Storage whose replica has applied steps up to this one."""
    return replace(look, replica=replace(look.replica, consumed_step=step))


def give_up_steps_on_rank_0(rank: int, _: int, folder: Path) -> tuple[int, int, int]:
    """Train with replicas that need a whole step for each. Returns what was done at what cost."""
    life = RankLife(rank, folder, backpressure="degrade", snapshot_every=1000)
    queue = testing.parts_of(life.checkpointer).session.queue
    assert isinstance(queue, ReplicaQueue)
    images, real = queue.images, ReplicaQueue.look

    def is_image_in_use() -> bool:
        return images.is_in_use(queue.attend())

    def consumed_step() -> int:
        return read_status(life.stage.replica_status, ReplicaStatus).consumed_step

    def settled_step() -> int:
        return read_status(life.stage.trainer_status, TrainerStatus).settled_step

    def has_all_it_may_take() -> bool:
        is_level = life.checkpointer.stats()["replica_lag_steps"] == 0
        return is_level or consumed_step() >= settled_step()

    with pytest.MonkeyPatch.context() as patch:
        while life.step < 12:
            # It ends a step while the next one computes, never earlier.
            life.wait(lambda: has_all_it_may_take() or is_image_in_use())
            consumed = consumed_step()
            patch.setattr(
                ReplicaQueue,
                "look",
                lambda queue, upto=consumed: consumed_up_to(real(queue), upto),
            )
            with pytest.MonkeyPatch.context() as full:
                if (rank, life.step) == (0, 3):
                    full.setattr(StagingLog, "append_ahead", lambda *_, **__: False)
                life.train()
    life.checkpointer.close()
    stats = life.checkpointer.stats()
    return stats["snapshots"], stats["dropped_steps"], images.step


@pytest.mark.slow
def test_the_snapshot_that_a_rank_owes_comes_though_every_replica_takes_a_whole_step(
    tmp_path: Path, pool: Pool
) -> None:
    results = pool.run(give_up_steps_on_rank_0, 2, tmp_path)
    assert [snapshots for snapshots, *_ in results] == [3, 3], "the first, the one owed, the last"
    assert 1 <= results[0][1] < 5
    assert results[1][1] == 0


def full(*_: object, **__: object) -> Any:
    raise StorageError("staging needs 1.0 MiB, and that file system is full")


def train_and_die(rank: int, _: int, folder: str, settings: dict[str, Any]) -> str:
    life = RankLife(rank, Path(folder.format(rank=rank)), snapshot_every=1000, **settings)
    while life.step < 6:
        life.train()
    testing.kill(life.checkpointer)
    return life.training.digest()


def go_on_compressed(
    rank: int, _: int, folder: str, settings: dict[str, Any], failing: int
) -> tuple[int | str, str]:
    """Attach with a compressor, which may fail on a rank, and train on."""
    with pytest.MonkeyPatch.context() as patch:
        if rank == failing:
            patch.setattr(ImageFile, "stage", full)
        try:
            life = RankLife(rank, Path(folder.format(rank=rank)), compressor=TopK(0.1), **settings)
        except LowDiffError as error:
            return str(error), ""
    digest = life.training.digest()
    life.train()
    life.train()
    stage = life.stage
    life.wait(lambda: not list(stage.root.parent.glob("i000000-*")))
    life.checkpointer.close()
    return life.resumed, digest


@pytest.mark.slow
def test_an_attach_with_a_compressor_that_fails_on_one_rank_leaves_all_replicas_memory(
    tmp_path: Path, pool: Pool
) -> None:
    digests = pool.run(train_and_die, 2, str(tmp_path), {})
    failed = pool.run(go_on_compressed, 2, str(tmp_path), {}, 1)
    assert ["full" in str(text) for text, _ in failed] == [True, True]
    resumed = pool.run(go_on_compressed, 2, str(tmp_path), {}, -1)
    assert resumed == [(6, digest) for digest in digests]


@pytest.mark.slow
def test_ranks_that_see_only_their_own_folder_go_on_compressed_with_a_store(
    tmp_path: Path, pool: Pool
) -> None:
    with pytest.MonkeyPatch.context() as environment:
        server = S3Server(environment)
        settings = {"store": server.url("compressed"), "environment": server.environment}
        node = str(tmp_path / "node{rank}")
        digests = pool.run(train_and_die, 2, node, settings)
        resumed = pool.run(go_on_compressed, 2, node, settings, -1)
        server.stop()
    assert resumed == [(6, digest) for digest in digests]


class WideTraining(TinyTraining):
    """Its queue is full after a few dozen steps."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(8, 30_000), nn.ReLU(), nn.Linear(30_000, 4))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 7, 0.9)


def train_until_storage_fails(rank: int, _: int, folder: Path, hangs: str) -> tuple[int, str]:
    """On rank 1 a process hangs, and once training waits for it the disk has failed."""
    kind, every = (TinyTraining, 1) if hangs == "writer" else (WideTraining, 1000)
    own = folder / str(rank)
    life = RankLife(rank, own, kind, snapshot_every=every, on_error="raise")
    life.train()
    life.wait(
        lambda: (
            life.checkpointer.stats()["durable_snapshot"] == 0
            and read_status(life.stage.replica_status, ReplicaStatus).image_step == 0
        )
    )
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            reported = WriterProcess.read_status
            failed = threading.Event()

            def waits(_: Backoff) -> float:
                failed.set()
                return 0.01

            os.kill(life.checkpointer.stats()[f"{hangs}_pid"], signal.SIGSTOP)
            patch.setattr(
                WriterProcess,
                "read_status",
                lambda s: reported(s).with_errors("no disk" if failed.is_set() else ""),
            )
            patch.setattr(Backoff, "next_seconds", waits)
        error = ""
        try:
            while life.step < 200:
                life.train()
        except WriterFailed as failure:
            error = str(failure)
    testing.kill(life.checkpointer)
    return life.step, error.partition(";")[0]


@pytest.mark.parametrize("hangs", [pytest.param("writer", marks=pytest.mark.slow), "replica"])
def test_storage_that_hangs_before_it_fails_is_an_error_on_all_ranks_at_the_same_commit(
    tmp_path: Path, pool: Pool, hangs: str
) -> None:
    (step, told), (other, own) = pool.run(train_until_storage_fails, 2, tmp_path, hangs)
    assert step == other < 200
    assert told == "rank 1 reports: trouble with storage, see its output"
    assert own == "rank 1 reports: no disk"


def commit_without_exchange(rank: int, _: int, folder: Path, on_error: str) -> int:
    """Commit bodies that exchange no gradients: no rank learns what the others have staged."""
    life = RankLife(rank, folder, snapshot_every=1, on_error=on_error)
    life.train()
    for _ in range(4):
        life.checkpointer.commit()
    life.step += 4
    life.train()
    life.checkpointer.close()
    return int(life.checkpointer.stats()["durable_step"])


@pytest.mark.slow
@pytest.mark.parametrize("on_error", ["warn", "raise"])
def test_training_does_not_wait_for_images_of_steps_that_only_the_next_exchange_commits(
    tmp_path: Path, pool: Pool, on_error: str
) -> None:
    assert pool.run(commit_without_exchange, 2, tmp_path, on_error) == [6, 6]


def watched_while_preempted(rank: int, _: int, folder: Path) -> list[tuple[bool, int, float]]:
    """What the page shows after a step that all ranks heard the signal in, and during the next."""
    life = RankLife(rank, folder)
    shown: list[tuple[bool, int, float]] = []

    def look() -> None:
        page = read_status(life.stage.trainer_status, TrainerStatus)
        shown.append((page.preempted, page.step, page.committed_at_unix_seconds))

    if rank == 1:
        signal.raise_signal(signal.SIGUSR1)
    while not life.checkpointer.preempted:
        life.train()
    look()
    time.sleep(0.01)
    life.train(before_commit=look)
    life.checkpointer.close()
    return shown


def test_whoever_watches_sees_preemption_and_the_time_of_the_last_step_also_within_a_step(
    tmp_path: Path, pool: Pool
) -> None:
    for after, within in pool.run(watched_while_preempted, 2, tmp_path):
        assert after[0]
        assert within == after
