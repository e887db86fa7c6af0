"""Threads of one purpose: what blocks in them for long holds up nobody else."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

_Result = TypeVar("_Result")


class OwnThreads:
    """A few threads beside those that an event loop's ``asyncio.to_thread`` shares."""

    def __init__(self, name: str, count: int) -> None:
        self._executor = ThreadPoolExecutor(count, thread_name_prefix=name)

    async def run(self, call: Callable[..., _Result], *arguments: object) -> _Result:
        """Call it in a thread.

        If this is cancelled, it waits for the call's end all the same: no thread can be stopped, and
        nobody may begin the same again beside it.
        """
        loop = asyncio.get_running_loop()
        result = loop.run_in_executor(self._executor, partial(call, *arguments))
        try:
            return await asyncio.shield(result)
        except asyncio.CancelledError:
            await asyncio.wait([result])
            raise

    def close(self) -> None:
        """Begin nothing more."""
        self._executor.shutdown(wait=False)
