"""A writer that is started before anybody needs it."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from lowdiff.persistence.writer.handle import WaitingWriter, WriterProcess
from tests.processes import is_alive
from tests.unit.persistence.writers import PATIENCE_SECONDS, append, log_of, settings_in, stored


def ended(pid: int) -> bool:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while is_alive(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    return not is_alive(pid)


@pytest.mark.parametrize("dies", [False, True])
def test_it_takes_the_place_of_one_that_is_started_where_it_lives(
    tmp_path: Path, dies: bool
) -> None:
    waiting = WaitingWriter()
    waiting.prepare()
    waiting.prepare()
    pid = waiting.pid
    assert pid is not None
    if dies:
        os.kill(pid, signal.SIGKILL)
        assert ended(pid)
    settings = settings_in(tmp_path)
    log = log_of(settings)
    writer = WriterProcess(settings, waiting)
    try:
        assert (writer.pid == pid) is not dies
        append(log, 1)
        assert writer.finish(PATIENCE_SECONDS).durable_step == 1
        assert stored(settings.folder) == [1]
    finally:
        waiting.close()


def test_it_ends_when_it_is_closed_and_when_nobody_needs_it() -> None:
    waiting = WaitingWriter()
    waiting.prepare()
    pid = waiting.pid
    assert pid is not None
    assert is_alive(pid)
    waiting.close()
    assert ended(pid)
    waiting.prepare()
    assert waiting.pid is None


def test_it_ends_with_its_trainer() -> None:
    pid_of_writer, told = os.pipe()
    trainer = os.fork()
    if trainer == 0:
        waiting = WaitingWriter()
        waiting.prepare()
        assert waiting.pid is not None
        os.write(told, b"%d" % waiting.pid)
        os._exit(0)
    os.waitpid(trainer, 0)
    assert ended(int(os.read(pid_of_writer, 64)))
