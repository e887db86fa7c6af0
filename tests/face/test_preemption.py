"""SIGTERM and SIGUSR1: seen, passed on, agreed on by all ranks, and put back."""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import lowdiff
from lowdiff.compressors import TopK
from tests.face.loops import PATIENCE_SECONDS, Loop, small_model, wait_until
from tests.scenarios.pool import Pool

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


@pytest.fixture
def handlers() -> Iterator[dict[int, list[int]]]:
    """Handlers that were there first, and what they were called with."""
    calls: dict[int, list[int]] = {number: [] for number in SIGNALS}
    before = {number: signal.signal(number, lambda n, _: calls[n].append(n)) for number in SIGNALS}
    yield calls
    for number, handler in before.items():
        signal.signal(number, handler)


def patient(loop: Loop) -> Loop:
    """A loop whose batches never become full or late."""
    loop.checkpointer._settings = replace(
        loop.checkpointer._settings, batch_size=1000, flush_seconds=1000.0
    )
    return loop


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_flushes_the_tail_and_ends_nothing(
    tmp_path: Path, handlers: dict[int, list[int]], number: signal.Signals
) -> None:
    loop = patient(Loop(tmp_path))
    loop.attach()
    assert not loop.checkpointer.preempted
    for step in loop.checkpointer.steps(until=6):
        loop.step(step)
        if step == 3:
            assert loop.checkpointer.stats()["durable_step"] == 0
            os.kill(os.getpid(), number)
            wait_until(lambda: loop.checkpointer.preempted)
            wait_until(lambda: loop.checkpointer.stats()["durable_step"] == 3)
    # From then on no step waits for its batch to fill.
    wait_until(lambda: loop.checkpointer.stats()["durable_step"] == 6)
    loop.checkpointer.close()
    assert loop.checkpointer.preempted
    assert loop.checkpointer.stats()["preempted"]
    assert handlers[number] == [number]


def test_handlers_and_wakeup_descriptor_are_put_back(tmp_path: Path) -> None:
    signal.set_wakeup_fd(-1)
    before = [signal.getsignal(number) for number in SIGNALS]
    loop = Loop(tmp_path)
    loop.attach()
    assert all(signal.getsignal(n) is not b for n, b in zip(SIGNALS, before, strict=True))
    threads = set(threading.enumerate())
    loop.checkpointer.close()
    assert [signal.getsignal(number) for number in SIGNALS] == before
    assert signal.set_wakeup_fd(-1) == -1
    ended = {thread.name for thread in threads - set(threading.enumerate())}
    assert ended == {"lowdiff-lease", "lowdiff-signals"}


def test_a_handler_installed_later_stays_and_may_pass_signals_on(
    tmp_path: Path, handlers: dict[int, list[int]]
) -> None:
    loop = Loop(tmp_path)
    loop.attach()
    ours = signal.getsignal(signal.SIGTERM)
    assert callable(ours)
    passed: Callable[..., Any] = ours

    def theirs(number: int, frame: Any) -> None:
        passed(number, frame)

    signal.signal(signal.SIGTERM, theirs)
    loop.checkpointer.close()
    assert signal.getsignal(signal.SIGTERM) is theirs
    os.kill(os.getpid(), signal.SIGTERM)
    assert handlers[signal.SIGTERM] == [signal.SIGTERM]
    assert not loop.checkpointer.preempted
    signal.set_wakeup_fd(-1)  # what was left in place for `theirs`


