"""Staging that somebody removes is named once, and training neither stops nor waits for it."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lowdiff.errors import StorageError
from tests.crash.test_staging_removed import remove_tree
from tests.unit.loops import Loop, wait_until

STRATEGIES: dict[str, dict[str, Any]] = {"log": {}, "replica": {"compressor": None}}


def begun(folder: Path, **settings: Any) -> Loop:
    loop = Loop(folder, settings=settings)
    loop.attach()
    for number in range(3):
        loop.step(number)
        loop.checkpointer.commit()
    return loop


def own_folder(loop: Loop) -> Path:
    (own,) = (loop.folder / "staging").glob("*/i*")
    return own


def events(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [getattr(r, "event", "") for r in caplog.records if r.levelno >= logging.WARNING]


@pytest.mark.slow
@pytest.mark.parametrize("on_error", ["warn", "raise"])
@pytest.mark.parametrize("backpressure", ["block", "degrade"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_it_is_named_once_and_nothing_else_goes_wrong(
    tmp_path: Path,
    strategy: str,
    backpressure: str,
    on_error: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    settings = {"backpressure": backpressure, "on_error": on_error}
    loop = begun(tmp_path, **STRATEGIES[strategy], **settings)
    for number in range(3, 30):
        if number in (8, 15):
            remove_tree(own_folder(loop))
        loop.step(number)
        loop.checkpointer.commit()
    wait_until(lambda: loop.checkpointer.stats()["durable_step"] > 15)
    weights = loop.weights()
    loop.checkpointer.close()
    assert events(caplog) == ["staging_removed"] * 2
    again = Loop(tmp_path, settings=STRATEGIES[strategy])
    assert again.attach() == 30
    assert all((value == weights[name]).all() for name, value in again.weights().items())
    again.checkpointer.close()


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("strategy", "file"),
    [("log", "trainer"), ("replica", "trainer"), ("replica", "replica"), ("replica", "replica-*")],
)
def test_the_next_commit_notices_that_a_single_file_was_removed(
    tmp_path: Path, strategy: str, file: str, caplog: pytest.LogCaptureFixture
) -> None:
    loop = begun(tmp_path, **STRATEGIES[strategy])
    own = own_folder(loop)
    wait_until(lambda: loop.checkpointer.stats().get("replica_step", 3) == 3)
    for path in [p for p in own.glob(file) if p.suffix == ""]:
        path.unlink()
    for number in range(3, 5):
        loop.step(number)
        loop.checkpointer.commit()
    assert events(caplog).count("staging_removed") == 1
    loop.checkpointer.close()
    again = Loop(tmp_path, settings=STRATEGIES[strategy])
    assert again.attach() == 5
    again.checkpointer.close()


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_training_that_waits_goes_on(
    tmp_path: Path, strategy: str, limits: Callable[..., None]
) -> None:
    limits(drain_seconds=0.5)
    loop = begun(tmp_path, batch_size=1, snapshot_every=2, **STRATEGIES[strategy])
    os.kill(loop.checkpointer.stats()["writer_pid"], signal.SIGSTOP)
    own = own_folder(loop)
    removal = threading.Timer(1.0, remove_tree, [own])
    removal.start()
    began = time.monotonic()
    for number in range(3, 15):
        loop.step(number)
        loop.checkpointer.commit()
    removal.join()
    assert 1.0 < time.monotonic() - began < 20.0  # it waited, and no longer than for the removal
    loop.checkpointer.close()
    again = Loop(tmp_path, settings=STRATEGIES[strategy])
    assert again.attach() == 15
    again.checkpointer.close()


@pytest.mark.slow
def test_lost_steps_are_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    loop = begun(tmp_path, batch_size=64)
    os.kill(loop.checkpointer.stats()["writer_pid"], signal.SIGKILL)
    remove_tree(own_folder(loop))
    for number in range(3, 9):
        loop.step(number)
        loop.checkpointer.commit()
    wait_until(lambda: loop.checkpointer.stats()["durable_step"] > 5)
    loop.checkpointer.close()
    assert "steps 1 to 3 cannot be recovered" in caplog.text
    assert events(caplog).count("staging_removed") == 1
    assert "step_lost" not in events(caplog)


def test_staging_that_cannot_be_made_again_is_an_error_that_says_so(tmp_path: Path) -> None:
    loop = begun(tmp_path)
    staging = tmp_path / "staging"
    remove_tree(staging)
    staging.write_text("no folder")
    loop.step(3)
    with pytest.raises(StorageError, match="cannot be made again"):
        loop.checkpointer.commit()
    staging.unlink()
    loop.checkpointer.close()
    again = Loop(tmp_path)
    assert again.attach() == 4
    again.checkpointer.close()


def test_several_steps_of_a_body_are_covered_as_well(tmp_path: Path) -> None:
    loop = begun(tmp_path, compressor=None, optimizer_steps="any")
    for number in range(3, 9):
        loop.step(number)
        if number == 5:
            remove_tree(own_folder(loop))
        loop.step(number)
        loop.checkpointer.commit()
    loop.checkpointer.close()
    again = Loop(tmp_path, settings={"compressor": None, "optimizer_steps": "any"})
    assert again.attach() == 9
    again.checkpointer.close()
