"""What is said when a trainer's end comes before its store has all."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from lowdiff.persistence.staging.log import StagingLog
from lowdiff.persistence.staging.settings import WriterSettings
from lowdiff.persistence.staging.status import WriterStatus
from lowdiff.persistence.writer.handle import WriterProcess, store_lacks
from tests.unit.persistence.s3_server import S3Server, running_server
from tests.unit.persistence.writers import (
    PATIENCE_SECONDS,
    append,
    log_of,
    settings_in,
    stage_snapshot,
    wait_until,
)

#: What is not over then is said: enough for a slow disk, which is not what is tested.
FINISH_SECONDS = 4.0


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with running_server() as made:
        yield made


@pytest.fixture
def slow(server: S3Server) -> Iterator[threading.Event]:
    """A healthy store that takes what is of step 2 only once this event is set."""
    is_over = threading.Event()

    def wait(method: str, name: str) -> None:
        if method in ("PUT", "POST") and "s0000000002" in name:
            is_over.wait(2 * FINISH_SECONDS + PATIENCE_SECONDS)

    server.requested = wait
    yield is_over
    is_over.set()
    server.forget()


def first_step(settings: WriterSettings, log: StagingLog) -> WriterProcess:
    """A writer whose store has step 1."""
    writer = WriterProcess(settings)
    append(log, 1)
    wait_until(writer, lambda status: status.remote_step == 1)
    return writer


@pytest.mark.slow
def test_an_upload_that_is_not_over_at_the_end_is_said(
    tmp_path: Path, server: S3Server, slow: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    """Or a container would end, and the node's disk go, with steps that are nowhere else."""
    settings = settings_in(tmp_path, store=server.url("steps"), batch_size=1, segment_seconds=0.0)
    log = log_of(settings)
    writer = first_step(settings, log)
    append(log, 2)
    status = writer.finish(FINISH_SECONDS)
    assert (status.closed, status.durable_step, status.remote_step) == (True, 2, 1)
    assert not status.remote_error
    (said,) = caplog.messages
    assert f"{settings.store} lacks the steps after 1, up to 2; the writer " in said
    assert f"(process {writer.pid}) still uploads from {settings.run}: " in said
    assert "keep this machine until it ends, or attach again here, which uploads the rest" in said
    caplog.clear()
    slow.set()
    assert writer.finish(PATIENCE_SECONDS).remote_step == 2
    assert not caplog.messages


@pytest.mark.slow
def test_a_last_snapshot_that_is_not_in_the_store_is_said(
    tmp_path: Path, server: S3Server, slow: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    settings = settings_in(
        tmp_path, store=server.url("snapshot"), batch_size=1, segment_seconds=0.0
    )
    log = log_of(settings)
    writer = first_step(settings, log)
    stage_snapshot(log, 2, 1000)
    status = writer.finish(FINISH_SECONDS)
    assert (status.remote_step, status.durable_snapshot, status.remote_snapshot) == (1, 2, -1)
    (said,) = caplog.messages
    assert "lacks the snapshot of step 2; the writer" in said
    caplog.clear()
    slow.set()
    assert writer.finish(PATIENCE_SECONDS).remote_snapshot == 2
    assert not caplog.messages


def test_nothing_is_said_of_a_store_that_has_all_nor_without_one(
    tmp_path: Path, server: S3Server, caplog: pytest.LogCaptureFixture
) -> None:
    settings = settings_in(
        tmp_path / "with", store=server.url("all"), batch_size=1, segment_seconds=0.0
    )
    assert first_step(settings, log_of(settings)).finish(PATIENCE_SECONDS).remote_step == 1
    settings = settings_in(tmp_path / "without")
    writer = WriterProcess(settings)
    append(log_of(settings), 1)
    assert writer.finish(PATIENCE_SECONDS).durable_step == 1
    assert not caplog.messages


@pytest.mark.parametrize(
    ("status", "said"),
    [
        (WriterStatus(5, remote_step=5), ""),
        (WriterStatus(5, remote_step=3), "may lack the steps after 3, up to 5; it is in "),
        (WriterStatus(5, remote_step=3, remote_error="no way"), "lacks the steps after 3, up to"),
        (WriterStatus(5, 4, remote_step=5), "may lack the snapshot of step 4; it is in "),
        (WriterStatus(5, 5, remote_step=3), "up to 5 and the snapshot of step 5; it is in "),
        (WriterStatus(5, remote_step=5, remote_error="no way"), "lacks some of what is durable"),
    ],
    ids=repr,
)
def test_what_a_writer_that_has_ended_left_out_is_for_the_next_attach(
    tmp_path: Path, status: WriterStatus, said: str
) -> None:
    settings = settings_in(tmp_path, store="s3://bucket/run")
    text = store_lacks(settings, status, None)
    assert said in text
    assert bool(text) == bool(said)
    assert text.endswith("uploads it: keep that folder until then" if said else "")
    assert store_lacks(replace(settings, store=None), status, None) == ""


def test_a_short_life_counts_its_steps_as_well(
    tmp_path: Path, server: S3Server, caplog: pytest.LogCaptureFixture
) -> None:
    """It is over before the first pass of snapshots, which says what its steps build on."""
    settings = settings_in(tmp_path, store=server.url("short"), batch_size=1, segment_seconds=0.0)
    server.requested = lambda method, name: time.sleep(0.2)
    writer = WriterProcess(settings)
    append(log_of(settings), 1)
    assert writer.finish(PATIENCE_SECONDS).remote_step == 1
    server.forget()
    assert not caplog.messages