@pytest.mark.parametrize("asyncio_first", [True, False])
def test_asyncio_sees_its_signals_once_and_so_do_we(tmp_path: Path, asyncio_first: bool) -> None:
    seen: list[str] = []

    async def train() -> None:
        loop = Loop(tmp_path)
        events = asyncio.get_running_loop()
        if not asyncio_first:
            loop.attach()
        events.add_signal_handler(signal.SIGUSR2, lambda: seen.append("SIGUSR2"))
        if asyncio_first:
            events.add_signal_handler(signal.SIGTERM, lambda: seen.append("SIGTERM"))
            loop.attach()
        os.kill(os.getpid(), signal.SIGUSR2)
        os.kill(os.getpid(), signal.SIGTERM)
        expected = ["SIGTERM", "SIGUSR2"] if asyncio_first else ["SIGUSR2"]
        deadline = time.monotonic() + PATIENCE_SECONDS
        while sorted(seen) != expected or not loop.checkpointer.preempted:
            assert time.monotonic() < deadline, seen
            await asyncio.sleep(0.002)
        await asyncio.sleep(0.05)  # a second call would be here by now
        loop.checkpointer.close()
        os.kill(os.getpid(), signal.SIGUSR2)
        while len(seen) == len(expected):
            assert time.monotonic() < deadline, seen
            await asyncio.sleep(0.002)
        assert sorted(seen) == [*expected, "SIGUSR2"]
        events.remove_signal_handler(signal.SIGUSR2)
        events.remove_signal_handler(signal.SIGTERM)

    asyncio.run(train())
    assert signal.set_wakeup_fd(-1) == -1


def test_attach_outside_the_main_thread_says_that_signals_are_not_seen(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = [signal.getsignal(number) for number in SIGNALS]
    loop = Loop(tmp_path)
    thread = threading.Thread(target=loop.run, args=(3,))
    thread.start()
    thread.join()
    assert caplog.text.count("attach() was not called from the main thread") == 1
    assert [signal.getsignal(number) for number in SIGNALS] == before
    assert loop.checkpointer.stats()["durable_step"] == 3


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_forked_child_dies_of_sigterm_and_its_parent_is_not_preempted(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    loop.attach()
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(100,))
    child.start()
    child.terminate()
    child.join(PATIENCE_SECONDS)
    assert child.exitcode == -signal.SIGTERM
    os.kill(os.getpid(), 0)
    assert not loop.checkpointer.preempted
    # The child took nothing with it.
    os.kill(os.getpid(), signal.SIGUSR1)
    wait_until(lambda: loop.checkpointer.preempted)
    loop.checkpointer.close()


def leave_when_preempted(rank: int, world_size: int, folder: str) -> tuple[int, bool]:
    """Train; rank 1 alone is told to stop. Returns the steps made."""
    model = DistributedDataParallel(small_model())
    optimizer = torch.optim.AdamW(model.parameters())
    checkpointer = lowdiff.Checkpointer(
        Path(folder, "run"), staging=Path(folder, "staging"), compressor=TopK(0.05)
    )
    checkpointer.attach(model, optimizer)
    for step in checkpointer.steps(until=50):
        model(torch.full((4, 20), step + 1.0)).square().mean().backward()
        optimizer.step()
        if step == 4 and rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        if checkpointer.preempted:
            break
    checkpointer.close()
    return checkpointer.stats()["committed_step"], checkpointer.preempted


def test_all_ranks_leave_the_loop_at_the_same_step(tmp_path: Path, pool: Pool) -> None:
    results = pool.run(leave_when_preempted, 3, str(tmp_path))
    assert len(set(results)) == 1
    step, preempted = results[0]
    assert preempted
    assert 5 < step < 50
    assert lowdiff.recover(tmp_path / "run", staging=tmp_path / "none").step == step


def test_the_record_of_the_signal_names_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loop = Loop(tmp_path)
    with caplog.at_level(logging.INFO, "lowdiff"):
        loop.attach()
        os.kill(os.getpid(), signal.SIGTERM)
        wait_until(lambda: any(getattr(r, "event", "") == "preempted" for r in caplog.records))
        loop.checkpointer.close()
    events = {getattr(record, "event", ""): record for record in caplog.records}
    assert vars(events["preempted"])["signal"] == "SIGTERM"
    assert vars(events["attached"])["step"] == 0
    assert events["closed"].getMessage().endswith("[event=closed rank=0 step=0]")
