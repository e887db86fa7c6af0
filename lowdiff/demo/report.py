"""Table and picture of the demo."""

from __future__ import annotations

import shlex
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from rich.console import Console
from rich.table import Table

from lowdiff.demo.run import DemoResult, run_demo

_INK, _MUTED, _PALE = "#1f2933", "#7b8794", "#c3cdd8"
_BEFORE, _AFTER, _KILL = "#1f77b4", "#2a9d5c", "#d64545"
_FAILURES_SHOWN = 5


def main(output: Path, steps: int = 60, world_size: int = 2, seed: int | None = None) -> int:
    """Run the demo, print the table and draw the picture.

    Returns:
        Exit code: 0 when no step was lost and every bit agrees, 1 otherwise.
    """
    result = run_demo(output, steps=steps, world_size=world_size, seed=seed)
    draw(result, output / "demo.png")
    print_report(result, Console(), picture=output / "demo.png")
    return 1 if result.failures else 0


def print_report(result: DemoResult, console: Console, *, picture: Path) -> None:
    """Print the table, and the first differences if there are any."""
    reference, resumed, failures = result.reference, result.resumed, result.failures
    num_losses = len(result.killed.losses) + len(resumed.losses)
    full, per_step = result.full_checkpoint_bytes, result.mean_stored_bytes
    lowdiff_seconds = max(reference.lowdiff_seconds.values())
    last = max(reference.losses)
    attached, first_step = resumed.attached_after, min(resumed.times.values())
    table = Table(
        title=f"{result.num_parameters:,} parameters, {result.world_size} workers, "
        f"{result.steps} steps",
        show_header=False,
    )
    for style in ("bold", None, "dim"):
        table.add_column(style=style)
    for row in (
        ("steps lost", _verdict(str(result.steps_lost), good=not result.steps_lost),
         f"step {result.committed} was committed, resumed from {resumed.resumed_from}"),
        ("bit-identical", _verdict("NO" if failures else "yes", good=not failures),
         f"{result.num_values} values and {num_losses} losses compared"),
        ("bytes per step", _bytes(per_step), "all ranks, mean"),
        ("full checkpoint", _bytes(full), f"{full / per_step:.0f} times that"),
        ("time per step", f"{1000 * reference.step_seconds(1, result.steps):.0f} ms",
         f"{1000 * reference.step_seconds(result.steps + 1, last):.0f} ms after lowdiff was detached"),
        ("training thread", f"{1000 * lowdiff_seconds:.1f} ms per step", "for differentials, mean"),
        ("time to resume", f"{first_step:.1f} s",
         f"launch and attach {attached:.1f}, step {first_step - attached:.1f}"),
    ):  # fmt: skip
        table.add_row(*row)
    console.print(table)
    for failure in failures[:_FAILURES_SHOWN]:
        console.print(failure, style="bold red", markup=False)
    if len(failures) > _FAILURES_SHOWN:
        console.print(f"[red]and {len(failures) - _FAILURES_SHOWN} more[/]")
    console.print(
        f"Picture: {picture}   (seed {result.seed})\n\nTry next, on the run that was killed:"
    )
    commands = [
        (["inspect"], "what can be had?"),
        (["timeline"], "the gradient of each step: which one went wrong?"),
        (["recover", "--step", str(result.steps // 2), "--out", "earlier.pt"], "or any other step"),
    ]
    lines = [
        shlex.join(["lowdiff", name, str(result.run), *options]) for (name, *options), _ in commands
    ]
    for line, (_, what) in zip(lines, commands, strict=True):
        text = f"  {line:<{max(map(len, lines))}}  # {what}"
        console.print(text, markup=False, highlight=False, soft_wrap=True)


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
    for launch, colour, width, label in (
        (result.reference, _PALE, 7.0, "never interrupted"),
        (result.killed, _BEFORE, 1.8, "until it was killed"),
        (result.resumed, _AFTER, 1.8, "after it was resumed"),
    ):
        losses = [float(loss) for loss in launch.losses.values()]
        axes.plot([*launch.losses], losses, color=colour, linewidth=width, label=label)
    kill_step = max(result.killed.losses)
    axes.axvline(kill_step, color=_KILL, linewidth=1.2, linestyle=(0, (4, 3)))
    axes.annotate(
        f"SIGKILL to all {result.world_size} workers\nresumed from step "
        f"{result.resumed.resumed_from}, {result.steps_lost} steps lost",
        xy=(kill_step, 0.74), xycoords=("data", "axes fraction"), xytext=(8, 0),
        textcoords="offset points", color=_KILL, va="top", fontsize=9.5,
    )  # fmt: skip
    axes.axvline(result.steps, color=_MUTED, linewidth=1.0, linestyle=(0, (1, 3)))
    axes.annotate(
        "lowdiff detached", xy=(result.steps, 0.98), xycoords=("data", "axes fraction"),
        xytext=(-6, 0), textcoords="offset points", color=_MUTED, va="top", ha="right", fontsize=8.5,
    )  # fmt: skip
    same = "THE RUNS DIFFER" if result.failures else "every bit agrees"
    axes.set_title(
        f"Killed, resumed, and compared with a run that was not: {same}",
        loc="left", color=_INK, fontsize=12.5, fontweight="bold", pad=12,
    )  # fmt: skip
    axes.set_ylabel("training loss (nats per byte)", color=_INK)
    axes.legend(frameon=False, loc="upper right", labelcolor=_INK)


def _draw_bytes(axes: Axes, result: DemoResult) -> None:
    sizes = [size / 1000 for size in result.stored_bytes.values()]
    axes.bar([*result.stored_bytes], sizes, width=0.75, color=_BEFORE)
    axes.set_title(
        f"One checkpoint a step: {_bytes(result.mean_stored_bytes)} on disk, where a full one has "
        f"{_bytes(result.full_checkpoint_bytes)}",
        loc="left", color=_INK, fontsize=11, pad=8,
    )  # fmt: skip
    axes.set_xlim(0, max(result.reference.losses) + 1)
    axes.set_xlabel("step", color=_INK)
    axes.set_ylabel("kilobytes per step, all ranks", color=_INK)


def _verdict(text: str, *, good: bool) -> str:
    return f"[bold green]{text}[/]" if good else f"[bold red]{text}[/]"


def _bytes(size: float) -> str:
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} GB"
