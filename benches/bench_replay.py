"""How fast differentials are replayed: by blocks, and as a loop over whole models would do it.

    python -m benches.bench_replay --out DIR [--smoke]

A real run is made first: a GPT of 20 million parameters stepped with synthetic gradients under a
``Checkpointer``. Then every arm brings the same snapshot to the last step, in a process of its
own, so that allocator settings do not leak, pinned to one core (``blocks_two_workers``: two). The
arms take turns; figures are ratios of medians. Reading and decoding the records counts. The last
state of every arm must equal the live one bit for bit.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from matplotlib.axes import Axes

import lowdiff
from benches.harness import (
    BLUE, INK, MUTED, PALE, Result,
    arguments, machine, write,
)  # fmt: skip
from benches.replay_arms import (
    ARMS, BASE_STEP, Sample, Start, Task,
    digest, published_file, save_published, serve,
)  # fmt: skip
from benches.runs import Places, places
from lowdiff.compressors import TopK
from lowdiff.demo.model import GPT, GPTConfig

_MODEL = GPTConfig(vocabulary=2048, context=256, layers=6, heads=8, width=512)
_SMOKE_MODEL = GPTConfig(layers=2, heads=2, width=64)
TARGETS = {
    "speedup_vs_kept_memory": 1.2,
    "two_workers_vs_one": 1.8,
    "speedup_vs_published": 5.0,
}


def make_run(args: argparse.Namespace, where: Places) -> tuple[str, int]:
    """Step a model with synthetic gradients under a checkpointer; final digest and parameters.

    The first life makes one step and closes, which leaves a snapshot that holds optimizer state;
    the second makes the differentials that are replayed.
    """
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    model = GPT(_SMOKE_MODEL if args.smoke else _MODEL)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=args.fused or None)
    for until in (BASE_STEP, BASE_STEP + args.steps):
        checkpointer = lowdiff.Checkpointer(
            where.run,
            compressor=TopK(density=args.density),
            snapshot_every=1 << 40,
            staging=where.staging,
            retention=None,
            on_error="raise",
        )
        with checkpointer:
            checkpointer.attach(model, optimizer)
            for _ in checkpointer.steps(until=until):
                for parameter in model.parameters():
                    parameter.grad = torch.randn_like(parameter)
                optimizer.step()
    named = dict(model.named_parameters())
    elements = sum(p.numel() for p in named.values())
    return digest((n, p, optimizer.state[p]) for n, p in named.items()), elements


class Arm:
    """One arm's process, waiting for its turns."""

    def __init__(self, task: Task, stack: ExitStack) -> None:
        self.name = task.arm
        # Not a fork of this process, which has threads. What every arm would import, and what
        # torch imports when the first optimizer is made, is imported once.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["benches.replay_arms", "torch._dynamo"])
        self._connection, theirs = context.Pipe()
        process = context.Process(target=serve, args=(task, theirs), daemon=True)
        process.start()
        theirs.close()
        stack.callback(_end, process, self._connection)

    def turn(self) -> Sample:
        """Run one round."""
        self._connection.send(None)
        sample = self._connection.recv()
        assert isinstance(sample, Sample)
        return sample


def _end(process: Any, connection: Connection) -> None:
    connection.close()
    process.join()


