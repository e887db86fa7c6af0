"""For tests of a training's own recovery: its end by SIGKILL, within a process that goes on.

`kill` and `wait_until` are for everyone. The others are for lowdiff's own tests: they open what is private and may move,
in one place.

::

    checkpointer.attach(model, optimizer)
    ...                                          # train and commit some steps
    lowdiff.testing.kill(checkpointer)           # as `kill -9` of the process
    again = lowdiff.Checkpointer(run, ...)
    step = again.attach(new_model, new_optimizer)
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import fields, replace
from functools import partial
from importlib import import_module
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch

from lowdiff.checkpointer import Checkpointer
from lowdiff.core import devices
from lowdiff.core.memory import byte_view
from lowdiff.errors import ConfigError, UsageError
from lowdiff.limits import PLACES

if TYPE_CHECKING:
    from lowdiff.attach.begin import Opened

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
    checkpointer._session.die(kills_processes=processes)
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
    session, deadline = checkpointer._session, time.monotonic() + seconds
    if session.storage.replica is not None:
        session.storage.replica.begin()
    while not condition(stats := checkpointer.stats()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"after {seconds:.0f} s stats() are still {stats}")
        session.queue.attend()
        time.sleep(_LOOK_SECONDS)
    return stats


@contextmanager
def limits(**values: float) -> Iterator[None]:
    """Set internal limits of this process while the body runs, such as how long a dead writer is not noticed.

    ::

        with lowdiff.testing.limits(process_check_seconds=0.02, restart_backoff_seconds=0.1):
            ...

    Processes that start meanwhile have their own. The names stand in ``lowdiff/limits.py``.

    Raises:
        ConfigError: If there is no limit of that name.
    """
    unknown = sorted(values.keys() - PLACES.keys())
    if unknown:
        raise ConfigError(f"no limit is called {', '.join(unknown)}; there are {', '.join(PLACES)}")
    with ExitStack() as restoring:
        for name, value in values.items():
            module_name, _, constant = PLACES[name].rpartition(".")
            module = import_module(module_name)
            restoring.callback(setattr, module, constant, getattr(module, constant))
            setattr(module, constant, value)
        yield


def adjust(checkpointer: Checkpointer, **settings: Any) -> None:
    """Change settings before `attach`, also those that no argument of a Checkpointer sets.

    Args:
        checkpointer: One that is not attached.
        settings: Fields of `lowdiff.settings.Settings`, for instance ``flush_seconds``. Not all values are checked.

    Raises:
        ConfigError: If there is no setting of that name.
        UsageError: If it is attached.
    """
    if checkpointer._opened is not None:
        raise UsageError("settings are read by attach(); adjust them before")
    known = [field.name for field in fields(checkpointer._settings)]
    unknown = sorted(settings.keys() - set(known))
    if unknown:
        raise ConfigError(
            f"no setting is called {', '.join(unknown)}; there are {', '.join(known)}"
        )
    checkpointer._settings = replace(checkpointer._settings, **settings)


def parts_of(checkpointer: Checkpointer) -> Opened:
    """Return the parts of an attached Checkpointer: session, lock, staging, ranks, survivor and copies.

    Raises:
        UsageError: If it is not attached.
    """
    opened = checkpointer._current
    if opened is None:
        raise UsageError("call attach(model, optimizer) first")
    return opened


def residual_of(checkpointer: Checkpointer) -> dict[str, torch.Tensor]:
    """Return a copy of what error feedback holds back on this rank, by the parameter's name.

    Raises:
        UsageError: If the Checkpointer is not attached.
    """
    residual = checkpointer._session._live.residual
    return {name: values.clone() for name, values in residual.named().items()}


@contextmanager
def whole_buckets() -> Iterator[None]:
    """Compress whole buckets on CPUs too, as on accelerators: the bits are the same.

    It counts where a reducer is bound, which ``attach`` does.
    """
    with patch.object(devices, "takes_whole_buckets", lambda _: True):
        yield


@contextmanager
def late_looks() -> Iterator[None]:
    """Take checksums on CPUs too as on accelerators: as sums, which arrive late.

    It counts where a Checkpointer is attached.
    """
    with patch.object(devices, "sums_there", lambda _: True):
        yield


@contextmanager
def late_copies(
    *, least_seconds: float = 0.0, most_seconds: float = 0.05, seed: int = 0
) -> Iterator[None]:
    """Have what is copied to the host arrive late, from another thread, as from an accelerator.

    Until then there is something else in its place, so who does not wait for it reads that. And what is written to the
    original meanwhile is copied, unless the copy was held before.

    Args:
        least_seconds: How late at least.
        most_seconds: How late at most; in between each copy is late by chance.
        seed: Of that chance.
    """
    chance = random.Random(seed)

    class Late(devices.Copy):
        def __init__(
            self,
            targets: Sequence[torch.Tensor],
            sources: Sequence[torch.Tensor],
            after: torch.Event | None = None,
        ) -> None:
            for target in targets:
                byte_view(target)[:] = bytes([0xFF]) * target.nbytes
            self._sources = sources
            self._copying = threading.Lock()
            here = threading.Event()

            def arrive() -> None:
                with self._copying:  # who holds it now has it copied before anything is overwritten
                    for target, source in zip(targets, self._sources, strict=True):
                        target.copy_(source)
                here.set()

            threading.Timer(chance.uniform(least_seconds, most_seconds), arrive).start()
            self._event = SimpleNamespace(synchronize=here.wait)  # type: ignore[assignment]

        def hold(self) -> None:
            with self._copying:
                self._sources = [source.clone() for source in self._sources]

    leave = partial(devices.Leaving, stays=lambda _: False)
    with patch.multiple(devices, copy=Late, leave=leave, copies_beside=lambda _: True):
        yield


@contextmanager
def own_registrations() -> Iterator[None]:
    """Forget the optimizers that the body registers, when it ends."""
    optimizers = import_module("lowdiff.recovery.replay.optimizers")
    tables = [optimizers.GRANULARITY, optimizers._registered, optimizers.SCALAR_STATE]
    before = [table.copy() for table in tables]
    try:
        yield
    finally:
        for table, was in zip(tables, before, strict=True):
            table.clear()
            table.update(was)
