"""Measure a checkpoint at every step of a sharded training: FSDP2 with strategy ``replica``, beside bare FSDP2.

    python -m benches.bench_sharded --out DIR [--smoke]

Two ranks with one thread each train equal models on equal batches. Arms take turns step by step, in ABBA order; a
twin of the arm without checkpoints is measured in the same way (A/A) and subtracted. The same is done with DDP.
Replicas and writers share the ranks' cores.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from matplotlib.axes import Axes

from benches import ending
from benches import sharded_life as life
from benches.gpt import GPT
from benches.harness import (
    BLUE,
    GREEN,
    INK,
    MUTED,
    RED,
    Result,
    arguments,
    dots,
    excess,
    machine,
    overhead,
    write,
)
from benches.runs import places

TARGET = 0.06
_RANKS = 2
_PATIENCE_SECONDS = 600.0


def trained(way: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Run the arms of one way to divide a model; the figures of all ranks."""
    context = multiprocessing.get_context("spawn")
    with places(args.out) as where:
        folder = where.run.parent
        ranks = [
            context.Process(
                target=life.main,
                args=(rank, _RANKS, where, way, args.pairs),
                kwargs={"smoke": args.smoke},
            )
            for rank in range(_RANKS)
        ]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join(_PATIENCE_SECONDS)
        assert [rank.exitcode for rank in ranks] == [0] * _RANKS
        return [json.loads((folder / f"{way}.{rank}").read_text()) for rank in range(_RANKS)]


def measure(args: argparse.Namespace) -> Result:
    """Time both ways."""
    facts = machine()
    found = {way: trained(way, args) for way in life.WAYS}
    cost = {
        way: overhead(ranks[0]["pairs"], ranks[0]["null"], seed=args.seed)
        for way, ranks in found.items()
    }
    config = life.SMOKE_MODEL if args.smoke else life.MODEL
    assert not any(rank["replica_restarts"] for ranks in found.values() for rank in ranks)
    return Result(
        name="sharded",
        settings={
            **{key: value for key, value in vars(args).items() if key != "out"},
            "parameters": sum(parameter.numel() for parameter in GPT(config).parameters()),
            "ranks": _RANKS,
        },
        seed=args.seed,
        machine=facts,
        samples=found,
        summary={
            "overhead_upper95": cost["fsdp2"].upper95,
            "overhead_median": cost["fsdp2"].median,
            "overhead_ddp_upper95": cost["ddp"].upper95,
            "overhead_ddp_median": cost["ddp"].median,
            "overheads": {way: asdict(value) for way, value in cost.items()},
            "step_seconds": statistics.median(plain for _, plain in found["fsdp2"][0]["pairs"]),
            "step_seconds_ddp": statistics.median(plain for _, plain in found["ddp"][0]["pairs"]),
            "training_thread_ms_per_step": 1000
            * max(rank["training_thread_seconds"] for rank in found["fsdp2"]),
            "bit_identical": True,  # asserted by every rank
        },
    )


def draw(axes: Axes, result: Result) -> None:
    """Every pair."""
    rows = [(way, kind) for way in life.WAYS for kind in ("pairs", "null")]
    for height, (way, kind) in enumerate(reversed(rows)):
        pairs = [(a, b) for a, b in result.samples[way][0][kind]]
        dots(axes, height, [100 * v for v in excess(pairs)], BLUE if kind == "pairs" else MUTED)
    labels = {"pairs": "every step kept", "null": "bare, again"}
    axes.axvline(100 * TARGET, color=RED, linewidth=1.2, linestyle=(0, (4, 3)))
    axes.set_yticks(range(len(rows)), [f"{way}, {labels[kind]}" for way, kind in reversed(rows)])
    axes.set_xlabel("% of a bare step", color=INK)
    good = result.summary["overhead_upper95"] <= TARGET
    axes.set_title(
        f"FSDP2 with a replica: {100 * result.summary['overhead_median']:.1f} % "
        f"(95 % bound: {100 * result.summary['overhead_upper95']:.1f} %)",
        loc="left", color=GREEN if good else INK, fontweight="bold",
    )  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
    """Run the bench."""
    parser = arguments((__doc__ or "").split("\n")[0])
    parser.add_argument("--pairs", type=int, default=80, help="pairs of steps")
    args = parser.parse_args(argv)
    if args.smoke:
        args.pairs = 4
    result = measure(args)
    write(result, args.out, draw)
    bound = result.summary["overhead_upper95"]
    print(
        f"overhead_upper95 {bound:.4f}, target {TARGET}: {'met' if bound <= TARGET else 'MISSED'}"
    )


if __name__ == "__main__":
    ending.run(main)