def measure(args: argparse.Namespace, where: Places, published: Path) -> Result:
    """Make the run, let the arms take turns, and compare."""
    facts = machine()
    cores = sorted(os.sched_getaffinity(0))
    live, elements = make_run(args, where)
    cores_of = {arm: cores[:1] for arm in ARMS} | {"blocks_two_workers": cores[:2]}
    tasks = [Task(arm, where, published, cores_of[arm], args.fused) for arm in ARMS]
    start = Start(tasks[0])
    published_bytes = save_published(published, start)
    durable_bytes = sum(step.bytes for step in start.plan.steps) // args.steps
    assert len(start.plan.steps) == args.steps
    assert published_file(published, BASE_STEP + args.steps).exists()
    del start

    samples: dict[str, list[Sample]] = {arm: [] for arm in ARMS}
    with ExitStack() as stack:
        arms = [Arm(task, stack) for task in tasks]
        for turn in itertools.count():
            # Back and forth, so that a steady drift cancels; the first turn warms up.
            for arm in arms if turn % 2 else reversed(arms):
                sample = arm.turn()
                print(f"turn {turn}, {arm.name}: {sample.seconds:.3f} s")
                if turn:
                    samples[arm.name].append(sample)
            if turn == args.rounds:
                break

    digests = {arm: {s.digest for s in found} for arm, found in samples.items() if arm != "decode"}
    for arm, found in digests.items():
        assert found == {live}, f"{arm} did not reproduce the live state"
    seconds = {arm: statistics.median(s.seconds for s in samples[arm]) for arm in ARMS}
    blocks = seconds["blocks"]
    return Result(
        name="replay",
        settings={
            **{key: value for key, value in vars(args).items() if key != "out"},
            "parameters": elements,
            "optimizer": "AdamW",
            "world_size": 1,
            "cores": {arm: list(own) for arm, own in cores_of.items()},
        },
        seed=args.seed,
        machine=facts,
        samples={arm: [asdict(s) for s in found] for arm, found in samples.items()},
        summary={
            "speedup_vs_naive": seconds["naive"] / blocks,
            "speedup_vs_kept_memory": seconds["kept"] / blocks,
            "speedup_two_workers": seconds["kept"] / seconds["blocks_two_workers"],
            "two_workers_vs_one": blocks / seconds["blocks_two_workers"],
            "speedup_vs_published": seconds["published"] / blocks,
            "speedup_two_workers_vs_published": seconds["published"]
            / seconds["blocks_two_workers"],
            "bit_identical": True,  # asserted above
            **{f"{arm}_ns_per_element": 1e9 * s / per for arm, s in seconds.items()
               for per in [elements * args.steps]},
            "speedup_vs_kept_memory_without_decode": (seconds["kept"] - seconds["decode"])
            / (blocks - seconds["decode"]),
            "differential_bytes": durable_bytes,
            "published_bytes": published_bytes,
        },
    )  # fmt: skip


def draw(axes: Axes, result: Result) -> None:
    """A bar per arm, its rounds as dots, and how much of it is decoding."""
    labels = {
        "published": "published procedure",
        "naive": "naive loop",
        "kept": "loop, memory kept",
        "blocks": "blocks, one worker",
        "blocks_two_workers": "blocks, two workers",
    }
    updates = result.settings["parameters"] * result.settings["steps"]
    for row, arm in enumerate(reversed(labels)):
        values = [1e9 * s["seconds"] / updates for s in result.samples[arm]]
        colour = BLUE if arm.startswith("blocks") else PALE
        axes.barh(row, statistics.median(values), color=colour, height=0.62)
        axes.plot(values, [row] * len(values), "o", color=INK, markersize=3, alpha=0.5)
    decode = result.summary["decode_ns_per_element"]
    axes.axvline(decode, color=MUTED, linewidth=1.0, linestyle=(0, (4, 3)))
    axes.annotate(
        "decode", xy=(decode, 1.0), xycoords=("data", "axes fraction"), xytext=(3, -1),
        textcoords="offset points", color=MUTED, va="top", fontsize=9,
    )  # fmt: skip
    axes.set_yticks(range(len(labels)), list(reversed(labels.values())))
    axes.set_xlabel("nanoseconds per element and step, on one core (two workers: two)", color=INK)
    axes.set_title(
        f"Replay of {result.settings['steps']} differentials of "
        f"{result.settings['parameters'] / 1e6:.1f} M parameters: the same bits in all arms",
        loc="left", color=INK, fontsize=11.5, fontweight="bold", pad=10,
    )  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
    """Run the bench."""
    parser = arguments((__doc__ or "").split("\n")[0])
    parser.add_argument("--steps", type=int, default=50, help="differentials to replay")
    parser.add_argument("--rounds", type=int, default=5, help="turns of every arm")
    parser.add_argument("--density", type=float, default=0.01)
    parser.add_argument("--fused", action="store_true", help="AdamW(fused=True)")
    args = parser.parse_args(argv)
    if args.smoke:
        args.steps, args.rounds = 4, 1
    with places(args.out) as where:
        published = where.run.parent / "published"
        published.mkdir()
        result = measure(args, where, published)
    write(result, args.out, draw)
    for key, target in TARGETS.items():
        value = result.summary[key]
        print(f"{key} {value:.2f}, target {target}: {'met' if value >= target else 'MISSED'}")


if __name__ == "__main__":
    main()
