"""What ``bench_restart`` compares: recovery, its parts measured alone, and a plain load."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

import lowdiff
from benches.gpt import GPT, GPTConfig
from benches.harness import pin
from benches.replay_arms import digest
from benches.runs import Places
from lowdiff.attach.restore import check_restored, load_model, load_optimizers
from lowdiff.model.binding import Attached, describe
from lowdiff.persistence.files.paths import RunFolder
from lowdiff.persistence.run.catalog import scan
from lowdiff.recovery.load import load_snapshot
from lowdiff.recovery.replay.replayer import ReplayOptions
from lowdiff.recovery.state import RecoveredState


@dataclass(frozen=True, slots=True)
class Turn:
    """One arm, once.

    Attributes:
        seconds: By the wall clock.
        cpu_seconds: Processor time of the process and its threads.
        digest: SHA-256 of the state made; empty where none is.
    """

    seconds: float
    cpu_seconds: float
    digest: str


@dataclass(frozen=True, slots=True)
class Restart:
    """What an arm is told.

    Attributes:
        arm: ``"recover"``, ``"parts"``, ``"dcp_load"`` or ``"compare"``.
        num_steps: Differentials after the snapshot of step 0.
        distributed: Folder in the format of ``torch.distributed.checkpoint``.
        cores: Cores it may use.
        model: The model that was trained.
    """

    arm: str
    where: Places
    num_steps: int
    distributed: Path
    cores: Sequence[int]
    model: GPTConfig


def evict(folder: Path) -> None:
    """Drop a folder's files from the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def recovering(task: Restart) -> Callable[[], str]:
    """``lowdiff.recover`` of a step that lies ``num_steps`` after its snapshot."""
    options = ReplayOptions(num_workers=len(task.cores))
    state = lowdiff.recover(
        task.where.run, task.num_steps, staging=task.where.staging, options=options
    )
    assert state.base_step == 0
    entries = state.optimizers[0].state
    return lambda: digest((n, p, entries[n]) for n, p in state.parameters.items())


def parts(task: Restart) -> Callable[[], str]:
    """The snapshot's load, then as many fused steps of the whole model, with gradients at hand."""
    catalog = scan(RunFolder(task.where.run))
    base = next(s for s in catalog.snapshots if s.step == 0)
    state = load_snapshot(base, catalog.incarnations[0], len(task.cores))
    parameters = [torch.nn.Parameter(t) for t in state.tensors().values()]
    optimizer = torch.optim.AdamW(parameters, fused=True)
    optimizer.load_state_dict(state.optimizer_state_dict())
    torch.set_num_threads(len(task.cores))
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    for _ in range(task.num_steps):
        optimizer.step()
    return str


def dcp_load(task: Restart) -> Callable[[], str]:
    """``torch.distributed.checkpoint.load`` of the same state into memory that is there."""
    content = dict(_EMPTY)
    dcp.load(content, checkpoint_id=task.distributed, no_dist=True)
    return str


def compare(task: Restart) -> Callable[[], str]:
    """The pass in which ``attach`` compares the live state with the recovered one."""
    state, attached = _RESTORED[0]
    check_restored(state, state.items[0], attached, {})
    return str


def restored(task: Restart) -> tuple[RecoveredState, Attached]:
    """A recovered state, and a model and optimizer that it was loaded into."""
    state = lowdiff.recover(task.where.run, task.num_steps, staging=task.where.staging)
    model = GPT(task.model)
    attached = describe(model, [torch.optim.AdamW(model.parameters(), fused=True)])
    load_model(state, state.items[0], attached)
    load_optimizers(state, attached)
    return state, attached


_EMPTY: dict[str, object] = {}
_RESTORED: list[tuple[RecoveredState, Attached]] = []
_ARMS = {"recover": recovering, "parts": parts, "dcp_load": dcp_load, "compare": compare}


def take_turn(task: Restart, connection: Connection) -> None:
    """Evict the files, run an arm once, and send a ``Turn``."""
    pin(task.cores)
    torch.set_num_threads(1)
    if task.arm == "dcp_load":  # what is loaded into is a model that a script has made
        reference = lowdiff.recover(task.where.run, 0, staging=task.where.staging)
        _EMPTY["model"] = reference.model_state_dict()
        _EMPTY["optimizer"] = reference.optimizer_state_dict()
    if task.arm == "compare":
        _RESTORED.append(restored(task))
    evict(task.where.run)
    evict(task.distributed)
    before = resource.getrusage(resource.RUSAGE_SELF)
    started = time.perf_counter()
    outcome = _ARMS[task.arm](task)
    seconds = time.perf_counter() - started
    after = resource.getrusage(resource.RUSAGE_SELF)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    connection.send(Turn(seconds, cpu, outcome()))
