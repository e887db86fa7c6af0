"""A rank of a training; with ``--die-at N`` it kills itself in its N-th collective of gradients.

With ``--stop-at N`` it stops for ever behind its N-th optimizer step. Ranks wait for each other for ``--timeout`` seconds.

``RANK WORLD_SIZE STORE FOLDER COMPRESSOR [--die-at N] [--stop-at N] [--timeout SECONDS]``
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import lowdiff
from lowdiff.compressors.exchange import HEADER_WORDS
from tests.contract.compressors import FAMILY
from tests.crash.trainings import batch, wrapped

STEPS = 6


def dying(original: Any, at: int) -> Any:
    """A collective that is never answered from its ``at``-th call on."""
    calls = [0]

    def collective(*arguments: Any, **options: Any) -> Any:
        tensor = arguments[1] if isinstance(arguments[0], list) else arguments[0]
        is_news = tensor.dtype is torch.int64 and tensor.numel() > HEADER_WORDS
        calls[0] += options.get("group") is not None and not is_news
        if calls[0] == at:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*arguments, **options)

    return collective


def train(words: tuple[str, ...]) -> int:
    """Train; 3 if another rank was lost."""
    parser = argparse.ArgumentParser()
    parser.add_argument("rank", type=int)
    parser.add_argument("world_size", type=int)
    parser.add_argument("store")
    parser.add_argument("folder")
    parser.add_argument("compressor")
    parser.add_argument("--die-at", type=int, default=0)
    parser.add_argument("--stop-at", type=int, default=0)
    parser.add_argument("--timeout", type=float, default=1800.0)
    args = parser.parse_args(words)
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(args.store, args.world_size),
        rank=args.rank,
        world_size=args.world_size,
        timeout=timedelta(seconds=args.timeout),
    )
    model = wrapped(nn.Linear(60, 90))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    checkpointer = lowdiff.Checkpointer(
        f"{args.folder}/run",
        compressor=FAMILY.get(args.compressor),
        staging=f"{args.folder}/staging",
    )
    sys.stdout.write(f"resumed {checkpointer.attach(model, optimizer)}\n")
    if args.die_at:
        dist.all_gather = dying(dist.all_gather, args.die_at)
        dist.all_reduce = dying(dist.all_reduce, args.die_at)
    for step in checkpointer.steps(STEPS):
        optimizer.zero_grad()
        loss = model(batch(step, args.rank, 8, 60)).square().mean()
        try:
            loss.backward()
        except Exception as error:
            sys.stdout.write(f"{type(error).__name__}: {error}\n")
            began = time.monotonic()
            with contextlib.suppress(lowdiff.LowDiffError):
                checkpointer.close()
            sys.stdout.write(f"closed: {time.monotonic() - began < 20}\n")
            return 3
        optimizer.step()
        if step + 1 == args.stop_at:
            os.kill(os.getpid(), signal.SIGSTOP)
    checkpointer.close()
    return 0


def main(*words: str) -> None:
    """Entry point, which does not return."""
    status = train(words)
    sys.stdout.flush()
    # A group that lost a rank cannot be destroyed, and Gloo's threads must not outlive Python.
    os._exit(status)
