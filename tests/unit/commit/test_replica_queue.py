"""Training without compression, from the trainer's side: the replica's deaths, doubts and delays."""

from __future__ import annotations

import math
import os
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lowdiff
from lowdiff import testing
from lowdiff.commit.storage import Look
from lowdiff.compressors import TopK
from lowdiff.errors import StepNotFound, WriterFailed
from lowdiff.persistence.files.paths import RunFolder, StagingFolder
from lowdiff.persistence.format.image import PARAMETER
from lowdiff.persistence.retention.staging import clear_staging
from lowdiff.persistence.run.catalog import scan
from lowdiff.persistence.staging.log import StagingLog
from lowdiff.persistence.staging.status import ReplicaStatus, read_status
from lowdiff.protect.replica.queue import ReplicaQueue
from lowdiff.recovery import recover
from lowdiff.recovery.inspect.verify import verify
from lowdiff.recovery.replica.file import ReplicaFile
from lowdiff.recovery.replica.share import Shard, share_step
from tests.faults.victim import ONE_WORKER, TinyTraining, digest_of
from tests.unit.loops import wait_until
from tests.unit.persistence.made_runs import tear
from tests.unit.persistence.s3_server import S3Server

_PATIENCE_SECONDS = 100.0


def in_trouble(look: Look) -> Look:
    """Storage whose writer reports an error."""
    return replace(look, writer=look.writer.with_errors("no disk"))


class LargerTraining(TinyTraining):
    """Its queue is full after some twenty steps."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.model = nn.Sequential(nn.Linear(8, 12_000), nn.ReLU(), nn.Linear(12_000, 4))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 7, 0.9)


class Life:
    """A checkpointer on a training of its own."""

    def __init__(
        self, folder: Path, kind: type[TinyTraining] = TinyTraining, **settings: Any
    ) -> None:
        self.folder = folder
        self.training = kind()
        self.checkpointer = lowdiff.Checkpointer(
            folder / "run", staging=folder / "staging", **settings
        )
        self.resumed = self.checkpointer.attach(
            self.training.model, self.training.optimizer, **self.training.stateful
        )
        self.step = self.resumed

    def run(self, until: int) -> None:
        for step in range(self.step, until):
            self.training.step(step)
            self.checkpointer.commit()
        self.step = until

    def wait(self, is_there: Callable[[dict[str, Any]], bool]) -> None:
        testing.wait_until(self.checkpointer, is_there, seconds=_PATIENCE_SECONDS)

    def wait_for_trainers_image(self) -> None:
        """Wait until writer and replica have used the trainer's last snapshot."""
        self.wait(
            lambda stats: (
                min(stats["durable_snapshot"], self.replica_page().image_step)
                >= stats["snapshot_step"]
            )
        )

    def snapshot(self, *, required: bool = False) -> None:
        """Have the trainer take a snapshot, as where one is owed."""
        testing.parts_of(self.checkpointer).session.snapshot(required=required)

    @property
    def stage(self) -> StagingFolder:
        """This life's memory."""
        return max(StagingFolder.all(self.folder / "staging"), key=lambda stage: stage.incarnation)

    def replica_page(self) -> ReplicaStatus:
        """What the replica tells of itself."""
        return read_status(self.stage.replica_status, ReplicaStatus)

    def signal(self, process: str, number: signal.Signals) -> None:
        """Send a signal to the ``writer`` or ``replica``."""
        os.kill(self.checkpointer.stats()[f"{process}_pid"], number)

    def kill(self) -> None:
        testing.kill(self.checkpointer)

    def assert_recovered(self, step: int | None = None) -> None:
        state = recover(self.folder / "run", staging=self.folder / "staging", options=ONE_WORKER)
        assert state.step == (self.step if step is None else step)
        if step is None:
            assert digest_of(state) == self.training.digest()


