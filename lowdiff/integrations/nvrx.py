"""Restart in place: processes that live enter the training function again, hot spares fill the gaps.

::

    @nvrx.restartable(world_size=8)
    def train(attempt: nvrx.Attempt, run: str) -> None:
        attempt.init_process_group("nccl")
        ...
        with lowdiff.Checkpointer(run, strategy="survivors") as checkpointer:
            checkpointer.attach(ddp_model, optimizer)
            for step in checkpointer.steps(until=10_000):
                ...

Start more processes than ``world_size``: what is over waits as a spare, with its imports done. A launcher that
ends all processes when one ends, as torchrun does, does not go with it; this one starts them and waits::

    python -m lowdiff.integrations.nvrx --processes 9 train.py runs/gpt

Needs ``lowdiff[in-process]``: the ``inprocess.Wrapper`` of nvidia-resiliency-ext, which has wheels for few
versions of Python.
"""

from __future__ import annotations

import argparse
import functools
import gc
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
import torch.distributed as dist

from lowdiff.checkpointer import break_off, end_steps, prepare_writer, restarting_in_place
from lowdiff.errors import ConfigError, LowDiffError

try:
    import psutil  # the package needs it
    from nvidia_resiliency_ext import inprocess
except ImportError as error:
    _version = ".".join(map(str, sys.version_info[:2]))
    raise ConfigError(
        "restart in place needs nvidia-resiliency-ext: pip install 'lowdiff[in-process]'. Its version 0.4.1 has "
        f"wheels for Python 3.10 to 3.12 on Linux, and this is Python {_version} on {sys.platform} ({error}); "
        "where there is none, torchrun --max-restarts restarts all processes: docs/survivors.md"
    ) from error

P = ParamSpec("P")
R = TypeVar("R")

#: How often somebody looks whether a process lives; the package's own defaults are a second.
_LOOK = timedelta(seconds=0.1)
#: How long to wait for more failures before all begin anew.
_LAST_CALL = timedelta(seconds=0.05)
#: Of `hang_seconds`: when a rank that still makes no progress is killed, and how long ranks wait for each other to
#: begin anew.
_KILLED_AFTER, _BARRIER_AFTER = 1.5, 3.0
#: How long the rest of a step may take, from its optimizer to the end of its commit.
_STEP_SECONDS = 10.0
_LEAST_BARRIER_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class Attempt:
    """One time that the training function is entered.

    Attributes:
        number: How many times it was before.
        rank: Of this process in this attempt.
        world_size: Number of processes that train.
        host: Machine of the store through which processes meet.
        port: The store's port.
    """

    number: int
    rank: int
    world_size: int
    host: str
    port: int

    def init_process_group(self, backend: str, **options: Any) -> None:
        """``torch.distributed.init_process_group`` of this attempt.

        Args:
            backend: E.g. ``"gloo"``.
            options: Further ones.
        """
        # A connection of its own: that of the package waits in another thread, and holds up all that use it.
        store = dist.TCPStore(self.host, self.port, is_master=False, wait_for_workers=False)
        dist.init_process_group(
            backend,
            store=dist.PrefixStore(f"training-{self.number}", store),
            rank=self.rank,
            world_size=self.world_size,
            **options,
        )


