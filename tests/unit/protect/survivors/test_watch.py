"""When ranks are taken to hang, and what the thread does then."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import lowdiff
from lowdiff.compressors import TopK
from lowdiff.core.waiting import wait_for_ranks
from lowdiff.errors import ConfigError
from lowdiff.protect.survivors.watch import Pace
from tests.unit.loops import Loop, wait_until

SURVIVORS: dict[str, Any] = {"compressor": None, "strategy": "survivors"}


def train(loop: Loop, at: int, after: Callable[[], object]) -> None:
    with loop.checkpointer:
        loop.attach()
        for number in loop.checkpointer.steps(at + 1):
            if number == at:
                after()
                raise ZeroDivisionError
            loop.step(number)


def fails(loop: Loop, *, at: int, after: Callable[[], object] = int) -> None:
    """Train, and end with an error in a body, after something."""
    with pytest.raises(ZeroDivisionError):
        train(loop, at, after)


def test_a_hang_is_twenty_steps_and_at_least_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    pace = Pace(None, 0)
    now[0] = 1e6
    assert not pace.is_over  # the first step may compile
    pace.count(1)
    for step in range(2, 100):
        now[0] += 5.0
        pace.count(step)
    now[0] += 99.0
    assert not pace.is_over
    now[0] += 2.0
    assert pace.is_over
    with pace.pause():
        assert not pace.is_over
    assert not pace.is_over
    quick = Pace(None, 0)
    quick.count(1)
    now[0] += 59.0
    assert not quick.is_over
    now[0] += 2.0
    assert quick.is_over


def test_seconds_that_the_user_gave_count(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    pace = Pace(3.0, 0)
    pace.count(1)
    now[0] += 2.9
    assert not pace.is_over
    now[0] += 0.2
    assert pace.is_over


def test_an_error_that_ends_the_training_saves_the_last_step(tmp_path: Path) -> None:
    loop = Loop(tmp_path, settings=SURVIVORS)
    fails(loop, at=7)
    weights = loop.weights()
    again = Loop(tmp_path, settings=SURVIVORS)
    assert again.attach() == 7
    assert all(torch.equal(value, weights[name]) for name, value in again.weights().items())
    again.checkpointer.close()


def test_a_process_that_ends_without_close_saves_the_last_step(tmp_path: Path) -> None:
    loop = Loop(tmp_path, settings=SURVIVORS)
    loop.attach()
    for number in range(3):
        loop.step(number)
        loop.checkpointer.commit()
    sys.excepthook(ValueError, ValueError("the loop is wrong"), None)
    loop.die()
    again = Loop(tmp_path, settings=SURVIVORS)
    assert again.attach() == 3
    again.checkpointer.close()


def test_a_kill_of_all_goes_back_to_the_last_snapshot(tmp_path: Path) -> None:
    loop = Loop(tmp_path, settings=SURVIVORS)
    loop.attach()
    for number in range(8):
        loop.step(number)
        loop.checkpointer.commit()
    wait_until(lambda: loop.checkpointer.stats()["durable_snapshot"] == 5)
    loop.die()
    again = Loop(tmp_path, settings=SURVIVORS)
    assert again.attach() == 5
    again.checkpointer.close()


def test_a_body_that_has_stepped_is_not_saved_half(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loop = Loop(tmp_path, settings=SURVIVORS)
    fails(loop, at=7, after=lambda: loop.step(7))
    assert "LD802" in caplog.text
    assert "the open body's optimizers have stepped" in caplog.text
    again = Loop(tmp_path, settings=SURVIVORS)
    assert again.attach() == 5
    again.checkpointer.close()


def test_parameters_that_something_else_wrote_are_not_saved(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loop = Loop(tmp_path, settings=SURVIVORS)

    def evaluate() -> None:  # with other weights
        with torch.no_grad():
            next(iter(loop.model.parameters())).zero_()

    fails(loop, at=7, after=evaluate)
    assert "were written since the last commit, by no optimizer" in caplog.text


def test_a_rank_that_only_computes_does_not_hang(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loop = Loop(tmp_path, settings={**SURVIVORS, "hang_seconds": 0.3})
    loop.attach()
    for number in range(3):
        loop.step(number)
        loop.checkpointer.commit()
        time.sleep(0.3)
    time.sleep(0.8)
    assert "LD804" not in caplog.text
    loop.checkpointer.close()


@pytest.mark.slow
def test_a_rank_that_waits_for_others_hangs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loop = Loop(tmp_path, settings={**SURVIVORS, "hang_seconds": 0.3})
    loop.attach()
    for number in range(3):
        loop.step(number)
        loop.checkpointer.commit()
        time.sleep(0.3)
    with loop.checkpointer.pause_watch():
        wait_for_ranks(time.sleep, 0.8)
    assert "LD804" not in caplog.text
    time.sleep(0.8)  # a rank may evaluate, or read data, for as long as it likes
    assert "LD804" not in caplog.text
    wait_for_ranks(wait_until, lambda: "LD804" in caplog.text and "LD801" in caplog.text)
    # A false alarm harms nobody.
    loop.step(3)
    loop.checkpointer.commit()
    weights = loop.weights()
    loop.checkpointer.close()
    again = Loop(tmp_path, settings=SURVIVORS)
    assert again.attach() == 4
    assert all(torch.equal(value, weights[name]) for name, value in again.weights().items())
    again.checkpointer.close()


def test_hooks_and_threads_go_with_the_checkpointer(tmp_path: Path) -> None:
    before, threads = sys.excepthook, threading.active_count()
    loop = Loop(tmp_path, settings=SURVIVORS)
    loop.attach()
    assert sys.excepthook != before
    loop.step(0)
    loop.checkpointer.commit()
    loop.checkpointer.close()
    assert sys.excepthook == before
    wait_until(lambda: threading.active_count() <= threads)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"strategy": "log"}, "needs a compressor"),
        ({"strategy": "peers"}, "strategy is one of"),
        ({"strategy": "survivors", "snapshot_every": "auto"}, 'are for strategy "log"'),
        ({"strategy": "survivors", "on_hang": "ask"}, "on_hang is one of"),
    ],
)
def test_what_cannot_work_is_refused(tmp_path: Path, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        lowdiff.Checkpointer(tmp_path, **settings)


def test_a_compressor_does_not_go_with_survivors(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="give no compressor"):
        lowdiff.Checkpointer(tmp_path, strategy="survivors", compressor=TopK(0.1))
