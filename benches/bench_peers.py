"""Checkpoints at every step by lowdiff and by what people use today, side by side.

    python -m benches.bench_peers --out DIR [--smoke] [--systems ...] [--models 10M,60M] [--ranks 1,2]

A cell is a system, a size of model and a number of ranks. In processes of its own and in the system's
virtual environment, blocks of steps without checkpoints and with one after every step take turns in
ABBA order: twins of the same training on the same data. A block with checkpoints ends when all is
where the system puts it, and that wait counts. Where a system compresses gradients, its twin
compresses them in the same way, and a block per round compresses nothing. Then the trainer is killed,
the last step is restored in a new process and compared with the twin that was never saved, then once
more from files alone; other trainings are killed at random instants and while they save; and histories
of several lengths are recovered from files that are not in the page cache.

Every finished cell is in the JSON at once; cells that are there under the same settings are skipped.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from benches.harness import BLUE, INK, MUTED, PALE, Result, arguments, machine, save
from benches.peers.cells import FIRST_KILL, Plan, Settings, carry_out, is_done, plan_cells, settled
from benches.peers.systems import QUICK, SYSTEMS
from benches.peers.training import MODELS
from benches.tables import excess

NAME = "peers_overhead"


def results_of(path: Path) -> dict[str, Any]:
    """Cells that are there already."""
    if not path.exists():
        return {}
    cells: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))["samples"]
    return cells


def result_from(cells: Mapping[str, Any], seed: int, facts: Mapping[str, Any]) -> Result:
    """The whole bench as it stands."""
    ran = {name: cell["summary"] for name, cell in cells.items() if cell["summary"]}
    identical = [summary["bit_identical"] for summary in ran.values() if "bit_identical" in summary]
    return Result(
        name=NAME,
        settings={
            "optimizer": "AdamW",
            "models": {
                name: {
                    "layers": size.shape.layers,
                    "width": size.shape.width,
                    "sequences": size.sequences,
                }
                for name, size in MODELS.items()
            },
            "systems": {
                name: {"label": system.label, "setting": system.setting, "fsync": system.fsync}
                for name, system in SYSTEMS.items()
            },
        },
        seed=seed,
        machine=facts,
        samples=cells,
        summary={
            **{
                f"{name}/{key}": value
                for name, found in ran.items()
                for key, value in found.items()
            },
            "cells": len(cells),
            "cells_that_cannot_run": len(cells) - len(ran),
            "bit_identical": bool(identical) and all(identical),
        },
    )


def draw(axes: Axes, result: Result) -> None:
    """The ratio of every cell that ran, as a bar with its spread."""
    shown = [(name, c["summary"]) for name, c in result.samples.items() if "ratio" in c["summary"]]
    shown.sort(key=lambda item: -item[1]["ratio"])
    for height, (name, summary) in enumerate(shown):
        middle = 100 * (summary["ratio"] - 1)
        spread = [100 * (summary[f"ratio_{end}"] - 1) for end in ("low", "high")]
        colour = BLUE if "/lowdiff" in name else MUTED
        axes.plot(spread, [height, height], color=PALE, linewidth=6, solid_capstyle="butt")
        axes.plot([middle], [height], "o", color=colour, markersize=6)
        if "ratio_over_dense" in summary:
            with_compression = 100 * (summary["ratio_over_dense"] - 1)
            axes.plot(
                [with_compression], [height], "o", color=colour, markersize=6, fillstyle="none"
            )
            spread.append(with_compression)
        axes.annotate(
            excess(summary["ratio"]), (max(spread), height), xytext=(6, 0), textcoords="offset points",
            va="center", color=INK, fontsize=7,
        )  # fmt: skip
    labels = [f"{SYSTEMS[name.split('/')[1]].label}, {name.split('/')[0]}" for name, _ in shown]
    axes.set_yticks(range(len(shown)), labels, fontsize=7)
    axes.set_xscale("symlog", linthresh=10)
    axes.margins(x=0.15)
    axes.set_xlabel("training time with a checkpoint at every step, over that without: excess in %")
    axes.set_title(
        "A checkpoint at every step, drained; dot: median, bar: least to greatest,\n"
        "circle: over training that does not compress, either",
        loc="left", color=INK, fontsize=10, fontweight="bold",
    )  # fmt: skip


def say(plan: Plan, cell: Mapping[str, Any]) -> None:
    """One line for a finished cell."""
    found = cell["summary"]
    if "cannot_run" in cell:
        text = f"cannot run here: {cell['cannot_run']}"
    elif "ratio" in found:
        text = (
            f"{excess(found['ratio'])} time, {found['bytes_per_step'] / 1e6:.2f} MB a step, "
            f"{found['steps_lost_mean']:.1f} steps lost, last bits back: {found['bit_identical']}"
        )
    else:
        text = f"{found['bytes_per_step'] / 1e6:.2f} MB a step"
    print(f"{plan.name}: {text} ({cell['seconds']:.0f} s)", flush=True)


def settings_from(args: argparse.Namespace) -> Settings:
    """How to measure, from the arguments."""
    if args.smoke:
        return Settings(args.seed, 2, 1, 2, FIRST_KILL, (), args.timeout)
    history = tuple(int(steps) for steps in args.history.split(",") if steps)
    return Settings(
        args.seed,
        args.block_steps,
        args.rounds,
        args.kills,
        args.last_kill,
        history,
        args.timeout,
    )


def parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    """The arguments."""
    parser = arguments((__doc__ or "").split("\n")[0])
    known = ", ".join(SYSTEMS)
    parser.add_argument(
        "--systems", help=f"by comma, or 'all'; quick: {','.join(QUICK)}; of {known}"
    )
    parser.add_argument("--models", default="10M", help=f"by comma, of {', '.join(MODELS)}")
    parser.add_argument("--ranks", default="1", help="numbers of processes, by comma")
    parser.add_argument("--again", action="store_true", help="measure cells that are done, too")
    parser.add_argument(
        "--environments", type=Path, default=Path(".venv-peers"), help="folder of the competitors'"
    )
    parser.add_argument("--block-steps", type=int, default=8)
    parser.add_argument(
        "--rounds", type=int, default=0, help="of ABBA; 0: as the model's size asks"
    )
    parser.add_argument(
        "--kills",
        type=int,
        default=0,
        help="trainings killed, every other one while it saves; 0: as the model's size asks",
    )
    parser.add_argument(
        "--last-kill",
        type=int,
        default=12,
        help="in which step at the latest, behind a first block",
    )
    parser.add_argument(
        "--history", default="", help="steps to recover from, by comma; else as size and ranks ask"
    )
    parser.add_argument("--timeout", type=float, default=1800.0, help="seconds for a phase")
    args = parser.parse_args(argv)
    if args.kills < 0:
        parser.error("--kills: at least 1, or 0")
    if args.last_kill < FIRST_KILL:
        parser.error(f"--last-kill: at least {FIRST_KILL}")
    args.systems = {None: list(QUICK), "all": list(SYSTEMS)}.get(
        args.systems, (args.systems or "").split(",")
    )
    args.models = ["tiny"] if args.smoke else args.models.split(",")
    args.ranks = [int(number) for number in args.ranks.split(",")]
    for given, of in ((args.systems, SYSTEMS), (args.models, MODELS)):
        if unknown := [name for name in given if name not in of]:
            parser.error(f"unknown: {', '.join(unknown)}; known are {', '.join(of)}")
    return args


def main(argv: Sequence[str] | None = None) -> None:
    """Run the bench."""
    args = parsed(argv)
    # So that a cell that is cut short is cleared away, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    facts = machine()
    wanted = settings_from(args)
    args.out.mkdir(parents=True, exist_ok=True)
    cells = results_of(args.out / f"{NAME}.json")
    for plan in plan_cells(args.systems, args.models, args.ranks):
        settings = settled(wanted, plan)
        if is_done(cells.get(plan.name), settings) and not args.again:
            print(f"{plan.name}: done before")
            continue
        cells[plan.name] = carry_out(plan, settings, args.environments, args.out)
        save(result_from(cells, args.seed, facts), args.out, draw)
        say(plan, cells[plan.name])
    print(args.out / f"{NAME}.json")


if __name__ == "__main__":
    main()
