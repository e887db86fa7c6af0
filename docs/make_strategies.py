"""Write the strategies into README and docs/choosing.md, and their picture: ``python docs/make_strategies.py``.

Each strategy is one value below: a row of each table, and a lane of the picture.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

DOCS = Path(__file__).parent
PICTURES = {theme: DOCS / f"strategies-{theme}.svg" for theme in ("light", "dark")}
#: Of the defaults: a full snapshot every 100 steps, of which two are kept; batches of 16 steps.
SNAPSHOTS, NOW, AT_RISK = (0, 100), 150, 32
FAILURES = ("a process", "all processes", "a node", "power")


@dataclass(frozen=True, slots=True)
class Strategy:
    """A strategy, as a reader has to know it.

    Attributes:
        name: As `Settings.strategy` has it.
        code: How it is chosen, as Markdown.
        keeps: In the picture, below the name.
        is_logged: Whether every step since the older snapshot becomes durable.
        keeps_steps: Whether each step since then is in memory, instead of the newest alone.
        outlives: Whether the newest state lies in memory that outlives the processes.
        lost: Most steps that had ended on every rank and are lost, by the failures of `FAILURES`.
        choose: The first column of README's table.
        back: What comes back.
        cost: What a step costs, on a CPU and on an accelerator.
    """

    name: str
    code: str
    keeps: str
    is_logged: bool
    keeps_steps: bool
    outlives: bool
    lost: tuple[int, int, int, int]
    choose: str
    back: str
    cost: str


STRATEGIES = (
    Strategy(
        name="log",
        code="`compressor=PowerSGD(4)`",
        keeps="each compressed gradient",
        is_logged=True,
        keeps_steps=True,
        outlives=True,
        lost=(0, 0, 32, 32),
        choose="going back to any step",
        back="the last 100 to 200",
        cost="+4 %, compressing; +49 ms",
    ),
    Strategy(
        name="gradients",
        code='`strategy="gradients"`',
        keeps="each gradient as it is, beside two images",
        is_logged=False,
        keeps_steps=True,
        outlives=True,
        lost=(0, 0, 200, 200),
        choose="training as it is, any step back",
        back="the last 100 to 200, in memory",
        cost="+5 to 7 %; not run",
    ),
    Strategy(
        name="replica",
        code="no compressor",
        keeps="the newest state, in a process of its own",
        is_logged=False,
        keeps_steps=False,
        outlives=True,
        lost=(0, 0, 200, 200),
        choose="training as it is",
        back="the newest, 2 snapshots",
        cost="+4 to 14 %; **+313 ms or more**",
    ),
    Strategy(
        name="survivors",
        code='`strategy="survivors"`',
        keeps="nothing, until a process fails",
        is_logged=False,
        keeps_steps=False,
        outlives=False,
        lost=(0, 100, 0, 200),
        choose="ranks that fail singly",
        back="the newest, 2 snapshots",
        cost="+0.6 %; not run",
    ),
)


def readme_rows(strategies: Sequence[Strategy] = STRATEGIES) -> str:
    """Return README's table: which strategy."""
    heads = (
        "strategy",
        "choose it for",
        "comes back",
        "lost: all killed; power",
        "a step: CPU; [H200](docs/benchmarks.md#the-first-run)",
    )
    rows = [
        (f"`{s.name}`: {s.code}", s.choose, s.back, f"{s.lost[1]}; {s.lost[3]}", s.cost)
        for s in strategies
    ]
    return _table(heads, rows)


def choosing_rows(strategies: Sequence[Strategy] = STRATEGIES) -> str:
    """Return the table of docs/choosing.md: what each failure costs."""
    rows = [
        (f"`{s.name}`", *("none" if lost == 0 else f"at most {lost}" for lost in s.lost))
        for s in strategies
    ]
    return _table(("steps that had ended and are lost, if this dies", *FAILURES), rows)


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


@dataclass(frozen=True, slots=True)
class _Theme:
    ink: str
    muted: str
    line: str
    disk: str
    memory: str
    costs: tuple[str, str, str]


_THEMES = {
    "light": _Theme("#1f2933", "#616e7c", "#cbd2d9", "#1f77b4", "#e8890c", ("#2a9d5c", "#c98a00", "#c0392b")),
    "dark": _Theme("#e4e7eb", "#9aa5b1", "#3e4c59", "#6cb2eb", "#f6ad55", ("#48bb78", "#ecc94b", "#fc8181")),
}  # fmt: skip


def draw(path: Path, theme: str, strategies: Sequence[Strategy] = STRATEGIES) -> None:
    """Draw what each strategy keeps, a lane each, and what each failure costs, as SVG without background."""
    colours = _THEMES[theme]
    # Without dates and random names, so that the same strategies give the same file.
    with matplotlib.rc_context({"svg.hashsalt": "lowdiff", "font.family": "DejaVu Sans"}):
        figure = Figure(figsize=(9.6, 0.9 + 0.72 * len(strategies)))
        FigureCanvasSVG(figure)
        axes = figure.add_axes((0, 0, 1, 1))
        axes.set_xlim(0, 100)
        axes.set_ylim(-0.95, len(strategies) + 0.35)
        axes.axis("off")
        _draw_heads(axes, colours, len(strategies))
        for lane, strategy in enumerate(strategies):
            _draw_lane(axes, colours, len(strategies) - 1 - lane, strategy)
        figure.savefig(path, transparent=True, metadata={"Date": None, "Creator": None})


