from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.crash.pool import JobFailed, Pool


@pytest.fixture(scope="module")
def small() -> Iterator[Pool]:
    made = Pool(2)
    yield made
    made.close()


def rank_of(rank: int, world_size: int) -> int:
    return rank


def wait_forever(rank: int, world_size: int, waits: str) -> None:
    if rank == 1:
        Path(waits).touch()
        threading.Event().wait()


def raise_on_first(rank: int, world_size: int, waits: str) -> None:
    if rank == 0:
        raise ValueError("of rank 0")
    wait_forever(rank, world_size, waits)


def die(rank: int, world_size: int, met: str) -> None:
    dist.barrier()
    if rank == 0:
        Path(met).touch()
    else:
        while not Path(met).exists():  # else the other one may wait for it for ever
            time.sleep(0.01)
        os._exit(3)


def test_a_job_past_its_time_limit_shows_where_it_stood_and_costs_no_later_one(
    small: Pool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    waits = tmp_path / "waits"

    def end(*_: Any) -> None:
        raise TimeoutError

    def end_later() -> None:
        while not waits.exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGUSR2)

    before = signal.signal(signal.SIGUSR2, end)
    threading.Thread(target=end_later, daemon=True).start()
    try:
        with pytest.raises(TimeoutError):
            small.run(wait_forever, 2, str(waits))
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert "in wait_forever" in capsys.readouterr().err
    assert small.run(rank_of, 2) == [0, 1]


@pytest.mark.slow
def test_a_process_that_died_is_replaced(small: Pool, tmp_path: Path) -> None:
    with pytest.raises(JobFailed, match="ended without an answer"):
        small.run(die, 2, str(tmp_path / "met"))
    assert small.run(rank_of, 2) == [0, 1]


@pytest.mark.slow
def test_nobody_is_waited_for_who_waits_for_a_rank_that_raised(
    small: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.crash.pool._PATIENCE_SECONDS", 1.0)
    with pytest.raises(JobFailed, match="of rank 0"):
        small.run(raise_on_first, 2, str(tmp_path / "waits"))
    assert small.run(rank_of, 2) == [0, 1]
