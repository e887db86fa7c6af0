"""One process of a training that ``bench_survivors`` kills, and that goes on after the restart.

    python -m benches.survivors_life ARM FOLDER STAGING INTERVAL [--smoke]

Started by torchrun, or by ``lowdiff.integrations.nvrx`` for arm ``in_process``. It appends to ``FOLDER/diary``
when it did what, and ends at the step that ``FOLDER/stop`` names.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from crc32c import crc32c
from torch.nn.parallel import DistributedDataParallel

import lowdiff
from benches.gpt import GPT, GPTConfig
from lowdiff.compressors import TopK
from lowdiff.core.memory import byte_view

ARMS = ("torch_save", "log", "replica", "survivors", "in_process")
#: Arms that average the whole gradient: all of them come to the same bits.
DENSE = frozenset(ARMS) - {"log"}
#: Arms in which the ranks that live save the state.
SAVING = frozenset({"survivors", "in_process"})
WORLD_SIZE = 2
MODEL = GPTConfig(layers=6, heads=4, width=256, dropout=0.0)
SMOKE_MODEL = GPTConfig(layers=1, heads=2, width=32, context=16, dropout=0.0)
_ROWS = 4
_TIMEOUT = timedelta(seconds=120)


@dataclass(frozen=True, slots=True)
class Plan:
    """What a process is told.

    Attributes:
        arm: One of `ARMS`.
        folder: Has the diary, and the run.
        staging: Staging folder.
        interval: Steps between two full snapshots, or calls of ``torch.save``.
        smoke: Whether the model is tiny.
    """

    arm: str
    folder: Path
    staging: Path
    interval: int
    smoke: bool

    @property
    def config(self) -> GPTConfig:
        """Shape of the model."""
        return SMOKE_MODEL if self.smoke else MODEL

    @property
    def stop_step(self) -> int:
        """Where the training ends; -1 while nobody has said it."""
        path = self.folder / "stop"
        return int(path.read_text()) if path.exists() else -1


@dataclass(frozen=True, slots=True)
class Line:
    """What a process did.

    Attributes:
        what: ``up``: its imports are done; ``joined``: the process group is there; ``made``: model and
            optimizer are; ``attached``: the state is restored; ``step``: one has ended; ``noticed``: another rank's failure showed; ``saved``: the
            state was saved after that.
        attempt: How often the training had been started anew.
        rank: Of the process in this attempt.
        pid: The process.
        step: Completed steps.
        checksum: Of the parameters, or what else the diary's owner says; 0 where nothing was looked at.
        when: Seconds since 1970.
    """

    what: str
    attempt: int
    rank: int
    pid: int
    step: int
    checksum: int
    when: float

    @staticmethod
    def read(folder: Path) -> list[Line]:
        """All lines of a diary; the last one may still be in the making."""
        path = folder / "diary"
        text = path.read_text() if path.exists() else ""
        whole = text[: text.rfind("\n") + 1]
        found = []
        for what, *numbers, when in map(str.split, whole.splitlines()):
            attempt, rank, pid, step, checksum = map(int, numbers)
            found.append(Line(what, attempt, rank, pid, step, checksum, float(when)))
        return found


class Diary:
    """Where one rank of one attempt notes what it did; outlives the process."""

    def __init__(self, folder: Path, attempt: int, rank: int) -> None:
        self._file = os.open(folder / "diary", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._who = f"{attempt} {rank} {os.getpid()}"

    def note(
        self, what: str, step: int = 0, model: torch.nn.Module | None = None, checksum: int = 0
    ) -> None:
        """Add a line; the checksum of a model is taken after the clock was read."""
        now = time.time()
        for parameter in () if model is None else model.parameters():
            checksum = crc32c(byte_view(parameter.detach()), checksum)
        os.write(self._file, f"{what} {self._who} {step} {checksum} {now}\n".encode())


class Saves(logging.Handler):
    """Notes that the state was saved after a failure: that may be when the loop was left already.

    Attributes:
        diary: Of the attempt under way.
    """

    diary: Diary

    def emit(self, record: logging.LogRecord) -> None:
        """Hear what lowdiff says."""
        if getattr(record, "event", "") == "saved_after_failure":
            self.diary.note("saved")


def train(plan: Plan, attempt: int, rank: int, saves: Saves, join: Callable[[], None]) -> None:
    """Train in one attempt, from what the one before left.

    Args:
        plan: What to train.
        attempt: How many there were before.
        rank: Of this process.
        saves: Is told of the attempt's diary.
        join: Makes the process group.
    """
    diary = saves.diary = Diary(plan.folder, attempt, rank)
    diary.note("up")
    join()
    diary.note("joined")
    torch.manual_seed(0)
    model = DistributedDataParallel(GPT(plan.config))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    diary.note("made")

    def step(number: int) -> None:
        generator = torch.Generator().manual_seed(WORLD_SIZE * number + rank)
        shape = (_ROWS, plan.config.context + 1)
        tokens = torch.randint(plan.config.vocabulary, shape, generator=generator)
        optimizer.zero_grad()
        model(tokens[:, :-1], tokens[:, 1:]).backward()
        optimizer.step()

    def loop(start: int, keep: Callable[[int], object]) -> None:
        diary.note("attached", start, model)
        try:
            for number in itertools.count(start):
                if number == plan.stop_step:
                    return
                step(number)
                keep(number + 1)
                diary.note("step", number + 1, model)
        except BaseException:  # whatever it is: launchers end what lives in their own ways
            diary.note("noticed")
            raise

    if plan.arm == "torch_save":
        _with_torch_save(plan, rank, model, optimizer, loop)
        return
    with _checkpointer(plan) as checkpointer:
        loop(checkpointer.attach(model, optimizer), lambda _: checkpointer.commit())


def _checkpointer(plan: Plan) -> lowdiff.Checkpointer:
    strategy = "survivors" if plan.arm in SAVING else plan.arm
    return lowdiff.Checkpointer(
        plan.folder / "run",
        strategy=strategy,
        compressor=TopK(density=0.01) if strategy == "log" else None,
        snapshot_every=plan.interval,
        staging=plan.staging,
    )


def _with_torch_save(
    plan: Plan,
    rank: int,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    loop: Callable[[int, Callable[[int], object]], None],
) -> None:
    """Load what was saved last, and save in whole intervals, on rank 0."""
    path = plan.folder / "saved.pt"
    start = 0
    if path.exists():
        state: dict[str, Any] = torch.load(path)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        start = state["step"]

    def keep(done: int) -> None:
        if rank == 0 and done % plan.interval == 0:
            made = path.with_suffix(".part")
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({**state, "step": done}, made)
            made.replace(path)

    loop(start, keep)


def _in_torchrun(plan: Plan, saves: Saves) -> None:
    attempt, rank = (int(os.environ[n]) for n in ("TORCHELASTIC_RESTART_COUNT", "RANK"))

    def join() -> None:
        # In a store that earlier attempts have used, the addresses of dead ranks are found.
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = dist.TCPStore(address, port, is_master=False, timeout=_TIMEOUT)
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore(f"attempt-{attempt}", store),
            rank=rank,
            world_size=WORLD_SIZE,
            timeout=_TIMEOUT,
        )

    train(plan, attempt, rank, saves, join)
    dist.destroy_process_group()


def _in_process(plan: Plan, saves: Saves) -> None:
    nvrx = importlib.import_module("lowdiff.integrations.nvrx")

    def warm_up() -> None:
        model = GPT(plan.config)
        optimizer = torch.optim.AdamW(model.parameters())
        tokens = torch.zeros(_ROWS, plan.config.context, dtype=torch.int64)
        model(tokens, tokens).backward()
        optimizer.step()

    def entered(attempt: Any) -> None:
        join = partial(attempt.init_process_group, "gloo")
        train(plan, attempt.number, attempt.rank, saves, join)

    nvrx.restartable(world_size=WORLD_SIZE, warm_up=warm_up)(entered)()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("arm", choices=ARMS)
    parser.add_argument("folder", type=Path)
    parser.add_argument("staging", type=Path)
    parser.add_argument("interval", type=int)
    parser.add_argument("--smoke", action="store_true")
    plan = Plan(**vars(parser.parse_args()))
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // WORLD_SIZE))
    logging.basicConfig(handlers=[logging.StreamHandler(), listening := Saves()])
    (_in_process if plan.arm == "in_process" else _in_torchrun)(plan, listening)