def _at(step: int) -> float:
    """Return where a step stands in the picture."""
    return 27 + 33 * step / NOW


def _column(number: int) -> float:
    return 69 + 8.8 * number


def _draw_heads(axes: Axes, colours: _Theme, num_lanes: int) -> None:
    top = num_lanes + 0.08
    heads = (
        (2, "strategy"),
        (_at(0) - 1, "what can be had"),
        (_column(0) - 3.3, "steps lost that had ended, if this fails"),
    )
    for x, text in heads:
        axes.text(x, top, text, color=colours.ink, fontsize=10, fontweight="bold", va="center")
    for number, failure in enumerate(FAILURES):
        axes.text(
            _column(number),
            top - 0.42,
            failure,
            color=colours.muted,
            fontsize=8.5,
            ha="center",
            va="center",
        )
    for step, text in ((0, "snapshot"), (100, "snapshot"), (NOW, "now")):
        axes.text(
            _at(step), top - 0.42, text, color=colours.muted, fontsize=8.5, ha="center", va="center"
        )
    bottom = -0.7
    for x, mark, colour, style, text in (
        (2.5, "|", colours.disk, "full", "a step, kept"),
        (18, "s", colours.disk, "full", "on disk"),
        (27, "s", colours.memory, "full", "in memory that outlives the processes"),
        (56, "s", colours.memory, "none", "in the processes, saved when one of them fails"),
    ):
        axes.plot(
            [x], [bottom], marker=mark, color=colour, fillstyle=style, markersize=7,
            markeredgewidth=2, linestyle="none",
        )  # fmt: skip
        axes.text(x + 1.3, bottom, text, color=colours.muted, fontsize=8.5, va="center")


def _draw_lane(axes: Axes, colours: _Theme, y: int, strategy: Strategy) -> None:
    axes.plot([1, 99], [y - 0.4, y - 0.4], color=colours.line, linewidth=0.6)
    axes.text(
        2, y + 0.17, strategy.name, color=colours.ink, fontsize=11, fontweight="bold", va="center"
    )
    axes.text(2, y - 0.14, strategy.keeps, color=colours.muted, fontsize=7.6, va="center")
    axes.plot([_at(0), _at(NOW)], [y, y], color=colours.line, linewidth=1.2, zorder=0)
    if strategy.keeps_steps:
        durable = NOW - AT_RISK if strategy.is_logged else 2
        for colour, first, end in ((colours.disk, 2, durable), (colours.memory, durable, NOW)):
            steps = [_at(step) for step in range(first, end, 2)]
            axes.plot(
                steps, [y] * len(steps), marker="|", color=colour, markersize=13,
                markeredgewidth=1.1, linestyle="none",
            )  # fmt: skip
    for step in SNAPSHOTS:
        axes.plot([_at(step)], [y], marker="s", color=colours.disk, markersize=11)
    style = "full" if strategy.outlives else "none"
    axes.plot(
        [_at(NOW)], [y], marker="s", color=colours.memory, fillstyle=style, markersize=11,
        markeredgewidth=1.8,
    )  # fmt: skip
    for number, lost in enumerate(strategy.lost):
        colour = colours.costs[0 if lost == 0 else 1 if lost <= AT_RISK else 2]
        box = FancyBboxPatch(
            (_column(number) - 3.3, y - 0.2), 6.6, 0.4, boxstyle="round,pad=0,rounding_size=0.12",
            mutation_aspect=0.1, facecolor=colour, alpha=0.16, linewidth=0,
        )  # fmt: skip
        axes.add_patch(box)
        text = "0" if lost == 0 else f"≤ {lost}"
        axes.text(
            _column(number),
            y,
            text,
            color=colour,
            fontsize=11,
            fontweight="bold",
            ha="center",
            va="center",
        )


def written(text: str, table: str) -> str:
    """Return a document whose one table with the same first column's head is this one."""
    head = table.partition(" | ")[0]
    old = re.findall(rf"^{re.escape(head)} \|.*\n(?:\|.*\n)*", text, re.MULTILINE)
    assert len(old) == 1, f"{len(old)} tables begin with {head}"
    return text.replace(old[0], table)


def tables() -> dict[Path, str]:
    """Return documents, each with the table that it has of the strategies."""
    return {DOCS.parent / "README.md": readme_rows(), DOCS / "choosing.md": choosing_rows()}


def main() -> None:
    """Write all of it."""
    for path, table in tables().items():
        path.write_text(written(path.read_text(), table))
    for theme, path in PICTURES.items():
        draw(path, theme)


if __name__ == "__main__":
    main()
