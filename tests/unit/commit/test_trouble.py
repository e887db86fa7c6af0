"""A writer's trouble is never silent: a warning or an error, on every rank."""

from __future__ import annotations

import logging
import os
import signal
import time
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import lowdiff
from lowdiff import testing
from lowdiff.attach.begin import Opened
from lowdiff.attach.close import finish
from lowdiff.compressors import TopK
from lowdiff.errors import RunInUse, StorageError, WriterFailed
from lowdiff.persistence.files.lease import Lease
from lowdiff.persistence.files.paths import RunFolder, StagingFolder
from lowdiff.persistence.format.framing import HEADER_BYTES
from lowdiff.persistence.format.values import same
from lowdiff.persistence.run.catalog import scan
from lowdiff.persistence.staging.log import staged_records
from lowdiff.persistence.staging.status import WriterStatus, read_status
from lowdiff.protect.log.queue import LogQueue
from tests.crash.pool import Pool
from tests.mounts import fill, tmpfs, tmpfs_or_skip
from tests.unit.loops import Loop, small_model, wait_until, wait_until_lost

PATIENCE_SECONDS = 20.0


def wait_for_error(checkpointer: lowdiff.Checkpointer, *, present: bool) -> None:
    """Wait until this rank's writer reports an error, or reports none any more."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while bool(checkpointer.stats()["writer_error"]) != present:
        assert time.monotonic() < deadline
        time.sleep(0.002)


def train_until_trouble(
    rank: int, world_size: int, folder: str, on_error: str
) -> tuple[int, str, list[str]]:
    """Train while rank 1's run folder is away. Returns the last step, the error, and warnings."""
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(vars(record).get("event", ""))  # type: ignore[method-assign]
    logging.getLogger("lowdiff").addHandler(handler)
    model = DistributedDataParallel(small_model())
    optimizer = torch.optim.AdamW(model.parameters())
    run, away = Path(folder, f"run-{rank}"), Path(folder, "away")
    checkpointer = lowdiff.Checkpointer(
        run, staging=Path(folder, "staging"), compressor=TopK(0.1), batch_size=4, on_error=on_error
    )
    checkpointer.attach(model, optimizer)
    step, error = 0, ""
    try:
        for step in checkpointer.steps(until=16):
            model(torch.full((4, 20), step + 1.0)).square().mean().backward()
            optimizer.step()
            if rank == 1:
                if step == 2:
                    run.rename(away)
                if step == 4:
                    wait_for_error(checkpointer, present=True)
                if step == 8:
                    away.rename(run)
                    wait_for_error(checkpointer, present=False)
    except WriterFailed as failure:
        error = str(failure)
        dist.barrier()  # all have read what rank 1's writer says
        if rank == 1:
            away.rename(run)
    checkpointer.close()
    logging.getLogger("lowdiff").removeHandler(handler)
    return step, error, said


@pytest.mark.slow
def test_raise_is_raised_at_the_same_commit_on_every_rank(tmp_path: Path, pool: Pool) -> None:
    results = pool.run(train_until_trouble, 3, str(tmp_path), "raise")
    steps = {step for step, _, _ in results}
    assert len(steps) == 1
    assert 4 <= steps.pop() < 8
    for _, error, _ in results:
        assert error.startswith("rank 1 reports: ")
        assert str(tmp_path / "run-1") in error


def test_warn_is_said_on_every_rank_and_training_goes_on(tmp_path: Path, pool: Pool) -> None:
    results = pool.run(train_until_trouble, 2, str(tmp_path), "warn")
    assert [(step, error) for step, error, _ in results] == [(15, "")] * 2
    assert results[0][2] == ["other_writer_error"]
    assert results[1][2] == ["writer_error"]
    assert scan(RunFolder(tmp_path / "run-1")).of(0, 1).newest == 16  # nothing was left out


