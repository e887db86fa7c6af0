"""Writers and replicas that die again and again: training says so, or raises, and goes on later."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

import lowdiff
from lowdiff import testing
from lowdiff.errors import WriterFailed
from lowdiff.persistence.files.detached_process import start_detached
from lowdiff.recovery.replica import handle as replica_process
from tests.unit.loops import Loop, wait_until


@pytest.fixture(autouse=True)
def hurried(limits: Callable[..., None]) -> None:
    limits(process_check_seconds=0.02, restart_backoff_seconds=0.1)


def begun(folder: Path, **settings: object) -> Loop:
    """A run of a step, whose writer is dead and finds no run folder when it is started again."""
    loop = Loop(folder, settings={"batch_size": 1, **settings})
    loop.attach()
    loop.step(0)
    loop.checkpointer.commit()
    wait_until(lambda: loop.checkpointer.stats()["durable_step"] == 1)
    (folder / "run").rename(folder / "away")
    os.kill(loop.checkpointer.stats()["writer_pid"], signal.SIGKILL)
    return loop


def test_a_writer_that_keeps_dying_is_raised_instead_of_waited_for(tmp_path: Path) -> None:
    loop = begun(tmp_path, on_error="raise")
    said = r"rank 0 reports: the writer keeps dying \(exit code 1\).*run\.json is gone"
    step = 0

    def train() -> None:
        nonlocal step
        while True:  # until two steps are at risk, and then it waits
            loop.step(step + 1)
            loop.checkpointer.commit()
            step += 1

    with pytest.raises(WriterFailed, match=said):
        train()
    (tmp_path / "away").rename(tmp_path / "run")
    testing.wait_until(loop.checkpointer, lambda stats: not stats["writer_error"])
    loop.checkpointer.commit()
    loop.checkpointer.close()
    assert lowdiff.recover(tmp_path / "run").step == step + 2


def test_a_writer_that_keeps_dying_is_said_where_training_waits(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loop = begun(tmp_path)
    with caplog.at_level(logging.INFO, "lowdiff"):
        for number in (1, 2):  # two at risk are allowed
            loop.step(number)
            loop.checkpointer.commit()
        testing.wait_until(loop.checkpointer, lambda stats: stats["writer_error"])
        (tmp_path / "away").rename(tmp_path / "run")
        for number in (3, 4):  # which waits until the first of them is durable
            loop.step(number)
            loop.checkpointer.commit()
        loop.checkpointer.close()
    said = [vars(record).get("event") for record in caplog.records]
    assert said.count("writer_restarted") >= 3
    assert said.index("writer_error") < said.index("writer_recovered")
    assert lowdiff.recover(tmp_path / "run").step == 5


@pytest.mark.slow
def test_a_replica_that_keeps_dying_is_trouble_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = Loop(tmp_path, settings={"compressor": None, "on_error": "raise"})
    loop.attach()
    steps = loop.checkpointer.steps(10_000)
    loop.step(next(steps))
    with monkeypatch.context() as broken:
        broken.setattr(
            replica_process,
            "start_detached",
            lambda module, settings, log: start_detached("lowdiff.no_such", settings, log),
        )
        os.kill(loop.checkpointer.stats()["replica_pid"], signal.SIGKILL)
        said = r"rank 0 reports: the replica keeps dying \(exit code 1\).*No module named"
        with pytest.raises(WriterFailed, match=said):
            list(map(loop.step, steps))
        assert "keeps dying" in loop.checkpointer.stats()["replica_error"]
    testing.wait_until(loop.checkpointer, lambda stats: not stats["replica_error"])
    loop.checkpointer.close()


@pytest.mark.cases(1)
@pytest.mark.parametrize("has_begun", [True, False], ids=["again", "at first"])
def test_a_replica_that_cannot_be_started_is_tried_later(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    has_begun: bool,
) -> None:
    loop = Loop(tmp_path, settings={"compressor": None})
    loop.attach()

    def refuse(*arguments: object) -> None:
        raise OSError(11, "Resource temporarily unavailable")

    steps = loop.checkpointer.steps(8)
    if has_begun:
        loop.step(next(steps))
    with monkeypatch.context() as broken:
        broken.setattr(replica_process, "start_detached", refuse)
        if has_begun:
            os.kill(loop.checkpointer.stats()["replica_pid"], signal.SIGKILL)
        for _ in range(2):
            loop.step(next(steps))
        testing.wait_until(loop.checkpointer, lambda stats: stats["replica_error"])
    assert "the replica cannot be started now" in caplog.text
    for step in steps:
        loop.step(step)
    testing.wait_until(
        loop.checkpointer, lambda stats: stats["replica_step"] == 8 and not stats["replica_error"]
    )
    loop.checkpointer.close()
    assert lowdiff.recover(tmp_path / "run").step == 8
