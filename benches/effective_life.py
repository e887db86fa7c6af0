"""One process of a training that ``bench_effective_time`` kills, and that goes on after the restart.

A supervisor starts `live` on each rank. The process appends to ``FOLDER/diary`` when it did what, and ends at the
step that ``FOLDER/stop`` names.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import struct
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.context import ForkServerContext, SpawnContext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import lowdiff
from benches.gpt import GPT, GPTConfig
from benches.hooked import Hooked
from benches.peers.arm import Place
from benches.peers.dcp import AsyncSave
from benches.peers.full_state import remove_old
from benches.peers.torch_save import TorchSave
from benches.survivors_life import MODEL as _MODEL
from benches.survivors_life import SMOKE_MODEL, WORLD_SIZE, Diary
from lowdiff.compressors import PowerSGD

#: What the log's arms compress with, as docs/compressors.md recommends.
COMPRESSOR = PowerSGD(matrix_rank=4)
#: Arms of lowdiff, and what a Checkpointer is told.
LOWDIFF: dict[str, dict[str, Any]] = {
    "log": {"compressor": COMPRESSOR},
    "log_copies": {"compressor": COMPRESSOR, "copies": 2},
    "replica": {},
    "survivors": {"strategy": "survivors"},
}
#: Arms that save everything in whole intervals.
PERIODIC = ("torch_save", "dcp")
ARMS = (*LOWDIFF, *PERIODIC)
#: Trainings without checkpoints: plain, and with the compressor of the log's arms.
PLAIN, COMPRESSED = "plain", "compressed"
ROWS = 8
_TIMEOUT = timedelta(seconds=120)
#: What processes find imported.
_IMPORTED = ("benches.effective_figures", "benches.harness", "torch._dynamo")


@dataclass(frozen=True, slots=True)
class Plan:
    """A training as its processes are told of it.

    Attributes:
        arm: One of `ARMS`, `PLAIN` or `COMPRESSED`.
        folder: Has the diary, and the run; all nodes share it.
        staging: Has a staging folder for each node.
        interval: Steps between two saves of an arm of `PERIODIC`.
        smoke: Whether the model is tiny.
        rows: Rows of a rank's batch, which make a step as long as it is.
    """

    arm: str
    folder: Path
    staging: Path
    interval: int
    smoke: bool
    rows: int = ROWS

    @property
    def config(self) -> GPTConfig:
        """Shape of the model."""
        return SMOKE_MODEL if self.smoke else _MODEL

    @property
    def stop_step(self) -> int:
        """Step at which the training ends; -1 while nobody has said it."""
        with suppress(FileNotFoundError):
            return int((self.folder / "stop").read_text())
        return -1

    def stop_at(self, step: int) -> None:
        """Say where the training ends."""
        part = self.folder / "stop.part"
        part.write_text(str(step))
        part.replace(self.folder / "stop")

    def node(self, rank: int) -> Path:
        """Staging folder of a rank's node; each rank has a node of its own."""
        return self.staging / f"node-{rank}"


class Training:
    """A model in training; ``benches.peers.arm.Trained``."""

    def __init__(self, plan: Plan, rank: int) -> None:
        torch.manual_seed(0)
        self.model = GPT(plan.config)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.compression = Hooked(self.model, COMPRESSOR) if plan.arm == COMPRESSED else None
        self.module: nn.Module = (
            DistributedDataParallel(self.model)
            if self.compression is None
            else self.compression.ddp
        )
        self._rank, self._config = rank, plan.config
        self._shape = (plan.rows, plan.config.context + 1)

    def step(self, number: int) -> float:
        """Make step ``number``, from 0; the loss before it."""
        generator = torch.Generator().manual_seed(WORLD_SIZE * number + self._rank)
        tokens = torch.randint(self._config.vocabulary, self._shape, generator=generator)
        self.optimizer.zero_grad()
        loss: torch.Tensor = self.module(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        self.optimizer.step()
        if self.compression is not None:
            self.compression.end_step()
        return loss.item()

    def state(self) -> dict[str, Any]:
        """All that determines what follows."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "rng": torch.get_rng_state(),
        }

    def load(self, state: dict[str, Any]) -> None:
        """Take such a state over."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["rng"])


class SyncedSave(TorchSave):
    """``torch.save`` to a file that is synced, as one must be that outlives its node."""

    def after_step(self, step: int) -> bool:
        """See ``benches.peers.arm.Arm.after_step``."""
        if self._place.rank == 0:
            path = self._place.step(step, ".pt")
            partial = path.with_suffix(".partial")
            with partial.open("wb") as file:
                torch.save(self._training.state(), file)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(path)
        return True


def processes(*, cold: bool = False) -> ForkServerContext | SpawnContext:
    """Starter of processes: forked from one that has imported everything, as a hot spare has; or ``cold`` ones."""
    if cold:
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(_IMPORTED))
    return context


