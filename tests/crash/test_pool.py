from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from tests.crash.pool import Pool


@pytest.fixture(scope="module")
def small() -> Iterator[Pool]:
    made = Pool(2)
    yield made
    made.close()


def rank_of(rank: int, world_size: int) -> int:
    return rank


def wait_forever(rank: int, world_size: int) -> None:
    if rank == 1:
        threading.Event().wait()


def die(rank: int, world_size: int) -> None:
    if rank == 1:
        os._exit(3)


def test_a_job_past_its_time_limit_shows_where_it_stood_and_costs_no_later_one(
    small: Pool, capsys: pytest.CaptureFixture[str]
) -> None:
    def end(*_: Any) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGUSR2, end)
    timer = threading.Timer(2.0, os.kill, [os.getpid(), signal.SIGUSR2])
    timer.start()
    try:
        with pytest.raises(TimeoutError):
            small.run(wait_forever, 2)
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert "in wait_forever" in capsys.readouterr().err
    assert small.run(rank_of, 2) == [0, 1]


def test_a_process_that_died_is_replaced(small: Pool) -> None:
    with pytest.raises(EOFError):
        small.run(die, 2)
    assert small.run(rank_of, 2) == [0, 1]
