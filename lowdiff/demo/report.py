"""The demo's table and picture."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from rich.console import Console
from rich.table import Table

from lowdiff.demo.result import DemoResult

_INK, _MUTED, _PALE = "#1f2933", "#7b8794", "#c3cdd8"
_BEFORE, _AFTER, _KILL = "#1f77b4", "#2a9d5c", "#d64545"
_RANK_COLOURS = ("#1f77b4", "#85b8de", "#35618f", "#b9d4ea")
_DIFFERENCES_SHOWN = 5


def print_report(result: DemoResult, console: Console, *, picture: Path) -> None:
    """Print the table, and the first differences if there are any."""
    comparison, cost, resumption = result.comparison, result.cost, result.resumption
    identical = not comparison.differences
    durable = sum(cost.durable_bytes_per_step)
    table = Table(
        title=f"{result.num_parameters:,} parameters, {result.world_size} workers, {result.steps} steps",
        show_header=False,
    )
    table.add_column(style="bold")
    table.add_column()
    table.add_column(style="dim")
    table.add_row(
        "steps lost",
        _verdict(str(result.steps_lost), good=not result.steps_lost),
        f"step {result.killed_at} was committed, resumed from {result.resumed_from}",
    )
    table.add_row(
        "bit-identical",
        _verdict("yes" if identical else "NO", good=identical),
        f"{comparison.num_tensors} tensors and {comparison.num_losses} losses compared",
    )
    table.add_row(
        "bytes per step",
        _bytes(durable),
        " + ".join(_bytes(size) for size in cost.durable_bytes_per_step) + ", by rank",
    )
    ratio = f"{cost.full_checkpoint_bytes / durable:.0f} times that" if durable else ""
    table.add_row("full checkpoint", _bytes(cost.full_checkpoint_bytes), ratio)
    table.add_row("segment files", _bytes(cost.segment_bytes), "kept by retention")
    table.add_row(
        "training thread",
        f"{1000 * cost.training_thread_seconds:.1f} ms per step",
        f"of a step of {1000 * cost.step_seconds:.0f} ms",
    )
    table.add_row(
        "time to resume",
        f"{resumption.total_seconds:.1f} s",
        f"launch {resumption.launch_seconds:.1f}, attach {resumption.attach_seconds:.1f}, "
        f"step {resumption.first_step_seconds:.1f}",
    )
    table.add_row(
        "held-out loss",
        f"{result.held_out_loss:.3f}",
        f"on unseen files; guessing has {math.log(256):.3f}",
    )
    console.print(table)
    for failure in result.failures[:_DIFFERENCES_SHOWN]:
        console.print(f"[bold red]{failure}[/]")
    if len(result.failures) > _DIFFERENCES_SHOWN:
        console.print(f"[red]and {len(result.failures) - _DIFFERENCES_SHOWN} more[/]")
    console.print(f"Picture: {picture}   (seed {result.seed}, {result.total_seconds:.0f} s)")


def write_json(result: DemoResult, path: Path) -> None:
    """Write all that was measured."""
    record = {**dataclasses.asdict(result), "failures": result.failures}
    path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def draw(result: DemoResult, path: Path) -> None:
    """Draw both runs' losses with the kill marked, and the bytes of every step, as PNG."""
    spacing = ConstrainedLayoutEngine(h_pad=0.12, w_pad=0.12, hspace=0.04)
    figure = Figure(figsize=(9.0, 7.2), dpi=150, layout=spacing)
    FigureCanvasAgg(figure)  # drawn without pyplot, which would keep global state
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=[1.7, 1.0])
    _draw_losses(upper, result)
    _draw_bytes(lower, result)
    for axes in (upper, lower):
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color(_PALE)
        axes.tick_params(colors=_MUTED, labelcolor=_INK)
        axes.set_axisbelow(True)
        axes.grid(axis="y", color=_PALE, linewidth=0.6, alpha=0.6)
    figure.savefig(path)


def _draw_losses(axes: Axes, result: DemoResult) -> None:
    axes.plot(
        *_xy(result.uninterrupted), color=_PALE, linewidth=7, label="never interrupted",
        solid_capstyle="round",
    )  # fmt: skip
    axes.plot(*_xy(result.killed), color=_BEFORE, linewidth=1.8, label="until it was killed")
    axes.plot(*_xy(result.resumed), color=_AFTER, linewidth=1.8, label="after it was resumed")
    kill_step = result.killed[-1][0] if result.killed else 0
    axes.axvline(kill_step, color=_KILL, linewidth=1.2, linestyle=(0, (4, 3)))
    axes.annotate(
        f"SIGKILL to all {result.world_size} workers\nresumed from step {result.resumed_from}, "
        f"{result.steps_lost} steps lost",
        xy=(kill_step, 0.74),
        xycoords=("data", "axes fraction"),
        xytext=(8, 0),
        textcoords="offset points",
        color=_KILL,
        va="top",
        fontsize=9.5,
    )
    same = "every bit agrees" if not result.comparison.differences else "THE RUNS DIFFER"
    axes.set_title(
        f"Killed, resumed, and compared with a run that was not: {same}",
        loc="left", color=_INK, fontsize=12.5, fontweight="bold", pad=12,
    )  # fmt: skip
    axes.set_ylabel("training loss (nats per byte)", color=_INK)
    axes.legend(frameon=False, loc="upper right", labelcolor=_INK)


def _draw_bytes(axes: Axes, result: DemoResult) -> None:
    cost = result.cost
    steps = range(1, result.steps + 1)
    floor = [0.0] * result.steps
    for rank, staged in enumerate(cost.staged_bytes):
        sizes = [size / 1000 for size in staged]
        colour = _RANK_COLOURS[rank % len(_RANK_COLOURS)]
        axes.bar(steps, sizes, bottom=floor, width=0.75, color=colour, label=f"staged, rank {rank}")
        floor = [low + size for low, size in zip(floor, sizes, strict=True)]
    durable = sum(cost.durable_bytes_per_step)
    axes.axhline(durable / 1000, color=_INK, linewidth=1.4, label="on disk, all ranks, mean")
    axes.set_title(
        f"One checkpoint a step: {_bytes(durable)} on disk, where a full one has "
        f"{_bytes(cost.full_checkpoint_bytes)}",
        loc="left", color=_INK, fontsize=11, pad=8,
    )  # fmt: skip
    axes.set_ylim(0, 1.45 * max([*floor, durable / 1000, 1e-3]))  # room for the legend
    axes.set_xlim(0, result.steps + 1)
    axes.set_xlabel("step", color=_INK)
    axes.set_ylabel("kilobytes per step", color=_INK)
    axes.legend(frameon=False, loc="upper left", ncols=3, labelcolor=_INK, fontsize=9)


def _xy(curve: tuple[tuple[int, float], ...]) -> tuple[list[int], list[float]]:
    return [step for step, _ in curve], [loss for _, loss in curve]


def _verdict(text: str, *, good: bool) -> str:
    return f"[bold green]{text}[/]" if good else f"[bold red]{text}[/]"


def _bytes(size: float) -> str:
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} GB"
