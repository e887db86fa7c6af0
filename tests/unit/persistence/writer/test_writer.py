"""The writer process: what is staged becomes durable once, whoever dies."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from lowdiff.errors import WriterFailed
from lowdiff.persistence.files.locks import FileLock
from lowdiff.persistence.files.paths import RunFolder, StagingFolder
from lowdiff.persistence.format.framing import RecordKind
from lowdiff.persistence.format.image import shard_file
from lowdiff.persistence.format.segment_file import SegmentFile
from lowdiff.persistence.run.catalog import complete_snapshots
from lowdiff.persistence.staging.log import staged_records
from lowdiff.persistence.staging.status import StatusReader, WriterStatus
from lowdiff.persistence.writer import main
from lowdiff.persistence.writer.handle import WriterProcess
from lowdiff.persistence.writer.images import newer_images
from lowdiff.persistence.writer.segments import durable_step
from lowdiff.types import Retention
from tests.processes import is_alive
from tests.unit.persistence.writers import (
    PATIENCE_SECONDS,
    ROOT,
    RUN_ID,
    append,
    log_of,
    noise,
    settings_in,
    stage_snapshot,
    stored,
    wait_until,
    write_here,
    writing,
)

# The daily work


def test_batches_become_durable_and_the_rest_when_the_trainer_is_done(tmp_path: Path) -> None:
    settings = settings_in(tmp_path)
    log = log_of(settings)
    with writing(settings) as writer:
        assert writer.read_status() == WriterStatus(durable_step=0)
        for step in range(1, 11):
            append(log, step)
        status = wait_until(writer, lambda s: s.durable_step == 8)
        assert (status.batches, status.closed, status.error) == (2, False, "")
        assert stored(settings.folder) == list(range(1, 9))
        status = writer.finish(PATIENCE_SECONDS)
    assert (status.durable_step, status.batches, status.closed) == (10, 3, True)
    assert stored(settings.folder) == list(range(1, 11))
    (path,) = (path for *_, path in settings.folder.segments())
    assert path.name == "i000000-s0000000001.seg"
    footer = SegmentFile(path).footer
    assert footer is not None
    assert status.segment_bytes == footer.end


def test_a_batch_that_is_not_full_is_written_after_a_while(tmp_path: Path) -> None:
    settings = settings_in(tmp_path, batch_size=100, flush_seconds=0.2)
    log = log_of(settings)
    append(log, 1)
    append(log, 2)
    with writing(settings) as writer:
        assert wait_until(writer, lambda s: s.durable_step == 2).batches == 1


def test_write_through_flushes_the_tail_and_outlives_the_writer(tmp_path: Path) -> None:
    settings = settings_in(tmp_path, batch_size=100)
    log = log_of(settings)
    with writing(settings) as writer:
        append(log, 1)
        append(log, 2)
        writer.write_through()
        status = wait_until(writer, lambda s: s.durable_step == 2)
        append(log, 3)
        batches = wait_until(writer, lambda s: s.durable_step == 3).batches
        assert batches > status.batches
        os.kill(writer.pid, signal.SIGKILL)
        wait_until(writer, lambda _: writer.restarts == 1)
        append(log, 4)
        # The successor's counters go on where those of the dead one stopped.
        status = wait_until(writer, lambda s: s.durable_step == 4)
        assert status.batches == status.batch_seconds.count == batches + 1
    assert stored(settings.folder) == [1, 2, 3, 4]


def test_a_base_record_is_for_staging_only_and_steps_count_from_the_base(tmp_path: Path) -> None:
    settings = settings_in(tmp_path, incarnation=3, base_step=40, batch_size=1)
    log = log_of(settings)
    log.append(RecordKind.BASE, 40, b"base", (), durable_step=-1)
    append(log, 41)
    with writing(settings) as writer:
        wait_until(writer, lambda s: s.durable_step == 41)
    assert stored(settings.folder, 3) == [41]


def test_a_snapshot_becomes_durable_beside_the_differentials(tmp_path: Path) -> None:
    settings = settings_in(tmp_path, batch_size=1)
    log = log_of(settings)
    with writing(settings) as writer:
        append(log, 1)
        stage_snapshot(log, 1, 10_000)
        wait_until(writer, lambda s: s.durable_snapshot == 1)
        append(log, 2)
        status = wait_until(writer, lambda s: s.durable_step == 2)
    (snapshot,) = complete_snapshots(settings.folder, RUN_ID)
    tensors = load_file(shard_file(snapshot.folder, 0))
    np.testing.assert_array_equal(tensors["model/w"], noise(1, 10_000))
    assert status.snapshot_bytes == snapshot.bytes
    assert os.listdir(snapshot.folder).count("rank-0000.safetensors.partial") == 0
    # Segments roll at a snapshot, so that retention can remove what is before it.
    assert [first for _, _, first, _ in settings.folder.segments()] == [1, 2]


def test_an_image_overtakes_no_record_that_is_staged_while_the_writer_looks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The writer runs in this process, whose parent is to be the trainer.
    settings = settings_in(tmp_path, batch_size=1, trainer_pid=os.getppid())
    log = log_of(settings)
    append(log, 1)
    orders, trainer = os.pipe()
    looks: list[bool] = []

    def meanwhile(*arguments: Any) -> Any:
        looks.append(True)
        if len(looks) == 2:  # the writer has found no second record a moment before
            append(log, 2)
            stage_snapshot(log, 2, 10_000)
            append(log, 3)
            os.close(trainer)
        return newer_images(*arguments)

    monkeypatch.setattr(main, "newer_images", meanwhile)
    with open(orders) as pipe:
        write_here(settings, pipe, monkeypatch)
    assert [first for _, _, first, _ in settings.folder.segments()] == [1, 3]


def test_retention_runs_after_each_snapshot(tmp_path: Path) -> None:
    from lowdiff.persistence.run.fences import write_fence
    from lowdiff.types import Environment, Fence, Layout, OptimizerSpec, ParameterSpec

    settings = settings_in(tmp_path, batch_size=1, retention=Retention(snapshots=1))
    environment = Environment(
        "cpu", "2.13", "some processor", "AVX2", 1, False, "", "float32", "highest"
    )
    write_fence(
        settings.folder,
        Fence(
            *(RUN_ID, 0, None, 0, 0, 1, environment),
            Layout((ParameterSpec("w", (2,), (1,), "float32", 0),)),
            (OptimizerSpec("torch.optim.sgd.SGD", (("w",),)),),
            {"name": "topk"},
            {},
            life="0" * 32,
            strategy="log",
        ),
    )
    log = log_of(settings)
    with writing(settings) as writer:

        def make_durable(step: int) -> None:
            append(log, step)
            wait_until(writer, lambda s: s.durable_step == step)
            stage_snapshot(log, step, 10)
            wait_until(writer, lambda s: s.durable_snapshot == step)

        for step in range(1, 4):
            make_durable(step)
    assert [step for _, step, _ in settings.folder.snapshots()] == [3]
    assert [first for _, _, first, _ in settings.folder.segments()] == [3]


# What it is


@pytest.mark.slow
@pytest.mark.new_processes
def test_it_loads_neither_torch_nor_the_users_modules_and_stays_small(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    user = tmp_path / "user"
    user.mkdir()
    for module in ("msgpack", "asyncio", "numpy", "lowdiff", "persistence"):
        (user / f"{module}.py").write_text("raise SystemExit('the user\\'s module was imported')")
    monkeypatch.chdir(user)
    settings = settings_in(tmp_path, batch_size=2)
    log = log_of(settings, cap_bytes=64 << 20)
    with writing(settings) as writer:
        for step in range(1, 9):
            append(log, step, num_items=100_000)
        stage_snapshot(log, 8, 8 << 20)
        wait_until(writer, lambda s: s.durable_snapshot == 8)
        process = Path(f"/proc/{writer.pid}")
        status = process.joinpath("status").read_text()
        maps = process.joinpath("maps").read_text()
        session = os.getsid(writer.pid)
    memory = dict(line.split(":", 1) for line in status.splitlines())
    assert "numpy" in maps
    assert "libtorch" not in maps
    # The image and the chunks are mapped, not owned: they are counted with the staging memory.
    assert int(memory["RssAnon"].split()[0]) < 100 << 10
    assert int(memory["VmRSS"].split()[0]) < (100 << 10) + (32 << 10) + (64 << 10)
    assert session == writer.pid, "in a session of its own: a launcher's kill does not reach it"


@pytest.mark.new_processes
def test_it_is_small_at_rest(tmp_path: Path) -> None:
    with writing(settings_in(tmp_path)) as writer:
        status = Path(f"/proc/{writer.pid}/status").read_text()
    at_rest = dict(line.split(":", 1) for line in status.splitlines())
    assert int(at_rest["VmRSS"].split()[0]) < 100 << 10
    assert int(at_rest["Threads"]) == 1, "however many cores there are"


@pytest.mark.new_processes
def test_a_writer_that_does_not_start_is_an_error_that_quotes_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\necho some reason >&2\nexit 1\n")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    with pytest.raises(WriterFailed, match=r"did not start.*:\nsome reason"):
        WriterProcess(settings_in(tmp_path))


# Deaths


def test_a_writer_killed_at_any_moment_loses_nothing_and_writes_nothing_twice(
    tmp_path: Path, limits: Callable[..., None]
) -> None:
    limits(process_check_seconds=0.01, restart_backoff_seconds=0.0)
    settings = settings_in(tmp_path)
    log = log_of(settings, cap_bytes=5 * 4096)
    rng = np.random.default_rng(0)
    pids = set()
    with writing(settings) as writer:
        durable = step = 0
        for _ in range(4):
            last = step + int(rng.integers(10, 40))
            while step < last:
                if append(log, step + 1, durable):
                    step += 1
                durable = wait_until(writer, lambda s: s.durable_step >= 0).durable_step
                time.sleep(float(rng.exponential(0.002)))
            pids.add(writer.pid)
            os.kill(writer.pid, signal.SIGKILL)
            wait_until(writer, lambda _: writer.pid not in pids)
        status = writer.finish(PATIENCE_SECONDS)
    assert len(pids) == 4
    assert (status.durable_step, status.closed) == (step, True)
    assert stored(settings.folder) == list(range(1, step + 1))


def test_a_torn_batch_of_a_killed_writer_is_written_again_behind_it(tmp_path: Path) -> None:
    settings = settings_in(tmp_path)
    log = log_of(settings)
    for step in range(1, 9):
        append(log, step)
    with writing(settings) as writer:
        wait_until(writer, lambda s: s.durable_step == 8)
    (path,) = (path for *_, path in settings.folder.segments())
    whole = path.read_bytes()
    for length in (0, 30, 300, len(whole) - 1):
        path.write_bytes(whole[:length])  # as a killed writer may have left it
        with writing(settings) as writer:
            status = writer.finish(PATIENCE_SECONDS)
        assert status.durable_step == 8
        assert stored(settings.folder) == list(range(1, 9))
        for *_, other in settings.folder.segments():
            other.unlink()


def test_what_a_killed_writer_left_is_fsynced_before_it_is_called_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = settings_in(tmp_path)
    log = log_of(settings)
    append(log, 1)
    with writing(settings):
        pass
    synced = []
    fsync = os.fsync

    def log_fsync(descriptor: int) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", log_fsync)
    assert durable_step(settings.folder, RUN_ID, 0, 0, base_step=0) == 1
    assert synced == ["i000000-s0000000001.seg", "rank-0000"]
    assert durable_step(settings.folder, RUN_ID, 0, 1, base_step=7) == 7


TRAINER = """
import os, signal, sys, time
from tests.unit.persistence.writers import append, log_of, settings_in, stage_snapshot, wait_until, writing
from pathlib import Path
from lowdiff.persistence.writer.main import Writer
from lowdiff.persistence.writer.handle import WriterProcess