def new_store() -> dist.TCPStore:
    """A store through which ranks meet, in this process."""
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=_TIMEOUT)


def join(port: int, name: str, rank: int) -> None:
    """Make the process group.

    Args:
        port: Of `new_store`.
        name: Of this group; the addresses of dead ranks stay in the store, under the name of theirs.
        rank: Of this process.
    """
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=_TIMEOUT)
    own = dist.PrefixStore(name, store)
    dist.init_process_group("gloo", store=own, rank=rank, world_size=WORLD_SIZE, timeout=_TIMEOUT)


#: Trains from a step on, and calls something after each.
Loop = Callable[[int, Callable[[int], object]], None]


def live(plan: Plan, attempt: int, rank: int, port: int) -> None:
    """Train in one attempt, from what the one before left.

    Args:
        plan: What to train.
        attempt: How many there were before.
        rank: Of this process.
        port: Of the store through which the ranks of all attempts meet.
    """
    _print_into(plan.folder / "output")
    code = 1
    try:
        _train(plan, attempt, rank, port)
        code = 0
    except BaseException:
        traceback.print_exc()
        raise
    finally:
        # Gloo's threads may wait for ever when they are torn down beside a rank that is gone.
        os._exit(code)


def _train(plan: Plan, attempt: int, rank: int, port: int) -> None:
    torch.set_num_threads(1)
    diary = Diary(plan.folder, attempt, rank)
    diary.note("up")
    join(port, f"attempt-{attempt}", rank)
    diary.note("joined")
    training = Training(plan, rank)
    diary.note("made")

    def loop(start: int, keep: Callable[[int], object]) -> None:
        diary.note("attached", start)
        for number in itertools.count(start):
            if number == plan.stop_step:
                return
            loss = training.step(number)
            keep(number + 1)
            diary.note("step", number + 1, checksum=bits_of(loss))

    if plan.arm in LOWDIFF:
        with _checkpointer(plan, rank) as checkpointer:
            start = checkpointer.attach(training.module, training.optimizer)
            loop(start, lambda _: checkpointer.commit())
    else:
        assert plan.arm in PERIODIC
        _save_in_intervals(plan, rank, training, diary, loop)


def bits_of(loss: float) -> int:
    """A loss as a whole number, for the diary: equal only where all bits are."""
    found: int = struct.unpack("<q", struct.pack("<d", loss))[0]
    return found


def _checkpointer(plan: Plan, rank: int) -> lowdiff.Checkpointer:
    return lowdiff.Checkpointer(
        plan.folder / "run", staging=plan.node(rank), node=f"node-{rank}", **LOWDIFF[plan.arm]
    )


def _save_in_intervals(plan: Plan, rank: int, training: Training, diary: Diary, loop: Loop) -> None:
    files = plan.folder / "saved"
    files.mkdir(exist_ok=True)
    place = Place(files, plan.node(rank), rank, WORLD_SIZE, plan.interval, 1)
    arm = SyncedSave(place) if plan.arm == "torch_save" else AsyncSave(place)
    start = arm.restore(training)
    arm.open(training)

    def keep(done: int) -> None:
        if done % plan.interval:
            return
        begun = time.monotonic_ns()
        arm.after_step(done)
        if rank == 0:
            remove_old(files)
        diary.note("saved", done, checksum=time.monotonic_ns() - begun)

    loop(start, keep)
    arm.drain()


def _print_into(path: Path) -> None:
    output = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(output, stream)
    os.close(output)
