"""The writer process: what is staged becomes durable once, whoever dies and whatever is full."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiofiles
import numpy as np
import pytest
from safetensors.numpy import load_file

from lowdiff.errors import StorageError, WriterFailed
from lowdiff.persistence import segments as segments_module
from lowdiff.persistence import writer_process
from lowdiff.persistence.adoption import adopt_predecessors
from lowdiff.persistence.catalog import complete_snapshots
from lowdiff.persistence.codec import Codec
from lowdiff.persistence.fences import create_run
from lowdiff.persistence.framing import FileHeader, FileKind, RecordKind, RecordRef, read_records
from lowdiff.persistence.locks import FileLock
from lowdiff.persistence.memory import read_view
from lowdiff.persistence.paths import RunFolder, StagingFolder
from lowdiff.persistence.policy import Retention
from lowdiff.persistence.sections import read_sections
from lowdiff.persistence.segments import Batch, SegmentWriter, durable_step
from lowdiff.persistence.snapshots import ImageTensor, encode_mark, shard_file, stage_image
from lowdiff.persistence.staging import StagingLog, staged_records
from lowdiff.persistence.status import StatusReader, WriterStatus
from lowdiff.persistence.writer import Writer
from lowdiff.persistence.writer_process import WriterProcess
from lowdiff.persistence.writer_settings import WriterSettings
from lowdiff.types import Section
from tests.mounts import tmpfs_or_skip

ROOT = Path(__file__).parents[2]
RUN_ID = "00112233445566778899aabbccddeeff"
PATIENCE_SECONDS = 20.0


# A trainer that only stages


def settings_in(root: Path, run: Path | None = None, **changes: object) -> WriterSettings:
    settings = WriterSettings(
        run=str(run or root / "run"),
        staging_root=str(root / "staging"),
        run_id=RUN_ID,
        incarnation=0,
        rank=0,
        world_size=1,
        base_step=0,
        trainer_pid=os.getpid(),
        batch_size=4,
        flush_seconds=1000.0,
        retention=None,
    )
    settings = replace(settings, **changes)  # type: ignore[arg-type]
    create_run(settings.folder, RUN_ID)
    settings.staging.root.mkdir(parents=True)
    return settings


def log_of(settings: WriterSettings, cap_bytes: int = 1 << 20) -> StagingLog:
    return StagingLog(
        settings.staging,
        run_id=RUN_ID,
        world_size=settings.world_size,
        chunk_bytes=4096,
        cap_bytes=cap_bytes,
    )


def noise(step: int, num_items: int) -> np.ndarray:
    return np.random.default_rng(step).integers(0, 2**32, num_items, dtype=np.uint32)


def append(log: StagingLog, step: int, durable: int = -1, num_items: int = 50) -> int | None:
    sections = [
        Section("indices/float32", "ascending", np.arange(num_items) * step),
        Section("values/float32", "planes", noise(step, num_items)),
    ]
    kind, meta = RecordKind.DIFFERENTIAL, b"step %d" % step
    return log.append(kind, step, meta, sections, durable_step=durable)


def stage_snapshot(log: StagingLog, step: int, num_items: int, durable: int = -1) -> None:
    data = noise(step, num_items)
    image = ImageTensor("model/w", "U32", (num_items,), data.data.cast("B"))
    size, checksum = stage_image(log.folder.snapshot, [image])
    assert log.append(
        RecordKind.SNAPSHOT, step, encode_mark(size, checksum), (), durable_step=durable
    )


@contextmanager
def writing(settings: WriterSettings) -> Iterator[WriterProcess]:
    writer = WriterProcess(settings)
    try:
        yield writer
    finally:
        with suppress(WriterFailed):
            writer.finish(PATIENCE_SECONDS)


def wait_until(writer: WriterProcess, condition: Callable[[WriterStatus], object]) -> WriterStatus:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition(status := writer.status()):
        assert time.monotonic() < deadline, status
        time.sleep(0.002)
    return status


def stored_records(folder: RunFolder, incarnation: int = 0, rank: int = 0) -> list[RecordRef]:
    """Every valid record in every segment, in the order of the files."""
    found = []
    for number, owner, _, path in folder.segments():
        if (number, owner) == (incarnation, rank):
            view = read_view(path)
            if len(view) >= 64:
                found += list(read_records(view, FileHeader.unpack(view, path)))
    return found


def stored(
    folder: RunFolder, incarnation: int = 0, rank: int = 0, num_items: int = 50
) -> list[int]:
    """Their steps, after comparing each with what was staged."""
    records = stored_records(folder, incarnation, rank)
    for record in records:
        step = record.header.step
        assert bytes(record.meta) == b"step %d" % step
        indices, values = read_sections(record.sections, Codec(), coded=True)
        np.testing.assert_array_equal(indices.data, np.arange(num_items) * step)
        np.testing.assert_array_equal(values.data, noise(step, num_items))
    return [record.header.step for record in records]


# The daily work


def test_batches_become_durable_and_the_rest_when_the_trainer_is_done(tmp_path: Path) -> None:
    settings = settings_in(tmp_path)
    log = log_of(settings)
    with writing(settings) as writer:
        assert writer.status() == WriterStatus(durable_step=0)
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
    assert status.segment_bytes == path.stat().st_size


def test_a_batch_that_is_not_full_is_written_after_a_while(tmp_path: Path) -> None:
    settings = settings_in(tmp_path, batch_size=100, flush_seconds=0.2)
    log = log_of(settings)
    with writing(settings) as writer:
        append(log, 1)
        append(log, 2)
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
        append(log, 2)
        status = wait_until(writer, lambda s: s.durable_snapshot == 1 and s.durable_step == 2)
    (snapshot,) = complete_snapshots(settings.folder, RUN_ID)
    tensors = load_file(shard_file(snapshot.folder, 0))
    np.testing.assert_array_equal(tensors["model/w"], noise(1, 10_000))
    assert status.snapshot_bytes == snapshot.bytes
    assert os.listdir(snapshot.folder).count("rank-0000.safetensors.partial") == 0
    # Segments roll at a snapshot, so that retention can remove what is before it.
    assert [first for _, _, first, _ in settings.folder.segments()] == [1, 2]


def test_retention_runs_after_each_snapshot(tmp_path: Path) -> None:
    from lowdiff.persistence.fences import write_fence
    from lowdiff.types import Environment, Fence, Layout, OptimizerSpec, ParameterSpec

    settings = settings_in(tmp_path, batch_size=1, retention=Retention(snapshots=1))
    environment = Environment("cpu", "2.13", "some processor", "AVX2", 1, False, "")
    write_fence(
        settings.folder,
        Fence(
            *(RUN_ID, 0, None, 0, 0, 1, environment),
            Layout((ParameterSpec("w", (2,), (1,), "float32", 0),)),
            (OptimizerSpec("torch.optim.sgd.SGD", (("w",),)),),
            {"name": "topk"},
            {},
        ),
    )
    log = log_of(settings)
    with writing(settings) as writer:
        for step in range(1, 4):
            append(log, step)
            wait_until(writer, lambda s, step=step: s.durable_step == step)  # type: ignore[misc]
            stage_snapshot(log, step, 10)
            wait_until(writer, lambda s, step=step: s.durable_snapshot == step)  # type: ignore[misc]
    assert [step for _, step, _ in settings.folder.snapshots()] == [3]
    assert [first for _, _, first, _ in settings.folder.segments()] == [3]


# What it is


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


def test_it_is_small_at_rest(tmp_path: Path) -> None:
    with writing(settings_in(tmp_path)) as writer:
        status = Path(f"/proc/{writer.pid}/status").read_text()
    (line,) = (line for line in status.splitlines() if line.startswith("VmRSS"))
    assert int(line.split()[1]) < 100 << 10


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
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_process, "_CHECK_SECONDS", 0.01)
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
    assert durable_step(settings.folder, 0, 0, base_step=0) == 1
    assert synced == ["i000000-s0000000001.seg", "rank-0000"]
    assert durable_step(settings.folder, 0, 1, base_step=7) == 7


TRAINER = """
import os, signal, sys, time
from test_writer import append, log_of, settings_in, stage_snapshot, wait_until, writing
from pathlib import Path
from lowdiff.persistence.writer import Writer
from lowdiff.persistence.writer_process import WriterProcess

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


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("kind", ["alone", "fork"])
def test_when_its_trainer_is_killed_it_drains_and_exits(tmp_path: Path, kind: str) -> None:
    # A forked DataLoader worker outlives its trainer and holds the writer's pipe open.
    with subprocess.Popen(
        [sys.executable, "-c", TRAINER, str(tmp_path), kind],
        env={**os.environ, "PYTHONPATH": f"{Path(__file__).parent}{os.pathsep}{ROOT}"},
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
    status = StatusReader(stage.status).read()
    assert (status.durable_step, status.durable_snapshot, status.closed) == (7, 7, True)
    assert stored(RunFolder(tmp_path / "run")) == list(range(1, 8))
    assert FileLock(stage.writer_lock).acquire("the next one")


def test_finishing_after_the_writer_was_killed_starts_another_that_drains(tmp_path: Path) -> None:
    settings = settings_in(tmp_path)
    log = log_of(settings)
    writer = WriterProcess(settings)
    append(log, 1)
    os.kill(writer.pid, signal.SIGKILL)
    writer._process.wait()
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


@pytest.mark.parametrize("num_steps", [1, 9])
def test_a_writer_without_trainer_and_run_folder_ends_and_leaves_what_is_staged(
    tmp_path: Path, num_steps: int
) -> None:
    """However many batches wait for the first one to be written."""
    settings = settings_in(tmp_path, folder_patience_seconds=0.0, batch_size=1)
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


# Adoption


def predecessor(root: Path, steps: range, incarnation: int = 0, rank: int = 0) -> WriterSettings:
    settings = settings_in(root, incarnation=incarnation, rank=rank, world_size=4)
    log = log_of(settings)
    log.append(RecordKind.BASE, steps.start - 1, b"base", (), durable_step=-1)
    for step in steps:
        append(log, step)
    return settings


def adopt(settings: WriterSettings) -> None:
    adopt_predecessors(settings, threading.Event())


def test_a_later_incarnations_writer_adopts_what_a_dead_one_left(tmp_path: Path) -> None:
    dead = predecessor(tmp_path, range(1, 8))
    settings = settings_in(tmp_path, incarnation=1, base_step=7)
    log = log_of(settings)
    with writing(settings) as writer:
        time.sleep(0.2)
        # Not before its own log names the residual that it starts from.
        assert dead.staging.root.exists()
        log.append(RecordKind.BASE, 7, b"base", (), durable_step=-1)
        wait_until(writer, lambda _: not dead.staging.root.exists())
        writer.finish(PATIENCE_SECONDS)
    assert stored(dead.folder) == list(range(1, 8))


def test_only_what_is_missing_is_adopted(tmp_path: Path) -> None:
    dead = predecessor(tmp_path, range(1, 8))
    with writing(dead):
        pass
    append_more = StagingLog(
        dead.staging, run_id=RUN_ID, world_size=4, chunk_bytes=4096, cap_bytes=1 << 20
    )
    for step in range(6, 12):
        append(append_more, step)
    adopt(settings_in(tmp_path, incarnation=1))
    assert stored(dead.folder) == list(range(1, 12))


def test_ranks_that_are_no_more_are_shared_out_over_those_that_are(tmp_path: Path) -> None:
    dead = [predecessor(tmp_path, range(1, 3), rank=rank) for rank in range(4)]
    for rank in range(2):
        adopt(settings_in(tmp_path, incarnation=1, rank=rank, world_size=2))
        gone = [not d.staging.root.exists() for d in dead]
        assert gone == [True, rank == 1, True, rank == 1]
    for d in dead:
        assert stored(d.folder, 0, d.rank) == [1, 2]


def test_neither_its_own_nor_a_later_staging_is_adopted(tmp_path: Path) -> None:
    later = predecessor(tmp_path, range(1, 3), incarnation=2)
    own = settings_in(tmp_path, incarnation=1)
    adopt(own)
    assert later.staging.root.exists()
    assert own.staging.root.exists()
    assert stored(later.folder, 2) == []


def test_a_predecessor_whose_writer_still_works_is_waited_for(tmp_path: Path) -> None:
    dead = predecessor(tmp_path, range(1, 3))
    lock = FileLock(dead.staging.writer_lock)
    assert lock.acquire("an orphaned writer")
    adopting = threading.Thread(target=adopt, args=[settings_in(tmp_path, incarnation=1)])
    adopting.start()
    time.sleep(0.2)
    assert dead.staging.root.exists()
    assert stored(dead.folder) == []
    lock.release()
    adopting.join()
    assert stored(dead.folder) == [1, 2]


def test_waiting_for_a_predecessor_ends_with_the_trainer(tmp_path: Path) -> None:
    dead = predecessor(tmp_path, range(1, 3))
    lock = FileLock(dead.staging.writer_lock)
    assert lock.acquire("an orphaned writer")
    gone = threading.Event()
    gone.set()
    adopt_predecessors(settings_in(tmp_path, incarnation=1), gone)
    assert dead.staging.root.exists()
    lock.release()


def test_a_predecessor_that_another_writer_removed_in_the_meantime_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    dead = [predecessor(tmp_path, range(1, 3), incarnation=number) for number in range(2)]
    acquire = FileLock.acquire

    def acquire_late(self: FileLock, description: str, *, timeout_seconds: float = 0.0) -> bool:
        if dead[0].staging.root in self.path.parents:
            shutil.rmtree(dead[0].staging.root)
        return acquire(self, description, timeout_seconds=timeout_seconds)

    monkeypatch.setattr(FileLock, "acquire", acquire_late)
    adopt(settings_in(tmp_path, incarnation=2))
    assert stored(dead[1].folder, 1) == [1, 2]
    assert not caplog.records


def test_what_cannot_be_adopted_stays_in_staging(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    dead = predecessor(tmp_path, range(1, 3))
    settings = settings_in(tmp_path, incarnation=1)
    settings.folder.run_file.rename(tmp_path / "elsewhere")
    adopt(settings)
    assert dead.staging.root.exists()
    assert "stays in staging" in caplog.text
    (tmp_path / "elsewhere").rename(settings.folder.run_file)
    adopt(settings)
    assert stored(dead.folder) == [1, 2]


def test_adoption_is_tried_again_until_it_succeeds_and_reported_meanwhile(tmp_path: Path) -> None:
    dead = predecessor(tmp_path, range(1, 4))
    settings = settings_in(tmp_path, incarnation=1, base_step=3)
    blocked = dead.folder.segments_of(0)
    blocked.parent.mkdir()
    blocked.write_text("in the way of a folder")
    log = log_of(settings)
    with writing(settings) as writer:
        log.append(RecordKind.BASE, 3, b"base", (), durable_step=-1)
        assert not wait_until(writer, lambda s: "File exists" in s.error).adopted
        blocked.unlink()
        assert not wait_until(writer, lambda s: s.adopted).error
        assert stored(dead.folder) == [1, 2, 3]


# Storage trouble


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MiB."""
    with tmpfs_or_skip(tmp_path / "disk", 2) as folder:
        yield folder


def remount(folder: Path, mode: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{mode}", str(folder)], check=True)


class Trouble:
    """Something that is wrong with a disk for a while."""

    def __init__(self, kind: str, disk: Path) -> None:
        self.kind, self.disk = kind, disk

    def begin(self) -> None:
        if self.kind == "full":
            free = shutil.disk_usage(self.disk).free
            (self.disk / "filler").write_bytes(bytes(free - (48 << 10)))
        elif self.kind == "read-only":
            remount(self.disk, "ro")
        else:
            (self.disk / "run").rename(self.disk / "elsewhere")

    def end(self) -> None:
        if self.kind == "full":
            (self.disk / "filler").unlink()
        elif self.kind == "read-only":
            remount(self.disk, "rw")
        else:
            assert not (self.disk / "run").exists(), "nobody may put another run in its place"
            (self.disk / "elsewhere").rename(self.disk / "run")


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("full", "No space left on device"),
        ("read-only", "Read-only file system"),
        ("gone", "No such file or directory"),
    ],
)
def test_trouble_is_reported_and_waited_out(small_disk: Path, kind: str, message: str) -> None:
    settings = settings_in(small_disk.parent, run=small_disk / "run", batch_size=2)
    log = log_of(settings)
    trouble = Trouble(kind, small_disk)
    with writing(settings) as writer:
        for step in (1, 2):
            append(log, step, num_items=4000)
        wait_until(writer, lambda s: s.durable_step == 2)
        trouble.begin()
        for step in range(3, 11):
            append(log, step, num_items=4000)
        status = wait_until(writer, lambda s: s.error)
        assert message in status.error
        before = status.durable_step
        assert before < 10
        trouble.end()
        status = wait_until(writer, lambda s: s.durable_step == 10)
        assert status.error == ""
    assert stored(settings.folder, num_items=4000) == list(range(1, 11))


def test_a_writer_started_while_the_run_is_away_makes_no_other_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_process, "_CHECK_SECONDS", 0.1)
    settings = settings_in(tmp_path, batch_size=2)
    log = log_of(settings)
    run, away = tmp_path / "run", tmp_path / "away"
    with writing(settings) as writer:
        append(log, 1)
        append(log, 2)
        wait_until(writer, lambda s: s.durable_step == 2)
        run.rename(away)
        first = writer.pid
        os.kill(first, signal.SIGKILL)
        append(log, 3)
        append(log, 4)
        wait_until(writer, lambda _: writer.pid != first)
        time.sleep(0.5)
        assert not run.exists()
        away.rename(run)
        wait_until(writer, lambda s: s.durable_step == 4)
    assert stored(settings.folder) == [1, 2, 3, 4]


def test_a_snapshot_that_does_not_fit_holds_up_no_differential_and_outlives_its_writer(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_process, "_CHECK_SECONDS", 0.05)
    settings = settings_in(small_disk.parent, run=small_disk / "run", batch_size=1)
    log = log_of(settings, cap_bytes=3 * 4096)
    filler = small_disk / "filler"
    filler.write_bytes(bytes(1 << 20))
    with writing(settings) as writer:
        append(log, 1)
        stage_snapshot(log, 1, 1 << 18)
        wait_until(writer, lambda s: "No space left" in s.error)
        for step in range(2, 40):
            assert append(log, step, durable=step - 1)
            status = wait_until(writer, lambda s, step=step: s.durable_step == step)  # type: ignore[misc]
            assert "No space left" in status.error, "the success of others hides it"
        assert status.durable_snapshot == -1
        # By now the part of the log that said first where the image is has been reused.
        first = writer.pid
        os.kill(first, signal.SIGKILL)
        wait_until(writer, lambda _: writer.pid != first)
        filler.unlink()
        wait_until(writer, lambda s: s.durable_snapshot == 1)
    (snapshot,) = complete_snapshots(settings.folder, RUN_ID)
    tensors = load_file(shard_file(snapshot.folder, 0))
    np.testing.assert_array_equal(tensors["model/w"], noise(1, 1 << 18))
    assert stored(settings.folder) == list(range(1, 40))


# Segments


HEADER = FileHeader(FileKind.SEGMENT, RUN_ID, 0, 0, 1, 0)


def segments_in(path: Path) -> tuple[RunFolder, SegmentWriter]:
    folder = RunFolder(path)
    create_run(folder, RUN_ID)
    return folder, SegmentWriter(folder, HEADER)


def batch(first: int, last: int) -> Batch:
    return Batch(b"".join(bytes([step]) * 100 for step in range(first, last + 1)), first, last)


@pytest.mark.parametrize("call", ["fsync", "fdatasync"])
def test_a_batch_whose_write_failed_is_given_again_and_stands_there_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    folder, segments = segments_in(tmp_path)
    sync, failures = getattr(os, call), [True]

    def failing(descriptor: int) -> None:
        if failures and ".seg" in os.readlink(f"/proc/self/fd/{descriptor}"):
            failures.pop()
            raise OSError(5, "Input/output error")
        sync(descriptor)

    monkeypatch.setattr(os, call, failing)
    written = 0
    for work in (batch(1, 2), batch(3, 3), batch(4, 6)):
        try:
            written += asyncio.run(segments.append(work))
        except OSError:
            written += asyncio.run(segments.append(work))
    data = folder.segment(0, 0, 1).read_bytes()
    assert data == replace(HEADER, sequence=1).pack() + batch(1, 6).data
    assert written == len(data)
    assert not failures


@pytest.mark.parametrize("call", ["fsync", "fdatasync"])
def test_what_others_have_seen_of_a_batch_stays_while_it_is_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """A later incarnation, on another machine, may have gone on from what never became durable."""
    folder, segments = segments_in(tmp_path)
    open_file = aiofiles.open

    def failing(descriptor: int) -> None:
        if ".seg" in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(5, "Input/output error")

    @asynccontextmanager
    async def full(path: Path, mode: str, **options: Any) -> AsyncIterator[Any]:
        async def refused(data: bytes) -> None:
            raise OSError(28, "No space left on device")

        async with open_file(path, mode, **options) as file:
            monkeypatch.setattr(file, "write", refused)
            yield file

    if call == "fdatasync":
        asyncio.run(segments.append(batch(1, 2)))
    with monkeypatch.context() as broken:
        broken.setattr(os, call, failing)
        with pytest.raises(OSError, match="Input/output"):
            asyncio.run(segments.append(batch(3, 4)))
    (path,) = (path for *_, path in folder.segments())
    seen = path.read_bytes()
    assert seen.endswith(batch(3, 4).data)
    with monkeypatch.context() as broken:
        broken.setattr(aiofiles, "open", full)
        with pytest.raises(OSError, match="No space"):
            asyncio.run(segments.append(batch(3, 4)))
    assert path.read_bytes() == seen
    asyncio.run(segments.append(batch(3, 4)))
    assert path.read_bytes() == seen


def test_nothing_of_a_dead_writers_torn_record_stays(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    create_run(folder, RUN_ID)
    torn = folder.segment(0, 0, 1)
    torn.parent.mkdir(parents=True)
    torn.write_bytes(replace(HEADER, sequence=1).pack() + batch(1, 9).data)
    asyncio.run(SegmentWriter(folder, HEADER).append(batch(1, 2)))
    assert torn.read_bytes() == replace(HEADER, sequence=1).pack() + batch(1, 2).data


def test_a_long_segment_is_followed_by_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segments_module, "_SEGMENT_BYTES", 300)
    folder, segments = segments_in(tmp_path)
    for step in range(1, 7):
        asyncio.run(segments.append(batch(step, step)))
    assert [first for _, _, first, _ in folder.segments()] == [1, 4]


def test_segments_are_written_nowhere_but_in_the_run(tmp_path: Path) -> None:
    segments = SegmentWriter(RunFolder(tmp_path / "unmounted"), HEADER)
    with pytest.raises(StorageError, match="bring the run folder back, or mount it"):
        asyncio.run(segments.append(batch(1, 1)))
    assert not (tmp_path / "unmounted").exists()


def test_a_run_folder_that_does_not_answer_is_not_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = settings_in(tmp_path, folder_patience_seconds=0.0)
    with open(os.devnull) as nothing:
        monkeypatch.setattr(sys, "stdin", nothing)
        writer = Writer(settings)
        assert writer._orders.read()  # END: nothing can be read from it

    def stale(path: Path) -> bool:
        raise OSError(116, "Stale file handle")

    with monkeypatch.context() as broken:
        broken.setattr(Path, "exists", stale)
        writer._give_up_if_deleted(OSError("the write failed"))
    shutil.rmtree(settings.run)
    writer._give_up_if_deleted(OSError("the write failed"))
    with pytest.raises(WriterFailed, match="is gone, and so is its trainer"):
        writer._give_up_if_deleted(OSError("the write failed"))