def train_without_room(rank: int, world_size: int, folder: str) -> tuple[int, str]:
    """Train while rank 1 has no memory for a snapshot. Returns the last step and the error."""
    staging = Path(folder, f"staging-{rank}")
    with tmpfs(staging, 96) if rank == 1 else nullcontext():
        model = DistributedDataParallel(small_model())
        optimizer = torch.optim.AdamW(model.parameters())
        checkpointer = lowdiff.Checkpointer(
            Path(folder, "run"),
            staging=staging,
            compressor=TopK(0.1),
            snapshot_every=4,
            on_error="raise",
        )
        checkpointer.attach(model, optimizer)
        step, error = 0, ""
        try:
            for step in checkpointer.steps(until=16):
                model(torch.full((4, 20), step + 1.0)).square().mean().backward()
                optimizer.step()
                if step == 2 and rank == 1:  # AdamW's state makes the next snapshot larger
                    filler = fill(staging)
        except WriterFailed as failure:
            error = str(failure)
        if rank == 1:
            filler.unlink()
        checkpointer.close()
    return step, error


def test_a_rank_without_memory_for_a_snapshot_raises_on_all(tmp_path: Path, pool: Pool) -> None:
    with tmpfs_or_skip(tmp_path / "probe", 1):
        results = pool.run(train_without_room, 2, str(tmp_path))
    (first, error), (second, other_error) = results
    assert first == second < 8
    assert error == (
        "rank 1 reports: trouble with storage, see its output; nothing committed is lost: mend it, "
        "and attach goes on from there"
    )
    assert other_error.startswith("rank 1 reports: staging needs")


def train_with_room_later(rank: int, world_size: int, folder: str) -> int:
    """Train while rank 1 has no memory for the snapshot that is due; snapshots taken by step 59."""
    staging = Path(folder, f"staging-{rank}")
    with tmpfs(staging, 96) if rank == 1 else nullcontext():
        model = DistributedDataParallel(small_model())
        optimizer = torch.optim.AdamW(model.parameters())
        checkpointer = lowdiff.Checkpointer(
            Path(folder, "run"), staging=staging, compressor=TopK(0.1), snapshot_every=30
        )
        checkpointer.attach(model, optimizer)
        for step in checkpointer.steps(until=59):
            model(torch.full((4, 20), step + 1.0)).square().mean().backward()
            optimizer.step()
            if rank == 1 and step == 2:
                filler = fill(staging)
            if rank == 1 and step == 32:
                filler.unlink()
            if step > 32:
                # Another can only be taken once the one before is durable on all ranks.
                testing.wait_until(
                    checkpointer, lambda stats: stats["durable_snapshot"] >= stats["snapshot_step"]
                )
        taken = int(checkpointer.stats()["snapshots"])
        checkpointer.close()
    return taken


@pytest.mark.slow
def test_all_ranks_take_the_snapshot_that_one_owed_as_soon_as_it_can(
    tmp_path: Path, pool: Pool
) -> None:
    with tmpfs_or_skip(tmp_path / "probe", 1):
        taken = pool.run(train_with_room_later, 2, str(tmp_path))
    assert taken[1] == 2
    assert taken[0] <= 4  # it has taken its share each time that rank 1 tried
    steps = sorted(
        step
        for _, step, path in RunFolder(tmp_path / "run").snapshots()
        if len(list(path.glob("*.json"))) == 2
    )
    assert len(steps) >= 2
    assert 32 <= steps[-2] < 59


def train_until_taken_over(rank: int, world_size: int, folder: str) -> tuple[int, str]:
    """Train until another machine has the lease. Returns the last step and the error."""
    run = RunFolder(Path(folder, "run"))
    model = DistributedDataParallel(small_model())
    optimizer = torch.optim.AdamW(model.parameters())
    checkpointer = lowdiff.Checkpointer(
        run.root, staging=Path(folder, f"staging-{rank}"), compressor=TopK(0.1)
    )
    checkpointer.attach(model, optimizer)
    step, error = 0, ""
    try:
        for step in checkpointer.steps(until=16):
            model(torch.full((4, 20), step + 1.0)).square().mean().backward()
            optimizer.step()
            if rank == 0 and step == 4:
                # Of the same machine, so that it need not wait for the end of the other's lease.
                assert Lease(run.lease).acquire("process 8", timeout_seconds=PATIENCE_SECONDS)
                wait_until_lost(checkpointer)
    except RunInUse as failure:
        error = str(failure)
    checkpointer.close()
    return step, error