def test_a_replica_that_dies_is_replaced_and_misses_nothing(tmp_path: Path) -> None:
    life = Life(tmp_path)
    life.run(3)
    life.wait(lambda stats: stats["replica_step"] == 3)
    life.signal("replica", signal.SIGKILL)
    stage = life.stage
    stage.replica_state(98).write_bytes(b"a file it had not finished")
    life.run(9)
    life.wait(lambda stats: stats["replica_restarts"] == 1 and stats["replica_step"] == 9)
    assert not stage.replica_state(98).exists()
    assert life.checkpointer.stats()["replica_lag_steps"] == 0
    life.run(11)
    life.kill()
    life.assert_recovered()
    after = Life(tmp_path)
    assert after.resumed == 11
    assert after.training.digest() == life.training.digest()
    after.run(12)
    after.checkpointer.close()
    assert not list((tmp_path / "staging").rglob("replica*"))
    assert verify(tmp_path / "run", tmp_path / "staging").ok


def test_a_torn_step_of_the_queue_ends_the_way_before_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    life = Life(tmp_path)
    life.run(3)
    life.wait(lambda stats: stats["replica_step"] == 3)
    life.signal("replica", signal.SIGSTOP)
    stage = life.stage
    life.run(4)
    digest = life.training.digest()
    life.run(6)
    life.kill()
    tear(stage, 5)
    state = recover(tmp_path / "run", staging=tmp_path / "staging", options=ONE_WORKER)
    assert (state.step, digest_of(state)) == (4, digest)
    assert "step 5 fails its checksum" in caplog.text
    after = Life(tmp_path)
    assert after.resumed == 4
    assert after.training.digest() == digest
    after.run(7)
    after.kill()
    after.assert_recovered()


@pytest.mark.cases(1)
@pytest.mark.parametrize("parts", [1, 2], ids=["one part", "all but the last word"])
def test_killed_in_the_middle_of_a_step_memory_holds_each_step_once(
    tmp_path: Path, parts: int
) -> None:
    life = Life(tmp_path, LargerTraining)
    life.run(4)
    life.wait(lambda stats: stats["replica_step"] == 4)
    stage = life.stage
    life.signal("replica", signal.SIGSTOP)
    life.run(6)
    life.kill()
    catalog = scan(RunFolder(tmp_path / "run"), [tmp_path / "staging"])
    fence = catalog.incarnations[0]
    generation = read_status(stage.replica_status, ReplicaStatus).generation
    file = ReplicaFile.open(stage.replica_state(generation), private=False)
    shard = Shard(file, fence, journaled=True)
    step = share_step(catalog.records[0, 0][5], fence)
    for index, unit in list(enumerate(shard._built()))[: 1 if parts == 1 else None]:
        shard._step_unit(index, unit, step)
    assert shard.step == 4
    life.assert_recovered()


def test_a_replica_that_differs_begins_anew_with_a_fresh_image(tmp_path: Path) -> None:
    life = Life(tmp_path, watch="recovery")
    life.run(2)
    life.wait(lambda stats: stats["replica_step"] == 2)
    for parameter in life.training.model.parameters():
        parameter.data.mul_(1.5)  # nothing but the checksum at commit can see it
    life.run(3)
    life.wait(lambda stats: "differs from those of the trainer" in stats["replica_error"])
    while life.checkpointer.stats()["replica_step"] != life.step:
        assert life.step < 2000
        life.run(life.step + 1)
        time.sleep(0.02)
    assert life.checkpointer.stats()["snapshots"] == 2
    assert life.checkpointer.stats()["replica_error"] == ""
    life.run(life.step + 3)
    life.kill()
    life.assert_recovered()


def test_how_far_it_is_from_the_trainers_snapshot_is_told(tmp_path: Path) -> None:
    life = Life(tmp_path)
    stage = life.stage
    assert life.checkpointer.stats()["replica_drift"] is None
    changes = {0.0: 0.0, -0.5: 0.5, math.nan: math.inf, math.inf: math.inf}
    for step, (change, drift) in enumerate(changes.items(), start=1):
        life.run(step)
        while life.replica_page().applied_steps < step:  # before that it may open its file again
            time.sleep(0.01)
        generation = read_status(stage.replica_status, ReplicaStatus).generation
        file = ReplicaFile.open(stage.replica_state(generation), private=False)
        name, parameter = next(iter(life.training.model.named_parameters()))
        weights = file.tensors()[PARAMETER + name]
        # As if another processor had computed them: `change` apart, exactly.
        parameter.data.view(-1)[0] = weights[0] = 1.0
        weights[0] += change
        life.snapshot()
        while read_status(stage.replica_status, ReplicaStatus).image_step != step:
            time.sleep(0.01)
        assert life.checkpointer.stats()["replica_drift"] == drift
    life.kill()
    life.assert_recovered()


