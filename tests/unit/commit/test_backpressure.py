"""Slow or absent storage: training waits, or goes on and gives up what the user allowed it to."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import lowdiff
from lowdiff.compressors import TopK
from lowdiff.errors import StorageError
from lowdiff.persistence.files.paths import RunFolder
from lowdiff.persistence.format.image import manifest_file
from lowdiff.persistence.format.values import same
from lowdiff.persistence.staging.log import StagingLog
from tests.mounts import fill, tmpfs_or_skip
from tests.unit.loops import Loop, wait_until


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 128 MiB."""
    with tmpfs_or_skip(tmp_path / "disk", 128) as folder:
        yield folder


def wide_loop(folder: Path, **settings: object) -> Loop:
    """Steps of 1.5 MB at density 0.9, so that staging, 66 MB, fills up within fifty."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(20, 6000), torch.nn.ReLU(), torch.nn.Linear(6000, 3)
    )
    options = {"compressor": TopK(0.9), "snapshot_every": 1000, "batch_size": 2, **settings}
    return Loop(folder, model, settings=options)


@pytest.mark.slow
def test_degraded_training_goes_on_drops_steps_and_recovers_once_storage_is_back(
    disk: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loop = wide_loop(tmp_path, backpressure="degrade")
    loop.checkpointer = lowdiff.Checkpointer(
        disk / "run",
        staging=tmp_path / "staging",
        compressor=TopK(0.9),
        snapshot_every=1000,
        batch_size=2,
        retention=None,
        backpressure="degrade",
    )
    loop.attach()
    live: dict[int, dict[str, torch.Tensor]] = {}

    def train(until: int) -> None:
        for number in loop.checkpointer.steps(until):
            loop.step(number)
            live[number + 1] = loop.weights()

    train(6)
    wait_until(lambda: loop.checkpointer.stats()["durable_step"] == 6)
    waited = loop.checkpointer.stats()["waiting_seconds"]
    filler = fill(disk, spare_bytes=4096)
    with caplog.at_level(logging.WARNING):
        train(120)
    stats = loop.checkpointer.stats()
    assert stats["waiting_seconds"] == waited
    assert stats["unprotected_steps"] > 100
    assert 0 < stats["dropped_steps"] < 114
    assert stats["durable_step"] == 6
    assert "steps from 7 on are given up" in caplog.text
    filler.unlink()
    wait_until(lambda: loop.checkpointer.stats()["writer_error"] == "")
    # What lies behind the gap is of no use, durable or not, before the snapshot that closes it.
    assert loop.checkpointer.stats()["durable_step"] == 6
    closing = 120

    def is_snapshot_taken() -> bool:
        nonlocal closing
        closing += 1
        train(closing)
        return int(loop.checkpointer.stats()["snapshots"]) == 2

    wait_until(is_snapshot_taken)
    last = closing + 4
    train(last)
    wait_until(lambda: loop.checkpointer.stats()["durable_step"] == last)
    run = RunFolder(disk / "run")
    assert manifest_file(run.snapshot(0, closing), 0).exists()
    loop.die()
    recovered = lowdiff.recover(disk / "run", staging=tmp_path / "staging")
    assert recovered.step == last
    for step in (3, 6, closing, last):
        found = lowdiff.recover(disk / "run", step, staging=tmp_path / "staging")
        assert same(dict(found.model_state_dict()), live[step])
    with pytest.raises(lowdiff.LowDiffError, match=r"differential of step \d+ is missing"):
        lowdiff.recover(disk / "run", 60, staging=tmp_path / "staging")


def test_a_snapshot_without_memory_is_a_warning_and_comes_later(
    disk: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loop = wide_loop(tmp_path)
    loop.checkpointer = lowdiff.Checkpointer(
        tmp_path / "run",
        staging=disk,
        compressor=TopK(0.1),
        snapshot_every=5,
        batch_size=2,
        retention=None,
    )
    loop.attach()
    steps = loop.checkpointer.steps(1000)
    loop.step(next(steps))
    filler = fill(disk)  # from now on AdamW's state is in a snapshot as well
    with caplog.at_level(logging.WARNING):
        for _ in range(5):
            loop.step(next(steps))
    assert "no full snapshot now: staging needs" in caplog.text
    assert loop.checkpointer.stats()["snapshots"] == 1
    filler.unlink()
    for _ in range(2):
        loop.step(next(steps))
    next(steps)
    wait_until(lambda: loop.checkpointer.stats()["durable_step"] == 8)
    folder = RunFolder(tmp_path / "run")
    assert {s for _, s, _ in folder.snapshots()} == {0, 6}
    wait_until(lambda: manifest_file(folder.snapshot(0, 6), 0).exists())
    expected = loop.weights()
    loop.die()
    recovered = lowdiff.recover(tmp_path / "run", staging=disk)
    assert (recovered.step, recovered.base_step) == (8, 6)
    assert same(dict(recovered.model_state_dict()), expected)


def test_without_memory_for_a_last_snapshot_staging_stays_and_helps(
    disk: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def make() -> Loop:
        loop = wide_loop(tmp_path)
        loop.checkpointer = lowdiff.Checkpointer(
            tmp_path / "run", staging=disk, compressor=TopK(0.1), snapshot_every=1000
        )
        return loop

    loop = make()
    loop.attach()
    for number in loop.checkpointer.steps(3):
        loop.step(number)
    filler = fill(disk)
    with caplog.at_level(logging.WARNING):
        loop.checkpointer.close()
    assert "no last snapshot is taken: staging needs" in caplog.text
    filler.unlink()
    again = make()
    assert again.attach() == 3
    assert same(again.weights(), loop.weights())
    again.checkpointer.close()


@pytest.mark.slow
def test_no_image_takes_the_memory_of_one_that_is_not_durable(
    disk: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(20, 3000), torch.nn.Linear(3000, 3))
    loop = Loop(tmp_path, model)
    loop.checkpointer = lowdiff.Checkpointer(
        disk / "run",
        staging=tmp_path / "staging",
        compressor=TopK(0.01),
        snapshot_every=8,
        batch_size=1,
        retention=None,
        backpressure="degrade",
    )
    loop.attach()

    def train(until: int) -> None:
        for number in loop.checkpointer.steps(until):
            loop.step(number)

    train(1)
    wait_until(lambda: loop.checkpointer.stats()["durable_step"] == 1)
    filler = fill(disk)
    # What cannot be replayed costs an image, which the disk does not take.
    loop.optimizer.state[next(loop.model.parameters())]["exp_avg"].mul_(0.5)
    train(2)
    assert loop.checkpointer.stats()["snapshot_step"] == 2
    train(10)
    assert loop.checkpointer.stats()["snapshot_step"] == 2
    filler.unlink()
    step = 10

    def is_snapshot_durable() -> bool:
        nonlocal step
        step += 1
        train(step)
        return bool(loop.checkpointer.stats()["durable_snapshot"] > 8)

    wait_until(is_snapshot_durable)
    assert "changed before it was durable" not in caplog.text
    loop.checkpointer.close()
    expected = loop.weights()
    recovered = lowdiff.recover(disk / "run", staging=tmp_path / "staging")
    assert recovered.step == step
    assert same(dict(recovered.model_state_dict()), expected)


def test_steps_that_were_dropped_in_vain_are_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a record that finds no memory even so."""
    loop = Loop(tmp_path, settings={"backpressure": "degrade", "batch_size": 1})
    loop.attach()
    for number in range(3):
        loop.step(number)
        loop.checkpointer.commit()
    wait_until(lambda: loop.checkpointer.stats()["durable_step"] == 3)

    def append(*_: object, **__: object) -> int:
        patch.setattr(StagingLog, "dropped_step", 5)
        raise StorageError("staging needs more than there is")

    with monkeypatch.context() as patch:
        patch.setattr(StagingLog, "append", append)
        loop.step(3)
        with pytest.raises(StorageError, match="more than there is"):
            loop.checkpointer.commit()
    assert loop.checkpointer.stats()["dropped_steps"] == 2
    loop.die()


@pytest.mark.new_processes
def test_a_replica_that_still_starts_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, limits: Callable[..., None]
) -> None:
    limits(waiting_notice_seconds=0.05)
    Loop(tmp_path, settings={"compressor": None, "snapshot_every": 1}).run(4)
    assert "s for step 1 to be durable: its replica is still starting" in caplog.text
