"""For tests of a training's own recovery: its end by SIGKILL, within a process that goes on.

::

    checkpointer.attach(model, optimizer)
    ...                                          # train and commit some steps
    lowdiff.testing.kill(checkpointer)           # as `kill -9` of the process
    again = lowdiff.Checkpointer(run, ...)
    step = again.attach(new_model, new_optimizer)
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from lowdiff.checkpointer import Checkpointer

_LOOK_SECONDS = 0.002


def kill(checkpointer: Checkpointer, *, processes: bool = True) -> None:
    """End a Checkpointer as SIGKILL of its process would, while this process lives on.

    Nothing is flushed, committed or written: the next ``attach`` finds what a kill at this moment
    leaves. What the kernel does for a dead process is done here: locks are given back, pipes and
    connections to other ranks are closed. Hooks, threads and signal handlers, which would die with
    the process, are removed. Model and optimizer stay as they are, but a model in
    ``DistributedDataParallel`` cannot train on: DDP keeps its hook.

    Staging outlives the kill, as it outlives the process: give the Checkpointer a ``staging=`` inside the
    test's own folder.

    With several ranks, call it on each rank that dies; the others see a rank that is lost.

    Args:
        checkpointer: One that is attached. It may be attached again.
        processes: Whether the writer and the replica die too, as where a whole container is
            killed. Else they are left without a trainer: what is staged becomes durable.

    Raises:
        UsageError: If it is not attached, or belongs to another process.
    """
    checkpointer._session.queue.storage.die(kills_processes=processes)
    assert checkpointer._opened is not None
    checkpointer._let_go(checkpointer._opened)


def wait_until(
    checkpointer: Checkpointer,
    condition: Callable[[dict[str, Any]], object],
    *,
    seconds: float = 60.0,
) -> dict[str, Any]:
    """Wait until ``stats()`` are as a test wants them, without training meanwhile.

    ::

        lowdiff.testing.wait_until(checkpointer, lambda stats: stats["durable_step"] == 4)

    A writer or replica that died is started again meanwhile, as training steps would do. Call it in
    the thread that trains. To stop or kill one of them, send a signal to ``stats()["writer_pid"]``
    or ``stats()["replica_pid"]``.

    Args:
        checkpointer: One that is attached.
        condition: Called with ``stats()`` until it returns something true.
        seconds: How long to wait.

    Returns:
        The stats that satisfied the condition.

    Raises:
        TimeoutError: If the condition does not come true in time; the message has the stats.
        UsageError: If it is not attached.
    """
    storage, deadline = checkpointer._session.queue.storage, time.monotonic() + seconds
    while not condition(stats := checkpointer.stats()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"after {seconds:.0f} s stats() are still {stats}")
        checkpointer._session.queue.status()
        storage.tend()
        time.sleep(_LOOK_SECONDS)
    return stats
