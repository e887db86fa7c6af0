"""What a replica cannot do now is tried again; only what it has no use for is given up."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lowdiff
from lowdiff import testing
from lowdiff.commit.storage import Trainer
from lowdiff.compressors import TopK
from lowdiff.errors import StorageError, UnsupportedOptimizer, WriterFailed
from lowdiff.persistence.format.image import ImageFile
from lowdiff.persistence.staging.log import StagingLog
from lowdiff.protect.replica.queue import ReplicaImages, ReplicaQueue
from tests.mounts import fill, tmpfs_or_skip
from tests.unit.commit.test_replica_queue import Life, in_trouble
from tests.unit.loops import wait_until
from tests.unit.persistence.made_runs import tear
from tests.unit.recovery.training import flip

MEMORY_MIB = 40


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Path]:
    """A folder whose ``staging`` is a file system of its own."""
    with tmpfs_or_skip(tmp_path / "staging", MEMORY_MIB):
        yield tmp_path


def in_background(run: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def catch_up(life: Life, snapshots: int = 2) -> None:
    """Train until the snapshot that is owed is taken."""
    while life.checkpointer.stats()["snapshots"] < snapshots:
        assert life.step < 1000
        life.run(life.step + 1)
        time.sleep(0.02)


def slowly(life: Life, until: int) -> None:
    while life.step < until:
        life.run(life.step + 1)
        time.sleep(0.05)


@pytest.mark.slow
def test_without_memory_for_images_training_waits_at_the_bound_and_gives_nothing_up(
    memory: Path,
) -> None:
    life = Life(memory, snapshot_every=5)
    life.run(4)
    life.wait(lambda stats: stats["replica_step"] == 4)
    ballast = fill(memory / "staging")
    training = in_background(lambda: life.run(23))
    deadline = time.monotonic() + 60
    while life.checkpointer.stats()["replica_step"] != 10:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    time.sleep(0.5)
    stats = life.checkpointer.stats()
    assert stats["committed_step"] == 10, "twice the interval, and no image of step 5 or 10"
    assert "no image of step" in stats["replica_error"]
    ballast.unlink()
    training.join(60)
    life.wait(lambda stats: stats["durable_step"] == 20)
    stats = life.checkpointer.stats()
    assert not stats["replica_error"]
    assert (stats["dropped_steps"], stats["snapshots"]) == (0, 1)
    life.kill()
    life.assert_recovered()


@pytest.mark.slow
def test_want_of_memory_for_images_is_an_error_where_that_is_asked_for(memory: Path) -> None:
    life = Life(memory, snapshot_every=5, on_error="raise")
    life.run(4)
    life.wait(lambda stats: stats["replica_step"] == 4)
    ballast = fill(memory / "staging")
    with pytest.raises(WriterFailed, match="no image of step 5"):
        slowly(life, 100)
    ballast.unlink()
    life.wait(lambda stats: not stats["replica_error"])
    life.checkpointer.commit()
    life.step += 1
    life.kill()
    life.assert_recovered()


@pytest.mark.slow
def test_memory_that_is_there_again_ends_the_error_without_a_further_step(memory: Path) -> None:
    life = Life(memory, snapshot_every=5)
    life.run(4)
    life.wait(lambda stats: stats["replica_step"] == 4)
    ballast = fill(memory / "staging")
    life.run(7)  # past the step whose image finds no memory
    stats = life.checkpointer.stats
    wait_until(
        lambda: stats()["replica_step"] == 7 and "no image of step 5" in stats()["replica_error"]
    )
    ballast.unlink()
    life.wait(lambda stats: not stats["replica_error"])
    life.kill()
    life.assert_recovered()


@pytest.mark.slow
def test_a_snapshot_put_off_costs_no_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    life = Life(tmp_path, snapshot_every=1000, backpressure="degrade")
    life.run(3)
    with monkeypatch.context() as patch:
        patch.setattr(ReplicaImages, "is_in_use", lambda *_: True)
        life.snapshot()
        assert life.checkpointer.stats()["snapshots"] == 1
        life.run(6)
    life.wait(lambda stats: stats["replica_step"] == 6)
    assert life.checkpointer.stats()["snapshots"] == 1
    catch_up(life)
    assert life.checkpointer.stats()["dropped_steps"] == 0
    life.kill()
    life.assert_recovered()


def test_trouble_that_other_ranks_have_not_heard_of_puts_a_snapshot_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    life = Life(tmp_path, snapshot_every=1000, on_error="raise")
    life.run(3)
    real = ReplicaQueue.look
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "tells_first", True)
        patch.setattr(ReplicaImages, "is_in_use", lambda *_: True)
        patch.setattr(ReplicaQueue, "look", lambda s: in_trouble(real(s)))
        life.snapshot()
    assert life.checkpointer.stats()["snapshots"] == 1
    catch_up(life)
    life.kill()
    life.assert_recovered()


def test_steps_after_one_that_cannot_be_replayed_wait_for_its_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    life = Life(tmp_path, snapshot_every=1000, backpressure="degrade")
    life.run(3)
    with monkeypatch.context() as patch:
        patch.setattr(ReplicaImages, "is_in_use", lambda *_: True)
        with torch.no_grad():
            write_state(life)
        life.run(6)
        assert life.checkpointer.stats()["dropped_steps"] == 2, "the replica cannot reach them"
    catch_up(life)
    life.run(life.step + 2)
    life.kill()
    life.assert_recovered()


def write_state(life: Life) -> None:
    """Write to optimizer state, which only a snapshot can tell."""
    next(iter(life.training.optimizer.state.values()))["exp_avg"].mul_(0.5)


def stopped_at_three(folder: Path, backpressure: str = "block") -> Life:
    """A life whose replica is stopped, and has all there is so far."""
    life = Life(folder, snapshot_every=1000, backpressure=backpressure)
    life.run(3)
    life.wait(lambda stats: stats["replica_step"] == 3 and stats["durable_step"] == 0)
    life.signal("replica", signal.SIGSTOP)
    return life


def settle(life: Life, snapshots: int = 2, told: str = "step 4: damaged in staging memory") -> None:
    """Train on after damage, until the replica follows again; all of it is recovered."""
    life.signal("replica", signal.SIGCONT)
    life.wait(lambda stats: stats["replica_lag_steps"] == 0)
    assert told in life.checkpointer.stats()["replica_error"]
    catch_up(life, snapshots)
    life.run(life.step + 2)
    life.wait(lambda stats: stats["replica_step"] == life.step and not stats["replica_error"])
    life.kill()
    life.assert_recovered()


@pytest.mark.parametrize("backpressure", [pytest.param("block", marks=pytest.mark.slow), "degrade"])
def test_a_step_that_was_damaged_before_the_replica_took_it_costs_a_snapshot(
    tmp_path: Path, backpressure: str
) -> None:
    life = stopped_at_three(tmp_path, backpressure)
    life.run(6)
    tear(life.stage, 4)
    settle(life)


def test_a_snapshot_that_was_damaged_before_the_replica_took_it_is_taken_again(
    tmp_path: Path,
) -> None:
    life = stopped_at_three(tmp_path)
    with torch.no_grad():
        write_state(life)
    life.run(6)  # the replica cannot make step 4: its snapshot is staged behind it
    flip(life.stage.snapshot, -1)
    settle(life, snapshots=3, told="it is not the image of step 4 that was staged")


def test_a_full_queue_does_not_keep_close_from_ending(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    life = Life(tmp_path, snapshot_every=1000)
    life.run(3)
    life.wait(lambda stats: stats["replica_step"] == 3)
    life.signal("replica", signal.SIGSTOP)
    life.run(6)
    # Not even the mark of a snapshot finds room.
    monkeypatch.setattr(StagingLog, "append", lambda *_, **__: None)
    monkeypatch.setattr(StagingLog, "append_ahead", lambda *_, **__: False)
    closing = in_background(life.checkpointer.close)
    closing.join(30)
    assert not closing.is_alive()
    assert not list((tmp_path / "staging").rglob("replica*"))
    life.assert_recovered()


@pytest.mark.slow
def test_an_attach_without_a_compressor_that_failed_does_not_hold_up_the_next_with_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    life = Life(tmp_path, compressor=TopK(0.5))
    life.run(4)
    life.kill()

    def full(*_: object, **__: object) -> None:
        raise StorageError("staging needs 1.0 MiB, and that file system is full")

    with monkeypatch.context() as patch:
        patch.setattr(ImageFile, "stage", full)
        with pytest.raises(StorageError, match="full"):
            Life(tmp_path)
    after = Life(tmp_path, compressor=TopK(0.5))
    assert after.resumed == 4
    assert after.training.digest() == life.training.digest()
    after.run(6)
    after.checkpointer.close()
    assert not list((tmp_path / "staging").rglob("replica*"))
    after.assert_recovered()


class Halving(torch.optim.Optimizer):
    """An optimizer that is not torch's own."""

    def __init__(self, params: Any, lr: float = 0.5) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> Any:
        raise NotImplementedError


def test_an_optimizer_that_the_replica_does_not_know_is_refused(tmp_path: Path) -> None:
    with testing.own_registrations():
        lowdiff.register_optimizer(Halving, "element")
        model = nn.Linear(3, 3)
        checkpointer = lowdiff.Checkpointer(tmp_path / "run", staging=tmp_path / "staging")
        with pytest.raises(UnsupportedOptimizer, match=r"Halving.*compressor=TopK"):
            checkpointer.attach(model, Halving(model.parameters()))
        assert not list(tmp_path.rglob("i0*")), "nothing was begun"
