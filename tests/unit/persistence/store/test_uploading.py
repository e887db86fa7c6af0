"""The writer's uploads: what goes up, what a dead store cannot hold up, and when it gives up."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from lowdiff.persistence.files.locks import FileLock
from lowdiff.persistence.format.framing import FileHeader, read_records
from lowdiff.persistence.staging.measurements import gather_measurements
from lowdiff.persistence.staging.settings import WriterSettings
from lowdiff.persistence.staging.status import WriterStatus
from lowdiff.persistence.store.client import ObjectStore
from lowdiff.persistence.writer.handle import WriterProcess
from tests.processes import is_alive
from tests.unit.persistence.s3_server import S3Server, running_server
from tests.unit.persistence.writers import (
    append,
    log_of,
    settings_in,
    stage_snapshot,
    wait_until,
    writing,
)


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with running_server() as made:
        yield made


def settings_with_store(root: Path) -> WriterSettings:
    """A store in a folder, which needs no server."""
    return settings_in(root, store=f"file://{root}/store", batch_size=1, segment_seconds=0.0)


def has_uploaded(step: int) -> Callable[[WriterStatus], bool]:
    return lambda status: status.remote_step == step


def steps_in(store: ObjectStore, name: str) -> list[int]:
    """Steps of a segment object."""
    data = memoryview(store.read(name))
    return [r.header.step for r in read_records(data, FileHeader.unpack(data, Path(name)))]


def steps_uploaded(store: ObjectStore) -> list[int]:
    return [s for name in sorted(store.sizes("segments")) for s in steps_in(store, name)]


def test_each_object_is_a_file_of_the_run_folder(tmp_path: Path) -> None:
    settings = settings_with_store(tmp_path)
    log = log_of(settings)
    with writing(settings) as writer:
        for step in (1, 2, 3):
            append(log, step)
            wait_until(writer, has_uploaded(step))
        stage_snapshot(log, 3, 1000)
        wait_until(writer, lambda status: status.remote_snapshot == 3)
        append(log, 4)
    store = ObjectStore(f"file://{tmp_path}/store")
    assert steps_uploaded(store) == [1, 2, 3, 4]
    assert len(store.sizes("segments")) == 4
    for name in store.sizes():
        assert store.read(name) == (tmp_path / "run" / name).read_bytes()
    measured = gather_measurements(settings.staging, settings.run_id, 1, ended="").samples
    assert measured["segments_upload_bytes"] == tuple(store.sizes("segments").values())
    (snapshot,) = measured["snapshots_upload_bytes"]
    assert snapshot == store.sizes()["snapshots/i000000-s0000000003/rank-0000.safetensors"]
    assert all(
        s > 0 for kind in ("segments", "snapshots") for s in measured[f"{kind}_upload_seconds"]
    )
    assert writer.read_status().remote_bytes == sum(
        size for name, size in store.sizes().items() if name != "run.json"
    ) - len(store.read("snapshots/i000000-s0000000003/rank-0000.json"))


def test_a_restarted_writer_uploads_the_rest_and_nothing_twice(tmp_path: Path) -> None:
    settings = settings_with_store(tmp_path)
    log = log_of(settings)
    with writing(replace(settings, store=None)) as writer:
        for step in (1, 2, 3):
            append(log, step)
        wait_until(writer, lambda status: status.durable_step == 3)
    with writing(settings) as writer:
        wait_until(writer, lambda status: status.remote_step == 3)
        append(log, 4)
    with writing(settings) as writer:
        wait_until(writer, lambda status: status.remote_step == 4)
        append(log, 5)
    assert steps_uploaded(ObjectStore(f"file://{tmp_path}/store")) == [1, 2, 3, 4, 5]


def test_a_run_that_is_collected_meanwhile_is_no_trouble(tmp_path: Path) -> None:
    settings = settings_with_store(tmp_path)
    with writing(settings) as writer:
        log = log_of(settings)
        for step in (1, 2):
            append(log, step)
            wait_until(writer, has_uploaded(step))
        stage_snapshot(log, 2, 10)
        wait_until(writer, lambda status: status.remote_snapshot == 2)
        next((tmp_path / "run").rglob("*.seg")).unlink()
        append(log, 3)
        status = wait_until(writer, lambda status: status.remote_step == 3)
        assert not status.remote_error


def test_a_dead_store_delays_a_writers_end_only_so_long(
    tmp_path: Path, server: S3Server, caplog: pytest.LogCaptureFixture
) -> None:
    settings = settings_in(
        tmp_path, store=server.url("dead"), store_timeout_seconds=0.5, batch_size=1
    )
    log = log_of(settings)
    with server.away():
        writer = WriterProcess(settings)
        append(log, 1)
        wait_until(writer, lambda status: status.remote_error)
        status = writer.finish(20.0)
    assert status.closed
    assert status.durable_step == 1
    assert status.remote_step == -1
    assert "error sending request" in status.remote_error
    assert "lacks the steps after -1" in caplog.text
    # What stayed behind is uploaded by whoever comes next.
    again = replace(settings, incarnation=1, base_step=1, segment_seconds=0.0)
    again.staging.root.mkdir(parents=True)
    append(log_of(again), 2)
    with writing(again) as writer:
        wait_until(writer, lambda status: status.remote_step == 2)
    assert steps_uploaded(ObjectStore(server.url("dead"))) == [1, 2]


def test_a_writer_that_only_uploads_is_not_waited_for(tmp_path: Path, server: S3Server) -> None:
    settings = settings_in(tmp_path, store=server.url("slow"), batch_size=1)
    log = log_of(settings)
    with server.away():
        writer = WriterProcess(settings)
        append(log, 1)
        writer.orphan()  # the trainer dies
        wait_until(writer, lambda status: status.closed)
        lock = FileLock(settings.staging.writer_lock)
        assert lock.acquire("the next incarnation", timeout_seconds=5.0)
        assert is_alive(writer.pid)
        lock.release()
    wait_until(writer, lambda _: not is_alive(writer.pid))  # the store is back within its patience
    assert steps_uploaded(ObjectStore(server.url("slow"))) == [1]


def test_another_run_at_the_url_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    store = ObjectStore(f"file://{tmp_path}/store")
    store.create("run.json", b"{}")
    settings = settings_with_store(tmp_path)
    with writing(settings) as writer:
        append(log_of(settings), 1)
        wait_until(writer, lambda status: "holds another history" in status.remote_error)
        wait_until(writer, lambda status: status.durable_step == 1)
    assert store.sizes() == {"run.json": 2}


def test_a_request_whose_answer_is_lost_is_no_other_history(
    tmp_path: Path, server: S3Server
) -> None:
    settings = settings_in(tmp_path, store=server.url("lost"), batch_size=1, segment_seconds=0.0)
    seen: set[str] = set()

    def first_time(method: str, name: str) -> bool:
        is_first = method == "PUT" and name not in seen
        seen.add(name)
        return is_first

    server.lost = first_time
    log = log_of(settings)
    with writing(settings) as writer:
        for step in (1, 2):
            append(log, step)
            status = wait_until(writer, has_uploaded(step))
        assert not status.remote_error
    server.forget()
    assert steps_uploaded(ObjectStore(server.url("lost"))) == [1, 2]


def test_steps_that_only_a_snapshot_leads_to_count_when_it_is_there(
    tmp_path: Path, server: S3Server
) -> None:
    """A gap: retention collected here what the store, which was away, never got."""
    settings = settings_in(tmp_path, store=server.url("gap"), batch_size=1, segment_seconds=0.0)
    log, store = log_of(settings), ObjectStore(settings.store or "")
    with writing(settings) as writer:
        append(log, 1)
        wait_until(writer, has_uploaded(1))
        with server.away():
            append(log, 2)
            wait_until(writer, lambda status: status.remote_error)  # it has tried to send step 2
            wait_until(writer, lambda status: status.durable_step == 2)
            append(log, 3)
            stage_snapshot(log, 3, 10)
            wait_until(writer, lambda status: status.durable_snapshot == 3)
            append(log, 4)
            wait_until(writer, lambda status: status.durable_step == 4)
            (tmp_path / "run/segments/rank-0000/i000000-s0000000003.seg").unlink()
            server.throttled = lambda method, name: "snapshots" in name
        wait_until(writer, lambda status: steps_uploaded(store) == [1, 2, 4])
        assert writer.read_status().remote_step == 2
        server.forget()
        wait_until(writer, has_uploaded(4))


@pytest.mark.slow
def test_a_segment_goes_to_the_store_when_it_is_old_or_long_enough(tmp_path: Path) -> None:
    settings = settings_in(
        tmp_path, store=f"file://{tmp_path}/store", batch_size=1, segment_seconds=3.0
    )
    log, store = log_of(settings), ObjectStore(f"file://{tmp_path}/store", make=True)
    with writing(settings) as writer:
        for step in (1, 2, 3):
            append(log, step)
        wait_until(writer, lambda status: status.durable_step == 3)
        assert not store.sizes("segments"), "it still grows"
        wait_until(writer, has_uploaded(3))
        assert list(store.sizes("segments")) == ["segments/rank-0000/i000000-s0000000001.seg"]
    assert settings.segment_bytes == 16 << 20
    assert replace(settings, store=None).segment_bytes == 256 << 20


def test_a_segment_whose_writer_was_killed_is_uploaded_as_it_is(tmp_path: Path) -> None:
    settings = settings_in(tmp_path, store=f"file://{tmp_path}/store", batch_size=1)
    log, store = log_of(settings), ObjectStore(f"file://{tmp_path}/store", make=True)
    writer = WriterProcess(settings)
    for step in (1, 2):
        append(log, step)
    wait_until(writer, lambda status: status.durable_step == 2)
    writer.stop()
    (path,) = (tmp_path / "run").rglob("*.seg")
    with path.open("ab") as file:
        file.write(b"torn")
    with writing(settings) as another:
        append(log, 3)
        wait_until(another, has_uploaded(2))
    assert steps_uploaded(store) == [1, 2, 3]
    assert store.read(settings.folder.name(path)) == path.read_bytes()


def test_a_rank_uploads_what_it_makes_durable_for_one_that_is_elsewhere_now(
    tmp_path: Path,
) -> None:
    """The other rank's writer has a run folder of its own."""
    dead = settings_in(tmp_path, rank=1, world_size=2)
    log = log_of(dead)
    for step in range(1, 4):
        append(log, step)
    settings = settings_in(
        tmp_path, incarnation=1, world_size=2, base_step=3, store=f"file://{tmp_path}/store"
    )
    append(log_of(settings), 4)
    with writing(settings) as writer:
        wait_until(writer, lambda status: status.remote_step == 3)  # so all it builds on is there
        names = ObjectStore(settings.store or "").sizes("segments/rank-0001")
        assert list(names) == ["segments/rank-0001/i000000-s0000000001.seg"]
