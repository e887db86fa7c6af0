"""Starts trainers that can be killed: torch is imported once, then every life is a forked process.

Nothing but the import happens before the fork, so no thread of torch's is lost in it. A life reports each step
that it made, with the digest of its state and what it then knew to be committed, in a file that outlives it.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import traceback
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # the first optimizer of a process loads it
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests.crash.lives import as_from_an_accelerator
from tests.faults.victim import TinyTraining, checkpointer_for

ROOT = Path(__file__).parents[2]
RETENTION = 3
#: Settings of the Checkpointer by kind of training.
SETTINGS: dict[str, dict[str, Any]] = {
    "topk": {},
    # DDP adds the gradients of three ranks in another order after a restart.
    "replica": {"compressor": None, "snapshot_every": 10, "reproducible": True},
}


#: Of a late engine: some steps of this small training, so that most kills find two on their way.
_LATE_SECONDS = 0.03


@dataclass(frozen=True)
class Line:
    """What a life has said.

    Attributes:
        word: ``"resumed"``, ``"made"`` or ``"closed"``.
        step: Which step; 0 at the end.
        digest: Of its state.
        committed: The newest step that was known to be committed.
    """

    word: str
    step: int
    digest: str
    committed: int


class Zygote:
    """The process that forks trainers; they end with it at the latest."""

    def __init__(self) -> None:
        self._child = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.zygote"],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def spawn(
        self,
        folder: Path,
        until: int,
        world_size: int = 1,
        kind: str = "topk",
        engine: str = "host",
    ) -> list[int]:
        """Start one life of the run in ``folder``, whose steps reach staging by an engine; returns the process ids, by rank."""
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        port = _free_port() if world_size > 1 else 0
        words = folder, until, world_size, port, kind, engine
        print(*words, file=self._child.stdin, flush=True)
        return [int(pid) for pid in self._child.stdout.readline().split()]

    def close(self) -> None:
        """End it and every trainer that is left."""
        with suppress(ProcessLookupError):
            os.killpg(self._child.pid, signal.SIGKILL)
        with self._child:
            pass


def reported(folder: Path, rank: int) -> list[Line]:
    """What the lives in a folder have said."""
    path = folder / f"report.{rank}"
    found = []
    for text in path.read_text().splitlines() if path.exists() else []:
        word, step, digest, committed = text.split()
        found.append(Line(word, int(step), digest, int(committed)))
    return found


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def _serve() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the dead are not waited for
    for line in sys.stdin:
        folder, until, world_size, port, kind, engine = line.split()
        pids = []
        for rank in range(int(world_size)):
            pid = os.fork()
            if pid == 0:
                around = (
                    as_from_an_accelerator(rank, _LATE_SECONDS)
                    if engine == "late"
                    else nullcontext()
                )
                with around:
                    _live(Path(folder), int(until), rank, int(world_size), int(port), kind)
            pids.append(pid)
        sys.stdout.write(" ".join(map(str, pids)) + "\n")
        sys.stdout.flush()


def _live(folder: Path, until: int, rank: int, world_size: int, port: int, kind: str) -> None:
    """The child's whole life; never returns."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    output = os.open(folder / f"output.{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (0, 1, 2):
        os.dup2(output if stream else os.open(os.devnull, os.O_RDONLY), stream)
    try:
        _train(folder, until, rank, world_size, port, kind)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)


def _train(folder: Path, until: int, rank: int, world_size: int, port: int, kind: str) -> None:
    torch.set_num_threads(1)
    training = TinyTraining()
    model: torch.nn.Module = training.model
    if world_size > 1:
        store = dist.TCPStore(
            "127.0.0.1", port, world_size, rank == 0, timeout=timedelta(seconds=30)
        )
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
        model = DistributedDataParallel(model)
    checkpointer = checkpointer_for(
        folder / "run", folder / "staging", retention=RETENTION, **SETTINGS[kind]
    )
    report = os.open(folder / f"report.{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    resumed = checkpointer.attach(model, training.optimizer, **training.stateful)
    os.write(report, f"resumed {resumed} {training.digest()} {resumed}\n".encode())
    for step in range(resumed, until):
        training.step(step, model, rank)
        found = training.digest()
        checkpointer.commit()
        committed = checkpointer.stats()["committed_step"]
        os.write(report, f"made {step + 1} {found} {committed}\n".encode())
    checkpointer.close()
    os.write(report, f"closed 0 - {until}\n".encode())


if __name__ == "__main__":
    _serve()
