"""A rank of a training that fails as it is told, and what it is begun anew by.

``FOLDER STRATEGY [ATTEMPT:STEP:KIND ...]``: in which attempt, before which step, rank 1 gets an ``error``, dies by
``kill``, or is stopped for ever (``hang``); ``slow`` keeps rank 0 in its optimizer from then on, three seconds each. Each line that it prints begins with the time.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import lowdiff
from lowdiff.compressors import TopK
from tests.crash.trainings import TRAININGS

WORLD_SIZE, STEPS = 2, 12
#: More than a process that shares its core with many others takes for a call into C.
HANG_SECONDS = 10.0
STRATEGIES: dict[str, dict[str, Any]] = {
    "log": {"compressor": TopK(0.05)},
    "survivors": {"strategy": "survivors", "hang_seconds": HANG_SECONDS, "on_hang": "exit"},
}


def say(what: str) -> None:
    sys.stdout.write(f"{time.time():.4f} {what}\n")
    sys.stdout.flush()


def fail(kind: str, optimizer: torch.optim.Optimizer) -> None:
    if kind == "slow":
        optimizer.register_step_post_hook(lambda *_: time.sleep(3.0))
        return
    say(f"fails by {kind}")
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "hang":
        os.kill(os.getpid(), signal.SIGSTOP)
    raise ValueError("an error of this rank alone")


def train(attempt: int, folder: Path, strategy: str, failures: Sequence[str]) -> None:
    """Train from where it was left to the end, in a group that is there; keep the final state."""
    rank = dist.get_rank()
    torch.manual_seed(1)
    made = TRAININGS["gpt_adamw"](rank, WORLD_SIZE)
    checkpointer = lowdiff.Checkpointer(
        folder / "run", staging=folder / "staging", **STRATEGIES[strategy]
    )
    with checkpointer:
        completed = checkpointer.attach(made.model, made.optimizer, **made.stateful)
        say(f"attached at {completed}")
        for step in checkpointer.steps(until=STEPS):
            for words in failures:
                number, at, kind = words.split(":")
                is_here = rank == (0 if kind == "slow" else 1)
                if is_here and (attempt, step) == (int(number), int(at)):
                    fail(kind, made.optimizer)
            made.step(step)
            if step == completed:
                say(f"made step {step}")
        state = {"model": made.model.state_dict(), "optimizer": made.optimizer.state_dict()}
        torch.save(state, folder / f"final-{rank}.pt")


def in_place(*words: str) -> None:
    """One of several processes that meet at a store: ``RANK NUM_PROCESSES PORT``, and those above."""
    from lowdiff.integrations import nvrx

    rank, num_processes, port, folder, strategy, *failures = words
    os.environ.update(
        RANK=rank, WORLD_SIZE=num_processes, MASTER_ADDR="127.0.0.1", MASTER_PORT=port
    )
    torch.set_num_threads(1)
    # The package's monitor is a child that multiprocessing starts.
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]

    @nvrx.restartable(world_size=WORLD_SIZE, hang_seconds=HANG_SECONDS)
    def entered(attempt: nvrx.Attempt) -> str:
        say(f"enters as rank {attempt.rank}")
        attempt.init_process_group("gloo")
        train(attempt.number, Path(folder), strategy, failures)
        return "trained"

    say(entered() or "was not needed")


def under_torchrun(*words: str) -> None:
    """A worker of torchrun, whose store has what an attempt before left in it."""
    folder, strategy, *failures = words
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    torch.set_num_threads(1)
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False
    )
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore(f"attempt-{attempt}", store),
        rank=int(os.environ["RANK"]),
        world_size=WORLD_SIZE,
        timeout=timedelta(seconds=2 * HANG_SECONDS),
    )
    say(f"enters as rank {os.environ['RANK']}")
    train(attempt, Path(folder), strategy, failures)
    dist.destroy_process_group()


if __name__ == "__main__":
    under_torchrun(*sys.argv[1:])
