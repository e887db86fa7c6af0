"""A rank's life in a loop, which reports what each step left, and what recovery makes of it."""

from __future__ import annotations

import hashlib
import inspect
import itertools
import json
import os
import signal
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch._dynamo  # the first optimizer of a process loads it
import torch.distributed as dist

import lowdiff
import lowdiff.compressors
from tests.background import fork_processes
from tests.loops.generate import Loop
from tests.loops.trainer import Training


def leaves(name: str, value: Any) -> Iterator[tuple[str, str]]:
    """Name and digest of every tensor and number in nested containers."""
    if isinstance(value, np.ndarray):
        value = torch.from_numpy(value)
    if isinstance(value, torch.Tensor):
        data = value.detach().contiguous().flatten().view(torch.uint8).numpy()
        text = hashlib.sha256(data.data).hexdigest()[:16]
        yield name, f"{value.dtype} {tuple(value.shape)} {text}"
    elif isinstance(value, dict):
        yield name, f"keys {sorted(map(repr, value))}"
        for key, part in value.items():
            yield from leaves(f"{name}/{key}", part)
    elif isinstance(value, (list, tuple)):
        yield name, f"{type(value).__name__} of {len(value)}"
        for key, part in enumerate(value):
            yield from leaves(f"{name}/{key}", part)
    else:
        yield name, f"{type(value).__name__} {value!r}"


def digests(
    model: dict[str, Any], optimizers: list[Any], stateful: dict[str, Any], random: Any
) -> dict[str, str]:
    """Name -> digest of all that recovery must bring back."""
    found = dict(itertools.chain.from_iterable(leaves(f"model/{k}", v) for k, v in model.items()))
    parts = {"optimizer": optimizers, "stateful": stateful, "random": random}
    for name, part in parts.items():
        found.update(leaves(name, part))
    return found


def live(loop: Loop, folder: Path, life: str, rank: int, kills: bool) -> None:
    """One life of one rank; a process of its own, which never returns."""
    _redirect(folder / f"{life}.{rank}.output")
    fork_processes(forks=True)
    try:
        _live(loop, folder, life, rank, kills)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)


def _redirect(output: Path) -> None:
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(file, stream)


def _live(loop: Loop, folder: Path, life: str, rank: int, kills: bool) -> None:
    torch.set_num_threads(1)
    if loop.is_ddp:
        store = dist.FileStore(str(folder / f"{life}.store"), loop.ranks)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=loop.ranks)
    training = Training(loop, rank)
    place = folder / ("whole" if life == "whole" else "killed")
    checkpointer = lowdiff.Checkpointer(
        place / "run", staging=place / "staging", retention=None, **_settings(loop)
    )
    report = os.open(folder / f"{life}.{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def say(word: str, step: int) -> None:
        found = {} if word == "committed" else _live_digests(training)
        os.write(report, (json.dumps([word, step, found]) + "\n").encode())

    step = resumed = checkpointer.attach(training.model, training.optimizers, **training.stateful)
    say("attached", resumed)

    def die(where: str) -> None:
        if (
            kills
            and (step, where) == (loop.kill_step, loop.kill_place)
            and loop.victim in (-1, rank)
        ):
            os.kill(os.getpid(), signal.SIGKILL)

    for step in checkpointer.steps(loop.steps) if loop.is_steps else range(resumed, loop.steps):
        if step > resumed and loop.is_steps:
            say("committed", step)
            step -= 1
            die("committed")
            step += 1
        training.body(step, checkpointer, die)
        say("made", step + 1)
        if not loop.is_steps:
            checkpointer.commit()
            say("committed", step + 1)
            die("committed")
            training.at("after commit", step)
    checkpointer.close()
    say("closed", loop.steps)


def _settings(loop: Loop) -> dict[str, Any]:
    settings = dict(loop.settings)
    name, arguments = loop.compressor
    if name:
        settings["compressor"] = getattr(lowdiff.compressors, name)(**dict(arguments))
    if has_watch():
        settings["watch"] = loop.watch
    return settings


def has_watch() -> bool:
    """Whether the Checkpointer can be told when to notice foreign writes."""
    return "watch" in inspect.signature(lowdiff.Checkpointer).parameters


def _live_digests(training: Training) -> dict[str, str]:
    return digests(
        training.inner.state_dict(),
        [optimizer.state_dict() for optimizer in training.optimizers],
        {name: thing.state_dict() for name, thing in training.stateful.items()},
        torch.get_rng_state(),
    )


def recover_steps(loop: Loop, folder: Path, steps: list[int | None], result: Path) -> None:
    """Recover steps in a process of its own; write what was asked, what came, and its digests.

    Of a step that cannot be recovered the error takes the place of the digests.
    """
    _redirect(folder / "recovery.output")
    torch.set_num_threads(1)
    place = folder / "killed"
    with result.open("w") as file:
        for step in steps:
            came: int | None
            found: list[dict[str, str]] | str
            try:
                state = lowdiff.recover(place / "run", step, staging=place / "staging")
                came, found = (
                    state.step,
                    [_recovered_digests(loop, state, rank) for rank in range(loop.ranks)],
                )
            except lowdiff.LowDiffError as error:
                came, found = step, f"{type(error).__name__}: {error}"
            except Exception:
                came, found = step, "not a lowdiff error: " + traceback.format_exc()
            print(json.dumps([step, came, found]), file=file, flush=True)


def _recovered_digests(loop: Loop, state: lowdiff.RecoveredState, rank: int) -> dict[str, str]:
    prefix = "stateful/"
    return digests(
        state.model_state_dict(rank),
        [state.optimizer_state_dict(i) for i in range(len(state.optimizers))],
        {
            n.removeprefix(prefix): state.item(n, rank)
            for n in state.items[rank]
            if n.startswith(prefix) and n != prefix + "checkpointer.state"
        },
        state.item("rng/torch", rank),
    )
