"""Threads of one purpose: what blocks there holds up nobody, and is never begun twice at once."""

from __future__ import annotations

import asyncio
import threading

import pytest

from lowdiff.persistence.store.client import OwnThreads


def test_what_blocks_there_holds_up_nobody_elsewhere() -> None:
    threads, release = OwnThreads("mine", 1), threading.Event()

    async def scenario() -> list[str]:
        blocked = asyncio.create_task(threads.run(release.wait))
        waiting = asyncio.create_task(threads.run(lambda: threading.current_thread().name))
        elsewhere = await asyncio.to_thread(lambda: threading.current_thread().name)
        assert not blocked.done()
        assert not waiting.done()
        release.set()
        assert await blocked
        return [await waiting, elsewhere]

    mine, elsewhere = asyncio.run(scenario())
    threads.close()
    assert mine.startswith("mine")
    assert not elsewhere.startswith("mine")


def test_whoever_is_cancelled_waits_for_the_end_of_what_it_began() -> None:
    threads = OwnThreads("mine", 2)
    started, release = threading.Event(), threading.Event()

    def call() -> None:
        started.set()
        release.wait()

    async def scenario() -> None:
        task = asyncio.create_task(threads.run(call))
        await asyncio.to_thread(started.wait)
        task.cancel()
        for _ in range(10):
            await asyncio.sleep(0)
        assert not task.done()
        release.set()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(scenario())
    threads.close()


def test_what_a_call_raises_is_raised() -> None:
    threads = OwnThreads("mine", 1)
    with pytest.raises(ZeroDivisionError):
        asyncio.run(threads.run(divmod, 1, 0))
    threads.close()