@pytest.mark.slow
@pytest.mark.parametrize("backpressure", ["degrade", "block"])
def test_a_replica_that_stands_still_holds_up_training_or_costs_steps(
    tmp_path: Path, backpressure: str
) -> None:
    life = Life(tmp_path, LargerTraining, backpressure=backpressure, snapshot_every=1000)
    life.run(2)
    life.wait(lambda stats: stats["replica_step"] == 2)
    life.signal("replica", signal.SIGSTOP)
    if backpressure == "block":
        life.run(10)
        assert life.checkpointer.stats()["replica_lag_steps"] == 8
        life.signal("replica", signal.SIGCONT)
        life.run(40)
        assert life.checkpointer.stats()["dropped_steps"] == 0
    else:
        life.run(60)
        assert life.checkpointer.stats()["dropped_steps"] > 20
        life.signal("replica", signal.SIGCONT)
        while life.checkpointer.stats()["replica_step"] != life.step:
            assert life.step < 5000
            life.run(life.step + 1)
            time.sleep(0.02)
        assert life.checkpointer.stats()["snapshots"] == 2
    assert life.checkpointer.stats()["queue_bytes"] < 7 * (12_000 * 13 * 4 + (1 << 20))
    life.run(life.step + 2)
    life.kill()
    life.assert_recovered()


@pytest.mark.slow
def test_a_run_may_change_from_and_to_compression(tmp_path: Path) -> None:
    compressors = [TopK(0.1), None, TopK(0.1), None]
    digest, expected = "", 0
    for compressor in compressors:
        life = Life(tmp_path, compressor=compressor)
        assert life.resumed == expected
        assert digest in ("", life.training.digest())
        life.run(life.step + 4)
        digest, expected = life.training.digest(), life.step
        life.kill()


def test_the_loss_of_the_memory_leads_back_to_an_image(tmp_path: Path) -> None:
    life = Life(tmp_path, snapshot_every=4)
    life.run(6)
    life.wait(lambda stats: stats["durable_step"] == 4)
    assert life.checkpointer.stats()["snapshots"] == 1, "the trainer takes none but the base"
    life.kill()
    for path in (tmp_path / "staging").rglob("replica*"):
        path.unlink()
    life.assert_recovered()  # from the image and what is left of the queue
    shutil.rmtree(tmp_path / "staging")
    life.assert_recovered(4)


def test_a_step_between_images_is_said_to_have_none_not_to_be_lost(tmp_path: Path) -> None:
    life = Life(tmp_path, snapshot_every=4, retention=None)
    life.run(6)
    life.checkpointer.close()
    made = r"step 1 was made with strategy replica, of which only .* comes? back"
    with pytest.raises(StepNotFound, match=made) as refused:
        recover(tmp_path / "run", 3, staging=tmp_path / "staging")
    assert "is lost" not in str(refused.value)
    assert verify(tmp_path / "run", tmp_path / "staging").ok


@pytest.mark.slow
def test_a_preempted_run_makes_an_image_at_once(tmp_path: Path) -> None:
    life = Life(tmp_path, snapshot_every=1000)
    life.run(3)
    signal.raise_signal(signal.SIGUSR1)
    wait_until(lambda: life.checkpointer.preempted)
    life.run(5)
    life.wait(lambda stats: stats["durable_step"] == 4)
    shutil.rmtree(tmp_path / "staging", ignore_errors=True)
    life.kill()
    life.assert_recovered(4)


def test_memory_that_holds_a_replica_is_kept_until_a_snapshot_holds_it(tmp_path: Path) -> None:
    life = Life(tmp_path)
    life.run(3)
    life.wait(lambda stats: stats["replica_step"] == 3)
    life.kill()
    (verdict,) = clear_staging(tmp_path / "staging")
    assert not verdict.goes
    assert "here only" in verdict.reason
    life.assert_recovered()


