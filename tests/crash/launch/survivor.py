"""A rank of a training whose state survivors save, which may die, or stop, at a given place.

``RANK WORLD_SIZE STORE FOLDER UNTIL [--phase PHASE --step N]`` and more; ``--after N`` counts from where it
resumes; with ``--nodes 001`` ranks 0 and 1 are on one node, and rank 2 is on another. It appends a line of
JSON for every step to ``FOLDER/report.RANK``.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import os
import random
import signal
import sys
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

import lowdiff
from lowdiff import compressors
from lowdiff.compressors import dense
from lowdiff.persistence.format import image
from lowdiff.persistence.format.values import encode
from lowdiff.protect.survivors import survivor as survivor_module
from lowdiff.testing import wait_until
from tests.crash.lives import as_from_an_accelerator, owed_by
from tests.crash.trainings import batch, wrapped


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


class Fault:
    """Does something once, when the training comes to a place in a step."""

    def __init__(self, phase: str, step: int) -> None:
        self.phase, self.step, self.now = phase, step, -1
        #: Processes that die with this one, as where a node is lost.
        self.others: list[int] = []

    def at(self, phase: str) -> None:
        """The training is at this place."""
        if self.now == self.step and phase == self.phase:
            self.phase = ""
            for process in self.others:
                os.kill(process, signal.SIGKILL)
            _die()


#: What a Checkpointer is told. A log that is never full makes nothing durable between two snapshots.
STRATEGIES: dict[str, dict[str, Any]] = {
    "survivors": {"strategy": "survivors", "reproducible": True},
    "gradients": {"strategy": "gradients", "reproducible": True},
    "replica": {"strategy": "replica", "reproducible": True},
    "cast": {"compressor": compressors.Cast(), "batch_size": 64},
    "topk": {"compressor": compressors.TopK(0.1), "batch_size": 64},
    "replicated": {
        "compressor": compressors.TopK(0.1),
        "batch_size": 64,
        "residual": "replicated",
    },
}


class Own:
    """An object that every rank has otherwise."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def state_dict(self) -> dict[str, int]:
        """Its rank."""
        return {"rank": self._rank}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Take it back."""
        assert state_dict["rank"] == self._rank


class Net(nn.Module):
    """Dropout, and batch norm whose buffers DDP takes from rank 0."""

    def __init__(self, hidden: int, fault: Fault, *, has_buffers: bool) -> None:
        super().__init__()
        self.first = nn.Linear(30, hidden)
        self.norm = nn.BatchNorm1d(hidden) if has_buffers else nn.LayerNorm(hidden)
        self.last = nn.Linear(hidden, 5)
        self._fault = fault

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.first(inputs)).relu()
        self._fault.at("forward")
        if hidden.requires_grad:
            hidden.register_hook(lambda _: self._fault.at("backward"))
        output: torch.Tensor = self.last(functional.dropout(hidden, 0.2))
        return output


def _is_held(step: int, stats: dict[str, Any]) -> bool:
    """Whether this rank has all that it keeps of a step for ranks on other nodes."""
    return bool(stats["held_step"] >= step)


def digest(value: Any) -> str:
    """SHA-256 of a state."""
    return hashlib.sha256(encode(value)).hexdigest()


def main(*words: str) -> int:
    """Train; 3 if a collective failed."""
    parser = argparse.ArgumentParser()
    for name, kind in (
        ("rank", int),
        ("world_size", int),
        ("store", str),
        ("folder", Path),
        ("until", int),
    ):
        parser.add_argument(name, type=kind)
    parser.add_argument("--phase", default="")
    parser.add_argument("--step", type=int, default=-1)
    parser.add_argument("--after", type=int)
    parser.add_argument("--late-seconds", type=float, default=0.0, help="before that backward pass")
    parser.add_argument("--hidden", type=int, default=40)
    parser.add_argument("--seeds", action="store_true")
    parser.add_argument("--nodes", default="")
    parser.add_argument("--norm", choices=["batch", "layer"], default="batch")
    parser.add_argument(
        "--object", action="store_true", help="attach one that every rank has otherwise"
    )
    parser.add_argument("--strategy", default="survivors")
    parser.add_argument("--copies", type=int, default=1)
    parser.add_argument("--own-disks", action="store_true", help="a run folder for each node")
    parser.add_argument("--node-dies", action="store_true", help="with its writer and replica")
    parser.add_argument("--hang-seconds", type=float, default=None)
    parser.add_argument("--snapshot-every", type=int, default=100)
    parser.add_argument("--engine", choices=["host", "late"], default="host")
    args = parser.parse_args(words)
    logging.basicConfig(level=logging.WARNING)
    rank = args.rank
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(args.store, args.world_size),
        rank=rank,
        world_size=args.world_size,
    )
    seed = 17 + (rank if args.seeds else 0)
    torch.manual_seed(17)
    fault = Fault(args.phase, args.step)
    net = Net(args.hidden, fault, has_buffers=args.norm == "batch")
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    model = wrapped(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9)
    optimizer.register_step_post_hook(lambda *_: fault.at("optimizer"))
    objects: dict[str, Any] = {"scheduler": scheduler}
    if args.object:
        objects["own"] = Own(rank)
    exchange = dense.mean

    def exchanging(*arguments: Any, **options: Any) -> Any:
        fault.at("exchange")
        return exchange(*arguments, **options)

    dense.mean = exchanging
    if (
        args.phase == "save"
    ):  # dies when another one has failed, while it saves, in the copy of the image
        stage = image.stage_image

        def staging(*arguments: Any) -> Any:
            found = stage(*arguments)
            _die()
            return found

        vars(survivor_module)["stage_image"] = staging
    node = args.folder / (f"node{args.nodes[rank]}" if args.nodes else "")
    hangs: dict[str, Any] = {}
    if args.strategy == "survivors":
        hangs = {"hang_seconds": args.hang_seconds, "on_hang": "exit"}
    checkpointer = lowdiff.Checkpointer(
        (node if args.own_disks else args.folder) / "run",
        **STRATEGIES[args.strategy],
        staging=node / "staging",
        copies=args.copies,
        snapshot_every=args.snapshot_every,
        **hangs,
    )
    around = as_from_an_accelerator(rank) if args.engine == "late" else nullcontext()
    with (args.folder / f"report.{rank}").open("a") as report, around:

        def tell(word: str, step: int) -> None:
            state = {
                "model": net.state_dict() if rank == 0 else dict(net.named_parameters()),
                "optimizer": optimizer.state_dict(),
                "scheduler": scheduler.state_dict(),
            }
            state["model"] = {name: value.detach() for name, value in state["model"].items()}
            # A life that went on has zeros where the one before had nothing.
            owed = digest({n: v for n, v in owed_by(checkpointer).items() if v.any()})
            line = {"word": word, "step": step, "state": digest(state), "owed": owed}
            print(json.dumps(line), file=report, flush=True)

        try:
            with checkpointer:
                resumed = checkpointer.attach(model, optimizer, **objects)
                tell("resumed", resumed)
                if args.after is not None:
                    fault.step = resumed + args.after
                for step in checkpointer.steps(args.until):
                    fault.now = step
                    if args.nodes and step == fault.step:
                        time.sleep(1.0)  # what the ranks told each other of the last step is here
                    if args.copies > 1 and args.strategy != "survivors":
                        wait_until(checkpointer, partial(_is_held, step))
                    if args.node_dies:
                        stats = checkpointer.stats()
                        pids = (stats["writer_pid"], stats.get("replica_pid"))
                        fault.others = [pid for pid in pids if pid]
                    loss = model(batch(step, rank, 16, 30)).square().mean()
                    optimizer.zero_grad()
                    if step == fault.step:
                        time.sleep(args.late_seconds)
                    loss.backward()
                    fault.at("between")
                    if fault.phase == "error" and step == fault.step:
                        raise ValueError("a mistake in the loop")
                    optimizer.step()
                    # Only here has it surely passed on all that the others need to make the step.
                    if fault.phase == "stop" and step == fault.step:
                        _stop()
                    fault.at("stepped")
                    scheduler.step()
                    tell("made", step + 1)
                print(
                    json.dumps({"word": "end", "rng": digest(torch.get_rng_state())}),
                    file=report,
                    flush=True,
                )
        except (RuntimeError, ValueError, lowdiff.LowDiffError) as error:
            sys.stdout.write(f"{type(error).__name__}: {error}\n")
            sys.stdout.flush()
            return 3
    return 0
