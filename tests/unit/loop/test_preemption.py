"""SIGTERM and SIGUSR1: seen, passed on, agreed on by all ranks, and put back."""

from __future__ import annotations

import asyncio
import gc
import logging
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import lowdiff
from lowdiff import testing
from lowdiff.commit.session import Session
from lowdiff.compressors import TopK
from lowdiff.errors import UsageError
from tests.crash.pool import Pool
from tests.processes import Script, run_file
from tests.unit.loops import PATIENCE_SECONDS, Loop, small_model, wait_until

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


@pytest.fixture
def handlers() -> Iterator[dict[int, list[int]]]:
    """Handlers that were there first, and what they were called with."""
    calls: dict[int, list[int]] = {number: [] for number in SIGNALS}
    before = {number: signal.signal(number, lambda n, _: calls[n].append(n)) for number in SIGNALS}
    yield calls
    for number, handler in before.items():
        signal.signal(number, handler)


def threads() -> list[threading.Thread]:
    """Threads that read signals."""
    return [thread for thread in threading.enumerate() if thread.name == "lowdiff-signals"]


def twins(folder: Path) -> tuple[Loop, Loop]:
    """Two runs in one process, the second attached in front of the first."""
    loops = Loop(folder / "first"), Loop(folder / "second")
    for loop in loops:
        loop.attach()
    return loops


def patient(loop: Loop) -> Loop:
    """A loop whose batches never become full or late."""
    testing.adjust(loop.checkpointer, batch_size=1000, flush_seconds=1000.0)
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
    loop, threads = Loop(tmp_path), set(threading.enumerate())
    loop.attach()
    assert all(signal.getsignal(n) is not b for n, b in zip(SIGNALS, before, strict=True))
    begun = set(threading.enumerate()) - threads
    ours = [thread for thread in begun if thread.name.startswith("lowdiff-")]
    loop.checkpointer.close()
    assert [signal.getsignal(number) for number in SIGNALS] == before
    assert signal.set_wakeup_fd(-1) == -1
    assert {thread.name for thread in ours} == {"lowdiff-lease", "lowdiff-signals"}
    for thread in ours:
        thread.join(PATIENCE_SECONDS)
        assert not thread.is_alive()


@pytest.mark.cases(1)
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_two_runs_of_a_process_share_the_handlers_and_may_be_closed_in_any_order(
    tmp_path: Path, handlers: dict[int, list[int]], order: tuple[int, int]
) -> None:
    before = [signal.getsignal(number) for number in SIGNALS]
    loops = twins(tmp_path)
    assert len(threads()) == 1
    loops[order[0]].checkpointer.close()
    os.kill(os.getpid(), signal.SIGUSR1)
    wait_until(lambda: loops[order[1]].checkpointer.preempted)
    wait_until(lambda: handlers[signal.SIGUSR1] == [signal.SIGUSR1])
    loops[order[1]].checkpointer.close()
    assert not loops[order[0]].checkpointer.preempted
    assert [signal.getsignal(number) for number in SIGNALS] == before
    assert not threads()
    assert signal.set_wakeup_fd(-1) == -1


def test_a_signal_is_told_to_all_runs_of_a_process(tmp_path: Path) -> None:
    loops = twins(tmp_path)
    os.kill(os.getpid(), signal.SIGUSR1)
    wait_until(lambda: all(loop.checkpointer.preempted for loop in loops))
    for loop in loops:
        loop.checkpointer.close()


@pytest.mark.cases(1)
@pytest.mark.parametrize("first", [0, 1])
def test_what_was_closed_in_another_thread_is_put_back_by_the_last_of_the_main_thread(
    tmp_path: Path, handlers: dict[int, list[int]], first: int
) -> None:
    before = [signal.getsignal(number) for number in SIGNALS]
    loops = twins(tmp_path)
    thread = threading.Thread(target=loops[first].checkpointer.close)
    thread.start()
    thread.join()
    os.kill(os.getpid(), signal.SIGUSR1)
    wait_until(lambda: loops[1 - first].checkpointer.preempted)
    assert handlers[signal.SIGUSR1] == [signal.SIGUSR1]
    loops[1 - first].checkpointer.close()
    assert [signal.getsignal(number) for number in SIGNALS] == before
    assert signal.set_wakeup_fd(-1) == -1


def num_sessions() -> int:
    gc.collect()
    return sum(type(thing) is Session for thing in gc.get_objects())


@pytest.mark.slow
def test_a_closed_session_is_held_by_nothing(tmp_path: Path) -> None:
    """Neither by a watch behind another, nor by one that another thread closed."""
    of_others = num_sessions()
    loops = twins(tmp_path)
    assert num_sessions() == of_others + 2
    loops[0].checkpointer.close()
    assert num_sessions() == of_others + 1
    thread = threading.Thread(target=loops[1].checkpointer.close)
    thread.start()
    thread.join()
    assert num_sessions() == of_others
    Loop(tmp_path / "third").run(1)  # uses and puts back what the second had to leave
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert not threads()