class _Enough(inprocess.rank_assignment.RankAssignment):
    """Ends all processes once fewer are left than train."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size

    def __call__(self, ctx: Any) -> Any:
        if ctx.state.world_size < self._world_size:
            raise LowDiffError(
                f"{ctx.state.world_size} processes are left, and {self._world_size} train: start all again, with "
                "more spares; attach goes on from the last step"
            )
        return ctx


class _Prepare(inprocess.initialize.Initialize):
    """Has a writer wait for the next ``attach`` of this process."""

    def __call__(self, state: Any) -> Any:
        prepare_writer()
        return state


class _CutOff(inprocess.abort.AbortTorchDistributed):
    """Ends what the main thread waits for: also with Gloo, whose groups live as long as a model in DDP.

    Gloo ends a collective once a connection is closed, and cannot be told to end it.
    """

    def __call__(self, state: Any) -> Any:
        _close_connections(but=int(os.environ["MASTER_PORT"]))
        end_steps(_STEP_SECONDS)
        return super().__call__(state)


class _BreakOff(inprocess.finalize.Finalize):
    """Ends the Checkpointers of the function that was left, as far as the function did not."""

    def __call__(self, state: Any) -> Any:
        break_off()
        if dist.is_initialized():  # it was being made when the others were closed
            dist.destroy_process_group()
        return state


def restartable(
    *,
    world_size: int,
    hang_seconds: float = 300.0,
    warm_up: Callable[[], object] | None = None,
    **settings: Any,
) -> Callable[[Callable[Concatenate[Attempt, P], R]], Callable[P, R | None]]:
    """Make a training function one that is entered again after a failure of any rank.

    Its first argument is the `Attempt`. It makes model, optimizer and Checkpointer; ``attach`` finds the state.
    What it should keep over a failure, such as data that took long to read, it takes as an argument.

    Args:
        world_size: Number of processes that train at a time; where fewer are left, all end.
        hang_seconds: How long a rank may make no progress, in a collective or elsewhere; then it is killed. Longer than
            any wait of a rank for another, also in ``attach``.
        warm_up: Called once in every process before it trains or waits: whatever a spare should have done by the
            time it is needed, such as a step of a model like that which trains.
        settings: Of ``inprocess.Wrapper``, instead of those chosen here.

    Returns:
        A decorator. The function returns None in a spare that was never needed.

    Raises:
        ConfigError: If a value cannot work.
    """
    if world_size < 1 or not hang_seconds > 0:
        raise ConfigError(
            f"world_size is 1 or more and hang_seconds more than 0, got {world_size} and {hang_seconds}"
        )
    barrier = timedelta(seconds=max(_LEAST_BARRIER_SECONDS, _BARRIER_AFTER * hang_seconds))
    chosen: dict[str, Any] = {
        "initialize": _Prepare(),
        "abort": _CutOff(),
        "finalize": _BreakOff(),
        "rank_assignment": inprocess.Compose(
            _Enough(world_size),
            inprocess.rank_assignment.MaxActiveWorldSize(world_size),
            inprocess.rank_assignment.ShiftRanks(),
        ),
        "soft_timeout": timedelta(seconds=hang_seconds),
        "hard_timeout": timedelta(seconds=_KILLED_AFTER * hang_seconds),
        "barrier_timeout": barrier,
        "completion_timeout": barrier,
        "monitor_thread_interval": _LOOK,
        "monitor_process_interval": _LOOK,
        "progress_watchdog_interval": _LOOK,
        "last_call_wait": _LAST_CALL,
    }
    wrapper = inprocess.Wrapper(**{**chosen, **settings})

    def decorate(function: Callable[Concatenate[Attempt, P], R]) -> Callable[P, R | None]:
        def enter(call: Any, args: Sequence[Any], options: Mapping[str, Any]) -> R:
            attempt = Attempt(
                call.iteration,
                int(os.environ["RANK"]),
                int(os.environ["WORLD_SIZE"]),
                call.base_store.host,
                call.base_store.port,
            )
            result = function(attempt, *args, **options)
            if dist.is_initialized():
                dist.destroy_process_group()
            return result

        # The package looks for this annotation, and reads no names of annotations.
        enter.__annotations__ = {"call": inprocess.CallWrapper}

        @functools.wraps(function)
        def wrapped(*args: P.args, **options: P.kwargs) -> R | None:
            _load()
            if warm_up is not None:
                warm_up()
            # The package collects garbage before it enters anew: what is there by now is none.
            gc.collect()
            gc.freeze()
            try:
                with restarting_in_place():
                    result: R | None = wrapper(enter)(None, args, options)
            finally:
                gc.unfreeze()
            return result

        return wrapped

    return decorate


def _close_connections(*, but: int) -> None:
    """Close this process's TCP connections between ports that the kernel chose, as those of Gloo are.

    Spared are those of a store's port, and sockets of Python.
    """
    lowest, highest = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    of_python = {thing.fileno() for thing in gc.get_objects() if isinstance(thing, socket.socket)}
    for found in psutil.Process().net_connections("tcp"):
        ports = [address.port for address in (found.laddr, found.raddr) if address]
        is_of_ranks = len(ports) == 2 and all(lowest <= port <= highest for port in ports)
        if is_of_ranks and but not in ports and found.fd not in of_python:
            with suppress(OSError), socket.socket(fileno=os.dup(found.fd)) as connection:
                connection.shutdown(socket.SHUT_RDWR)


def _load() -> None:
    """Load what PyTorch loads with the first optimizer: a second of a core."""
    with torch.random.fork_rng(devices=[]):
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.zeros(1)).sum().backward()
        optimizer.step()


def launch(command: Sequence[str], num_processes: int, *, port: int = 0) -> int:
    """Run a program in several processes of this machine, none of which ends with another.

    The store through which they meet lies in this process, so that any of them may end.

    Args:
        command: Words of its command line, behind that of Python.
        num_processes: Those that train, and spares.
        port: Of the store; 0 takes a free one.

    Returns:
        The exit status: 0 if one of them ended well and none with an error of its own.
    """
    store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    processes = [
        subprocess.Popen(
            [sys.executable, *command],
            env={
                **os.environ,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(num_processes),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(store.port),
                # The package waits in short turns, and PyTorch warns of the end of each.
                "TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR"),
            },
        )
        for rank in range(num_processes)
    ]
    try:
        codes = [process.wait() for process in processes]
    except BaseException:
        for process in processes:
            process.kill()
        raise
    failed = [code for code in codes if code > 0]
    return failed[0] if failed else int(0 not in codes)


def main(argv: Sequence[str] | None = None) -> int:
    """Start a script in several processes of this machine."""
    parser = argparse.ArgumentParser(prog="python -m lowdiff.integrations.nvrx")
    parser.add_argument("--processes", type=int, required=True, help="those that train, and spares")
    parser.add_argument("--port", type=int, default=0, help="of their store; a free one by default")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="script and its arguments")
    args = parser.parse_args(argv)
    return launch(args.command, args.processes, port=args.port)


if __name__ == "__main__":
    sys.exit(main())
