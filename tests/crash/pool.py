"""Worker processes that have imported torch already and run one life of a training after another.

A launch of real processes costs seconds; here a "kill" drops everything a process holds in memory
and kills its writer, and the next life starts from files alone, as after SIGKILL.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.background import fork_processes, torch_loaded

#: Until a process has ended what a job left, or has started.
_IDLE_SECONDS = 40.0
#: Of other ranks once one has raised, for which they may wait.
_PATIENCE_SECONDS = 60.0
#: ``job(rank, world_size, *arguments)``, importable by name.
Job = Callable[..., Any]
#: ``around(rank)``, importable by name: a job runs inside what it returns.
Around = Callable[[int], AbstractContextManager[object]]


class JobFailed(Exception):
    """A job raised on some rank; the message holds its traceback."""


class Pool:
    """Processes that run the same job as the ranks of one world.

    Those that did not end a job, or ended with it, are killed and replaced: the next job finds
    processes that wait for one.
    """

    def __init__(self, size: int) -> None:
        self._context = torch_loaded()
        self._size = size
        self._around: Around = nullcontext
        self._folder = tempfile.TemporaryDirectory()
        self._start()

    def _start(self) -> None:
        self._pipes: list[Connection] = []
        self._processes = []
        for index in range(self._size):
            ours, theirs = self._context.Pipe()
            stacks = self._stacks_of(index)
            stacks.touch()  # it may be killed before it makes it
            process = self._context.Process(target=_serve, args=(theirs, str(stacks)), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def _stacks_of(self, index: int) -> Path:
        return Path(self._folder.name) / f"stacks-{index}"

    @contextmanager
    def within(self, around: Around) -> Iterator[None]:
        """Have every job, on each of its ranks, run inside a context."""
        before, self._around = self._around, around
        try:
            yield
        finally:
            self._around = before

    def run(self, job: Job, world_size: int, *arguments: Any) -> list[Any]:
        """Run a job on ranks ``0 .. world_size - 1``; results in rank order.

        Raises:
            JobFailed: With the traceback of every rank that raised.
        """
        with tempfile.TemporaryDirectory() as folder:
            store = str(Path(folder) / "store")
            #: Rank -> whether it ended well, and its result or its traceback.
            answers: dict[int, tuple[bool, Any]] = {}
            self._wait_for_idle(world_size)
            try:
                for rank, pipe in enumerate(self._pipes[:world_size]):
                    pipe.send((self._around, job, rank, world_size, store, arguments))
                self._collect(answers, world_size)
            except EOFError as error:
                self._replace()
                raise JobFailed("a rank ended without an answer; its stderr says why") from error
            except BaseException:  # a time limit, above all
                sys.stderr.write("\n".join(_failures(answers)))
                self._replace()
                raise
        if len(answers) < world_size:
            self._replace()
        if failures := _failures(answers):
            raise JobFailed("\n".join(failures))
        return [answers[rank][1] for rank in range(world_size)]

    def _collect(self, answers: dict[int, tuple[bool, Any]], world_size: int) -> None:
        """Take answers as they come; some ranks have none where one raised and others wait for it."""
        ranks = {pipe: rank for rank, pipe in enumerate(self._pipes[:world_size])}
        deadline = None
        while ranks:
            seconds = None if deadline is None else max(0.0, deadline - time.monotonic())
            ready = wait(list(ranks), seconds)
            if not ready:
                return
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = ranks.pop(pipe)
                answers[rank] = pipe.recv()
                if not answers[rank][0] and deadline is None:
                    deadline = time.monotonic() + _PATIENCE_SECONDS

    def _wait_for_idle(self, world_size: int) -> None:
        """Wait until processes want a job; those that cannot let go of an abandoned life are replaced.

        Two may wait for one another there, each for a connection that the other closes next: a process that
        died would have closed all at once.
        """
        deadline = time.monotonic() + _IDLE_SECONDS
        with suppress(EOFError):  # one has died since
            for pipe in self._pipes[:world_size]:
                if not pipe.poll(max(0.0, deadline - time.monotonic())):
                    break
                pipe.recv()
            else:
                return
        self._replace()
        for pipe in self._pipes[:world_size]:
            pipe.recv()

    def _replace(self) -> None:
        """Print where each process stands, for whoever looks for the reason, and start new ones."""
        asked = []
        for rank, process in enumerate(self._processes):
            if process.is_alive() and process.pid is not None:
                with suppress(ProcessLookupError):  # it dies at this moment
                    os.kill(process.pid, signal.SIGUSR2)
                    asked.append(rank)
        deadline = time.monotonic() + 10.0
        while not all(self._stacks_of(rank).stat().st_size for rank in asked):
            if time.monotonic() > deadline:
                break
            time.sleep(0.05)
        time.sleep(1.0)  # until they have written all of it
        for rank, process in enumerate(self._processes):
            process.kill()
            process.join()
            sys.stderr.write(f"rank {rank}:\n{self._stacks_of(rank).read_text()}")
            self._pipes[rank].close()
        self._start()

    def close(self) -> None:
        """End the processes."""
        for pipe in self._pipes:
            pipe.send(None)
        for process in self._processes:
            process.join(10)
        self._folder.cleanup()


def _failures(answers: Mapping[int, tuple[bool, Any]]) -> list[str]:
    return [f"rank {rank}:\n{text}" for rank, (ok, text) in sorted(answers.items()) if not ok]


def _serve(pipe: Connection, stacks: str) -> None:
    fork_processes(forks=True)
    # SIGUSR1 is what a Checkpointer listens to.
    faulthandler.register(signal.SIGUSR2, open(stacks, "w"))  # noqa: SIM115 - until the end

    import torch

    torch.set_num_threads(1)
    while True:
        pipe.send("idle")
        if (work := pipe.recv()) is None:
            return
        around, job, rank, world_size, store, arguments = work
        try:
            with around(rank):
                found = _run(job, rank, world_size, store, arguments)
            pipe.send((True, found))
        except Exception:
            pipe.send((False, traceback.format_exc()))
        # A dead process's connections are closed, for which other ranks wait that had begun to tell it
        # something; here a life that was abandoned holds them until its cycles are collected.
        gc.collect()


def _run(job: Job, rank: int, world_size: int, store: str, arguments: Sequence[Any]) -> Any:
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, world_size), rank=rank, world_size=world_size
    )
    dist.barrier()  # a rank that ended at once would close connections that others still make
    try:
        return job(rank, world_size, *arguments)
    finally:
        if dist.is_initialized():  # a job may have ended it
            dist.destroy_process_group()