settings = settings_in(Path(sys.argv[1]), batch_size=100)
log = log_of(settings)
writer = WriterProcess(settings)
for step in range(1, 8):
    append(log, step)
stage_snapshot(log, 7, 1000)
child = os.fork() if sys.argv[2] == "fork" else os.getpid()
if child:
    print(writer.pid, child, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(60)
"""


@pytest.mark.cases(1)
@pytest.mark.parametrize("kind", ["alone", "fork"])
def test_when_its_trainer_is_killed_it_drains_and_exits(tmp_path: Path, kind: str) -> None:
    # A forked DataLoader worker outlives its trainer and holds the writer's pipe open.
    with subprocess.Popen(
        [sys.executable, "-c", TRAINER, str(tmp_path), kind],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    ) as trainer:
        assert trainer.stdout is not None
        writer, child = map(int, trainer.stdout.readline().split())
        trainer.wait(PATIENCE_SECONDS)
        deadline = time.monotonic() + PATIENCE_SECONDS
        while is_alive(writer) and time.monotonic() < deadline:
            time.sleep(0.01)
        if kind == "fork":
            assert is_alive(child)
            os.kill(child, signal.SIGKILL)
    assert not is_alive(writer)
    stage = StagingFolder.of(tmp_path / "staging", RUN_ID, 0, 0)
    status = StatusReader(stage.status, WriterStatus).read()
    assert (status.durable_step, status.durable_snapshot, status.closed) == (7, 7, True)
    assert stored(RunFolder(tmp_path / "run")) == list(range(1, 8))
    assert FileLock(stage.writer_lock).acquire("the next one")


def test_finishing_after_the_writer_was_killed_starts_another_that_drains(tmp_path: Path) -> None:
    settings = settings_in(tmp_path)
    log = log_of(settings)
    writer = WriterProcess(settings)
    append(log, 1)
    os.kill(writer.pid, signal.SIGKILL)
    while is_alive(writer.pid):
        time.sleep(0.005)
    assert writer.finish(PATIENCE_SECONDS).closed
    assert stored(settings.folder) == [1]


def test_a_writer_killed_while_it_finishes_is_replaced(tmp_path: Path) -> None:
    settings = settings_in(tmp_path)
    log = log_of(settings)
    writer = WriterProcess(settings)
    os.kill(writer.pid, signal.SIGSTOP)
    append(log, 1)
    killing = threading.Timer(0.3, os.kill, (writer.pid, signal.SIGKILL))
    killing.start()
    assert writer.finish(PATIENCE_SECONDS).closed
    killing.join()
    assert writer.restarts == 1
    assert stored(settings.folder) == [1]


@pytest.mark.slow
@pytest.mark.parametrize("num_steps", [1, 9])
def test_a_writer_without_trainer_and_run_folder_ends_and_leaves_what_is_staged(
    tmp_path: Path, num_steps: int
) -> None:
    """However many batches wait for the first one to be written."""
    settings = settings_in(tmp_path, folder_timeout_seconds=0.0, batch_size=1)
    log = log_of(settings)
    writer = WriterProcess(settings)
    shutil.rmtree(settings.folder.root)
    steps = range(1, num_steps + 1)
    for step in steps:
        append(log, step)
    wait_until(writer, lambda status: status.error)
    with pytest.raises(WriterFailed, match="died 3 times while it finished"):
        writer.finish(PATIENCE_SECONDS)
    assert not is_alive(writer.pid)
    assert "is gone, and so is its trainer" in settings.staging.writer_log.read_text()
    assert [r.header.step for _, r in staged_records(settings.staging)] == list(steps)
