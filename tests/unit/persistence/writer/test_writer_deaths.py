"""A writer that dies again and again is trouble, is said with its reasons, and is not hurried."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from lowdiff.errors import WriterFailed
from lowdiff.persistence.files.detached_process import Deaths, how_it_ended
from lowdiff.persistence.writer import handle as writer_process
from lowdiff.persistence.writer.handle import WriterProcess
from tests.processes import is_alive
from tests.unit.persistence.writers import (
    PATIENCE_SECONDS,
    append,
    attended,
    log_of,
    settings_in,
    stored,
    wait_until,
    writing,
)


@pytest.fixture(autouse=True)
def hurried(limits: Callable[..., None]) -> None:
    limits(process_check_seconds=0.02, restart_backoff_seconds=0.1)


def kill(writer: WriterProcess) -> None:
    os.kill(writer.pid, signal.SIGKILL)
    while is_alive(writer.pid):
        time.sleep(0.005)


def test_a_writer_that_dies_at_every_start_is_an_error_until_it_gets_something_done(
    tmp_path: Path,
) -> None:
    settings = settings_in(tmp_path, batch_size=1)
    log = log_of(settings)
    with writing(settings) as writer:
        append(log, 1)
        wait_until(writer, lambda s: s.durable_step == 1)
        (tmp_path / "run").rename(tmp_path / "away")
        kill(writer)
        append(log, 2)
        status = wait_until(writer, lambda s: s.error)
        assert writer.read_status() == status
        assert status.durable_step == 1
        beginning = f"the writer keeps dying (exit code 1); {settings.staging.writer_log} ends: "
        assert status.error.startswith(beginning)
        assert status.error.endswith("run.json is gone; bring the run folder back, or mount it")
        assert "\n" not in status.error
        (tmp_path / "away").rename(tmp_path / "run")
        status = wait_until(writer, lambda s: s.durable_step == 2)
        assert wait_until(writer, lambda s: not s.error).durable_step == 2
    assert stored(settings.folder) == [1, 2]


def test_such_a_writer_is_started_ever_more_rarely(
    tmp_path: Path, limits: Callable[..., None]
) -> None:
    limits(restart_backoff_seconds=2.0)
    settings = settings_in(tmp_path)
    with writing(settings) as writer:
        kill(writer)
        wait_until(writer, lambda _: writer.restarts == 1)
        kill(writer)
        wait_until(writer, lambda _: writer.restarts == 2)
        began = time.monotonic()
        kill(writer)
        status = wait_until(writer, lambda s: s.error)
        assert "signal 9: Killed, mostly the out-of-memory killer" in status.error
        wait_until(writer, lambda _: writer.restarts == 3)
        assert time.monotonic() - began > 1.5
        assert attended(writer).error, "that it was started says nothing"


def test_the_end_of_a_life_waits_for_no_back_off(
    tmp_path: Path, limits: Callable[..., None]
) -> None:
    limits(restart_backoff_seconds=1000.0)
    settings = settings_in(tmp_path)
    log = log_of(settings)
    writer = WriterProcess(settings)
    append(log, 1)
    while not attended(writer).error:
        kill(writer) if is_alive(writer.pid) else time.sleep(0.01)
    assert writer.finish(PATIENCE_SECONDS).closed
    assert stored(settings.folder) == [1]


def test_a_writer_that_cannot_be_started_again_is_tried_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    settings = settings_in(tmp_path)
    log = log_of(settings)
    with writing(settings) as writer:

        def refuse(*arguments: object, **environment: str) -> subprocess.Popen[bytes]:
            raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

        with monkeypatch.context() as patch:
            patch.setattr(writer_process, "start_detached", refuse)
            kill(writer)
            append(log, 1)
            status = wait_until(writer, lambda s: s.error)
            assert "keeps dying (it cannot be started: [Errno 11] Resource temp" in status.error
            assert "rank 0: the writer cannot be started now" in caplog.text
            assert writer.restarts == 0
            writer.set_batch_size(1)
        wait_until(writer, lambda s: s.durable_step == 1 and not s.error)
        assert writer.restarts == 1


def test_without_any_process_the_end_is_an_error_that_says_where_the_steps_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = settings_in(tmp_path)
    append(log_of(settings), 1)
    writer = WriterProcess(settings)

    def refuse(*arguments: object, **environment: str) -> subprocess.Popen[bytes]:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr(writer_process, "start_detached", refuse)
    kill(writer)
    with pytest.raises(WriterFailed, match="nothing is lost: the next attach adopts"):
        writer.finish(PATIENCE_SECONDS)


def test_deaths_are_an_accident_as_long_as_something_is_done_in_between(
    tmp_path: Path, limits: Callable[..., None]
) -> None:
    limits(restart_backoff_seconds=1.0)
    deaths = Deaths("the writer", tmp_path / "no such log", 0)
    for done in range(20):
        deaths.take_progress([done, -1])
        assert deaths.count("exit code 3", [done, -1]) == 0.0
        assert not deaths.error
    # As far as a successor is that has not found out yet where it begins.
    delays = [deaths.count("exit code 3", [5, -1]) for _ in range(2000)]
    assert delays[:8] == [0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]
    assert delays[-1] == 30.0
    assert deaths.successor(3, [5, -1], lambda: pytest.fail("it is not time")) is None
    assert deaths.error.startswith("the writer keeps dying (exit code 3); ")
    deaths.take_progress([19, -1])
    assert deaths.error
    deaths.take_progress([19, 0])
    assert not deaths.error
    assert deaths.count("exit code 3", [19, 0]) == 0.0


@pytest.mark.parametrize(
    ("text", "quoted"),
    [
        (b"", "empty"),
        (b"one\n\n  two \nthree\nfour\n", "two | three | four"),
        (b"\xff" + b"x" * 10_000, "x" * 500),
    ],
)
def test_the_end_of_the_log_is_quoted_as_one_line(tmp_path: Path, text: bytes, quoted: str) -> None:
    log = tmp_path / "writer.log"
    log.write_bytes(text)
    deaths = Deaths("the writer", log, 0)
    for _ in range(3):
        deaths.count("exit code 1", [0])
    assert deaths.error == f"the writer keeps dying (exit code 1); {log} ends: {quoted}"


def test_how_a_process_ended_is_said_in_words() -> None:
    assert how_it_ended(7) == "exit code 7"
    assert how_it_ended(-signal.SIGSEGV) == "signal 11: Segmentation fault"
    assert how_it_ended(-40).startswith("signal 40: ")