ENDS = {
    "closed in turn": "first.close(); second.close()",
    "closed in another thread": """
for checkpointer in (first, second):
    thread = threading.Thread(target=checkpointer.close)
    thread.start()
    thread.join()
""",
    "with a handler in front": """
ours = signal.getsignal(signal.SIGTERM)
signal.signal(signal.SIGTERM, lambda number, frame: ours(number, frame))
second.close(); first.close()
""",
}


@pytest.mark.parametrize(
    "end",
    [
        end if end == "with a handler in front" else pytest.param(end, marks=pytest.mark.slow)
        for end in ENDS
    ],
)
def test_sigterm_ends_a_process_again_once_all_is_closed(tmp_path: Path, end: str) -> None:
    code = f"""
import signal, sys, threading, torch, lowdiff
from lowdiff.compressors import TopK
from lowdiff.errors import UsageError

def attached(name):
    model = torch.nn.Linear(4, 4)
    made = lowdiff.Checkpointer(name, compressor=TopK(0.5), staging=name + "-staging")
    made.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return made

first, second = attached("first"), attached("second")
{ENDS[end]}
for thread in threading.enumerate():
    if thread.name == "lowdiff-lease":  # which a slow disk may hold up
        thread.join({PATIENCE_SECONDS})
left = {{t.name for t in threading.enumerate()}} - {{"lowdiff-signals"}}
print("closed", sorted(left), flush=True)
signal.raise_signal(signal.SIGTERM)
signal.pause()
"""
    (tmp_path / "trainer.py").write_text(code)
    trainer = Script(run_file, "trainer.py", output=tmp_path / "output.txt", cwd=tmp_path)
    assert trainer.wait() == -signal.SIGTERM, trainer.printed()
    assert trainer.printed() == "closed ['MainThread']\n"


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
    assert signal.set_wakeup_fd(-1) == -1
    assert not threads()


def test_a_wakeup_descriptor_that_asyncio_set_before_is_refused_by_name(tmp_path: Path) -> None:
    async def train() -> None:
        loop = Loop(tmp_path)
        events = asyncio.get_running_loop()
        events.add_signal_handler(signal.SIGUSR2, lambda: None)
        with pytest.raises(UsageError, match=r"asyncio.*call attach\(\) before"):
            loop.attach()
        # What is theirs works on, and nothing of the run was begun.
        seen = asyncio.Event()
        events.add_signal_handler(signal.SIGUSR2, seen.set)
        os.kill(os.getpid(), signal.SIGUSR2)
        await asyncio.wait_for(seen.wait(), PATIENCE_SECONDS)
        assert not (tmp_path / "run").exists()
        events.remove_signal_handler(signal.SIGUSR2)
        assert loop.run(2) == 0

    asyncio.run(train())
    assert signal.set_wakeup_fd(-1) == -1


def test_one_that_was_closed_since_is_nobodys(tmp_path: Path) -> None:
    with (tmp_path / "wakeups").open("wb") as wakeups:
        os.set_blocking(wakeups.fileno(), False)
        signal.set_wakeup_fd(wakeups.fileno())
    assert Loop(tmp_path).run(2) == 0
    assert signal.set_wakeup_fd(-1) == -1


def test_asyncio_that_comes_later_sees_its_signals_and_so_do_we(tmp_path: Path) -> None:
    seen: list[str] = []

    async def train() -> None:
        loop = Loop(tmp_path)
        events = asyncio.get_running_loop()
        loop.attach()
        events.add_signal_handler(signal.SIGUSR2, lambda: seen.append("SIGUSR2"))
        os.kill(os.getpid(), signal.SIGUSR2)
        os.kill(os.getpid(), signal.SIGTERM)
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not seen or not loop.checkpointer.preempted:
            assert time.monotonic() < deadline, seen
            await asyncio.sleep(0.002)
        loop.checkpointer.close()
        os.kill(os.getpid(), signal.SIGUSR2)
        while len(seen) == 1:
            assert time.monotonic() < deadline, seen
            await asyncio.sleep(0.002)
        assert seen == ["SIGUSR2", "SIGUSR2"]
        events.remove_signal_handler(signal.SIGUSR2)

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


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_forked_child_that_inherits_a_handler_in_front_still_dies_of_sigterm(
    tmp_path: Path,
) -> None:
    loop = Loop(tmp_path)
    loop.attach()
    ours: Any = signal.getsignal(signal.SIGTERM)
    signal.signal(signal.SIGTERM, lambda number, frame: ours(number, frame))
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(100,))
    child.start()
    child.terminate()
    child.join(PATIENCE_SECONDS)
    assert child.exitcode == -signal.SIGTERM
    assert not loop.checkpointer.preempted
    signal.signal(signal.SIGTERM, ours)
    loop.checkpointer.close()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


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


@pytest.mark.slow
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
