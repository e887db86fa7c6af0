"""Picture of the demo; needs matplotlib."""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from lowdiff.demo.report import size_of
from lowdiff.demo.run import DemoResult

_INK, _MUTED, _PALE = "#1f2933", "#7b8794", "#c3cdd8"
_BEFORE, _AFTER, _KILL = "#1f77b4", "#2a9d5c", "#d64545"


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
        f"One checkpoint a step: {size_of(result.mean_stored_bytes)} on disk, where a full one has "
        f"{size_of(result.full_checkpoint_bytes)}",
        loc="left", color=_INK, fontsize=11, pad=8,
    )  # fmt: skip
    axes.set_xlim(0, max(result.reference.losses) + 1)
    axes.set_xlabel("step", color=_INK)
    axes.set_ylabel("kilobytes per step, all ranks", color=_INK)
