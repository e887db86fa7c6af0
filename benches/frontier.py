"""Draws what a compressor costs against what it does to learning, from the results of two benches.

    python -m benches.frontier [--results docs/results]

Left, held-out loss of the text of `bench_convergence` over the bytes that all ranks store of an element and step: a dot
as stored in that small training, a ring as stored of GPT-2-small's shapes (`bench_compress`), where low rank takes far
less. Right, the same loss over the time that the compressor takes of a step. The line is dense training, the band two
standard deviations of its seeds.
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from benches import ending
from benches.bench_convergence import ARMS, key_of
from benches.harness import BLUE, GREEN, INK, MUTED, PALE, RED, draw_panels

#: By the first word of an arm's name.
_COLORS = {
    "topk": BLUE, "cyclic": "#6f9fd8", "randomk": RED, "powersgd": GREEN, "8": MUTED, "4": MUTED,
    "cast": INK,
}  # fmt: skip


def draw(axes: Axes, learned: dict[str, Any], costs: dict[str, Any], *, over: str) -> None:
    """One panel: loss over ``"bytes"`` or ``"time"``."""
    mean, spread = learned["text/dense_loss"], learned["text/dense_deviation"]
    axes.axhline(mean, color=INK, lw=0.8)
    axes.axhspan(mean - 2 * spread, mean + 2 * spread, color=PALE, alpha=0.5, lw=0)
    for arm in ARMS:
        key = key_of(arm)
        if arm == "dense" or f"{key}/hook_seconds_per_million" not in costs:
            continue
        loss, color = learned[f"text/{key}_loss"], _COLORS[arm.split()[0]]
        if over == "bytes":
            here, there = learned[f"text/{key}_stored"], costs[f"{key}/stored_bytes_per_element"]
            axes.plot([here, there], [loss, loss], "-", color=color, lw=0.6)
            axes.plot(there, loss, "o", color=color, ms=5, mfc="white")
        else:
            parts = ("hook_seconds_per_million", "consume_seconds_per_million")
            here = 1e3 * sum(costs[f"{key}/{part}"] for part in parts)
        axes.plot(here, loss, "o", color=color, ms=5)
        axes.annotate(
            arm, (here, loss), (5, 4), textcoords="offset points", fontsize=7, color=color
        )
    axes.set_xscale("log")
    label = (
        "bytes stored per element and step, all ranks"
        if over == "bytes"
        else "ms of a step per million elements"
    )
    axes.set_xlabel(label)
    axes.set_ylabel("held-out loss, each at its own best rate")


def main(argv: list[str] | None = None) -> None:
    """Draw the picture beside its results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=Path("docs/results"))
    args = parser.parse_args(argv)
    learned, costs = (
        json.loads((args.results / f"{name}.json").read_text(encoding="utf-8"))["summary"]
        for name in ("convergence", "compress")
    )
    panels = [partial(draw, learned=learned, costs=costs, over=over) for over in ("bytes", "time")]
    draw_panels(args.results / "frontier.png", panels, width=12.0)


if __name__ == "__main__":
    ending.run(main)