def test_a_run_taken_over_ends_training_at_the_same_commit_on_all_ranks(
    tmp_path: Path, pool: Pool
) -> None:
    (first, error), (second, other_error) = pool.run(train_until_taken_over, 2, str(tmp_path))
    assert first == second == 5
    assert "in use by process 8, which took over" in error
    assert "in use by another trainer, which took over" in other_error


def test_a_single_process_raises_at_the_next_commit_and_may_go_on(tmp_path: Path) -> None:
    loop = Loop(tmp_path, settings={"batch_size": 1, "on_error": "raise"})
    run = tmp_path / "run"
    loop.attach()
    run.rename(tmp_path / "gone")
    loop.step(0)
    loop.checkpointer.commit()
    wait_for_error(loop.checkpointer, present=True)
    loop.step(1)
    with pytest.raises(WriterFailed, match=r"rank 0 reports: StorageError: .* is gone"):
        loop.checkpointer.commit()
    (tmp_path / "gone").rename(run)
    wait_for_error(loop.checkpointer, present=False)
    loop.checkpointer.commit()
    assert loop.checkpointer.stats()["retries"] > 0
    loop.checkpointer.close()
    assert lowdiff.recover(run).step == 2


@pytest.mark.cases(1)
@pytest.mark.parametrize("broken", [False, True])
def test_stats_after_a_close_that_failed_are_those_of_its_life(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: bool
) -> None:
    loop = Loop(tmp_path)
    loop.run(1)
    loop.attach()
    for number in (1, 2):
        loop.step(number)
        loop.checkpointer.commit()

    def failing(opened: Opened, *, failed: bool, **options: bool) -> None:
        finish(opened, failed=failed, **options)
        if broken:
            monkeypatch.setattr(LogQueue, "figures", lambda _: 1 / 0)
        raise WriterFailed("it took too long")

    monkeypatch.setattr("lowdiff.checkpointer.finish", failing)
    with pytest.raises(WriterFailed, match="it took too long"):
        loop.checkpointer.close()
    # Those of the life before, where its own cannot be told: the error that came first counts.
    assert loop.checkpointer.stats()["steps"] == (1 if broken else 2)


def test_a_full_disk_at_attach_has_a_name_and_takes_nothing(tmp_path: Path) -> None:
    with tmpfs_or_skip(tmp_path / "disk", 1) as disk:
        filler = fill(disk)
        checkpointer = lowdiff.Checkpointer(
            disk / "run", staging=tmp_path / "staging", compressor=TopK(0.1)
        )
        model = small_model()
        optimizer = torch.optim.AdamW(model.parameters())
        with pytest.raises(StorageError, match=r"No space left on device.*attach again"):
            checkpointer.attach(model, optimizer)
        filler.unlink()
        assert checkpointer.attach(model, optimizer) == 0
        checkpointer.close()


def test_a_step_that_was_damaged_in_memory_is_said_and_a_snapshot_follows(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loop = Loop(tmp_path, settings={"snapshot_every": 1000, "batch_size": 8})
    loop.attach()
    stats = loop.checkpointer.stats
    os.kill(stats()["writer_pid"], signal.SIGSTOP)
    for number in range(10):
        loop.step(number)
        loop.checkpointer.commit()
    (stage,) = StagingFolder.all(tmp_path / "staging")
    (path, record), *_ = (found for found in staged_records(stage) if found[1].header.step == 4)
    with path.open("r+b") as file:
        file.seek(record.offset + HEADER_BYTES)
        file.write(bytes([record.body[0] ^ 1]))
    os.kill(stats()["writer_pid"], signal.SIGCONT)
    wait_until(lambda: read_status(stage.status, WriterStatus).lost_step == 4)
    assert stats()["durable_step"] == 3
    loop.step(10)
    loop.checkpointer.commit()
    assert "step 4 was damaged in staging memory and is not durable" in caplog.text
    wait_until(lambda: stats()["durable_snapshot"] == 11)
    assert stats()["durable_step"] >= 8
    loop.step(11)
    loop.checkpointer.commit()
    assert stats()["snapshots"] == 2
    expected = loop.weights()
    loop.die()
    resumed = Loop(tmp_path)
    assert resumed.attach() == 12
    assert same(resumed.weights(), expected)
    resumed.checkpointer.close()
