"""A rank that forks in the middle of its training; the child tries everything that it must not.

python -m tests.unit.loop.forked RANK WORLD_SIZE FOLDER COMPRESSOR
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import lowdiff
from lowdiff.compressors import PowerSGD, TopK
from lowdiff.protocols import Compressor
from tests.crash.trainings import batch, wrapped

STEPS, FORKS_AT = 8, 4
COMPRESSORS: dict[str, Compressor | None] = {
    "topk": TopK(0.1),
    "powersgd": PowerSGD(1, dense_below=8),
    "none": None,
}


def caught(call: Callable[[], object]) -> str:
    """Type and text of what a call raises."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def attach_anew(folder: Path) -> None:
    """Another Checkpointer, of another run."""
    fresh = nn.Linear(3, 3)
    another = lowdiff.Checkpointer(
        folder / "another", compressor=TopK(0.5), staging=folder / "staging-of-child"
    )
    sgd = torch.optim.SGD(fresh.parameters(), lr=0.1)
    another.attach(fresh, sgd)
    for _ in another.steps(2):
        fresh(torch.ones(2, 3)).sum().backward()
        sgd.step()
    another.close()


def child(
    checkpointer: lowdiff.Checkpointer,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: Iterator[int],
    folder: Path,
) -> None:
    """Call everything; leave the ``with`` block of the parent; end as Python ends."""
    again = torch.optim.SGD(model.parameters(), lr=0.1)
    told = {
        "attach": caught(lambda: checkpointer.attach(model, again)),
        "dataloader": caught(lambda: checkpointer.dataloader([1, 2, 3], batch_size=1)),  # type: ignore[arg-type]
        "clip": caught(lambda: checkpointer.clip_grad_norm_(model.parameters(), 1.0)),
        "steps": caught(lambda: checkpointer.steps(9)),
        "commit": caught(checkpointer.commit),
        "preempted": caught(lambda: checkpointer.preempted),
        "stats": caught(checkpointer.stats),
        "keep": caught(lambda: checkpointer.keep(1)),
        "loop": caught(lambda: next(steps)),
        "detach": caught(checkpointer.detach),
        "close": caught(checkpointer.close),
    }
    # What the parent stages is in memory that both share: no hook may write there.
    inner: Any = model.module if hasattr(model, "module") else model
    for number in range(3):
        optimizer.zero_grad()
        inner(batch(number, 0, 6, 12)).square().mean().backward()
        optimizer.step()
    if not dist.is_initialized():
        attach_anew(folder)
    gc.collect()
    (folder / "told.json").write_text(json.dumps(told))


def main(*words: str) -> None:
    """Train; the words are those above."""
    rank, world_size = int(words[0]), int(words[1])
    folder = Path(words[2])
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(12, 40), nn.ReLU(), nn.Linear(40, 30))
    if world_size > 1:
        store = dist.FileStore(str(folder / "store"), world_size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
        model = wrapped(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    staging = folder / "staging"
    with lowdiff.Checkpointer(
        folder / "run", compressor=COMPRESSORS[words[3]], staging=staging, snapshot_every=3
    ) as checkpointer:
        checkpointer.attach(model, optimizer)
        steps = checkpointer.steps(STEPS)
        forked = 0
        for step in steps:
            if step == FORKS_AT and rank == 0:
                forked = os.fork()
                if forked == 0:
                    signal.alarm(60)
                    child(checkpointer, model, optimizer, steps, folder)
                    sys.exit(7)  # through the parent's with block
                if "--die" in words:
                    os.kill(os.getpid(), signal.SIGKILL)
            optimizer.zero_grad()
            model(batch(step, rank, 6, 12)).square().mean().backward()
            optimizer.step()
            if forked and step == FORKS_AT + 1:  # both were at work at once
                began = time.monotonic()
                _, status = os.waitpid(forked, 0)
                sys.stdout.write(f"child {os.waitstatus_to_exitcode(status)}\n")
                assert time.monotonic() - began < 60
    if rank == 0:
        weights = {name: value for name, value in model.state_dict().items()}
        torch.save(weights, folder / "weights.pt")
        sys.stdout.write(f"restarts {checkpointer.stats()['writer_restarts']}\n")
    if world_size > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except SystemExit as end:
        if dist.is_initialized():  # at its end a forked process waits for Gloo's threads for ever
            os._exit(int(str(end.code)))
        raise