@pytest.mark.slow
def test_a_lost_node_is_replaced_from_the_store(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as environment:
        server = S3Server(environment)
        url = server.url("replica")
        life = Life(tmp_path / "lost", snapshot_every=4, store=url)
        life.run(6)
        life.wait(lambda stats: stats["remote_step"] == 4)
        life.kill()
        after = Life(tmp_path / "new", snapshot_every=4, store=url)
        assert after.resumed == 4
        after.run(6)
        assert after.training.digest() == life.training.digest()
        after.checkpointer.close()
        assert after.checkpointer.stats()["remote_step"] == 6
        server.stop()


class Interrupted(Exception):
    pass


def interrupted(*_: object, **__: object) -> None:
    raise Interrupted


@pytest.mark.parametrize("compressor", [None, TopK(0.5)], ids=["LowDiff+", "top-k"])
def test_a_step_that_its_optimizer_broke_off_is_recovered_as_it_was_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compressor: TopK | None
) -> None:
    life = Life(tmp_path, snapshot_every=50, compressor=compressor)
    life.run(3)
    with monkeypatch.context() as patch:
        for name in ("sgd", "adam", "adamw"):  # the kernel of whichever optimizer it is
            patch.setattr(import_module(f"torch.optim.{name}"), name, interrupted)
        with pytest.raises(Interrupted):
            life.training.step(3)
    life.checkpointer.commit()
    life.step = 4
    life.run(7)
    life.kill()
    life.assert_recovered()


@pytest.mark.slow
def test_a_replica_that_lost_the_way_does_not_keep_training_waiting(tmp_path: Path) -> None:
    life = Life(tmp_path, snapshot_every=1, watch="recovery")
    life.run(3)
    for parameter in life.training.model.parameters():
        parameter.data.add_(0.5)  # which nothing shows but the digest
    life.run(4)
    life.wait(lambda stats: bool(stats["replica_error"]))
    life.run(12)
    life.kill()
    life.assert_recovered()


def test_a_writers_trouble_is_raised_by_commit_which_can_be_called_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    life = Life(tmp_path, on_error="raise", snapshot_every=1000)
    life.run(3)
    real = ReplicaQueue.look
    with monkeypatch.context() as patch:  # a full queue and a writer in trouble
        patch.setattr(StagingLog, "append_ahead", lambda *_, **__: False)
        patch.setattr(ReplicaQueue, "look", lambda s: in_trouble(real(s)))
        life.training.step(3)
        with pytest.raises(WriterFailed):
            life.checkpointer.commit()
        life.training.model.zero_grad(set_to_none=False)
    life.checkpointer.commit()
    life.step = 4
    life.run(6)
    life.wait(lambda stats: stats["replica_step"] == 6)
    assert not life.checkpointer.stats()["replica_error"]
    life.kill()
    life.assert_recovered()


@pytest.mark.parametrize("tries", [0, 3])
def test_a_step_that_was_refused_several_times_is_staged_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tries: int
) -> None:
    """It has values that something else than an optimizer wrote, which are staged with its record."""
    life = Life(tmp_path, on_error="raise", snapshot_every=1000)
    sizes: list[int] = []
    real = ReplicaQueue.look
    for step in range(6):
        life.training.step(step)
        with torch.no_grad():
            for parameter in life.training.model.parameters():
                parameter.clamp_(-0.1, 0.1)
        before = life.checkpointer.stats()["staged_bytes"]
        with monkeypatch.context() as patch:
            patch.setattr(StagingLog, "append_ahead", lambda *_, **__: False)
            patch.setattr(ReplicaQueue, "look", lambda s: in_trouble(real(s)))
            for _ in range(tries if step == 4 else 0):
                with pytest.raises(WriterFailed):
                    life.checkpointer.commit()
        life.checkpointer.commit()
        sizes.append(life.checkpointer.stats()["staged_bytes"] - before)
    life.step = 6
    assert max(sizes[2:]) - min(sizes[2:]) < 200
    life.kill()
    life.assert_recovered()
