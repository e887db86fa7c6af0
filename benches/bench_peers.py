"""Checkpoints at every step by lowdiff and by what people use today, side by side.

    python -m benches.bench_peers --out DIR [--smoke] [--systems ...] [--models 10M,60M] [--ranks 1,2]

A cell is a system, a size of model and a number of ranks. In processes of its own and in the system's
virtual environment, blocks of steps without checkpoints and with one after every step take turns in
ABBA order: twins of the same training on the same data. A block with checkpoints ends when all is
where the system puts it, and that wait counts. Where a system compresses gradients, its twin
compresses them in the same way, and a block per round compresses nothing. Then the trainer is killed,
the last step is restored in a new process and compared with the twin that was never saved, then once
more from files alone; other trainings are killed at random instants and while they save; and what they
saved 10, 100 and 1000 steps after a full snapshot is recovered, files not from the page cache.

Every finished cell is in the JSON at once; cells that are there under the same settings are skipped.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from benches import ending
from benches.harness import BLUE, INK, MUTED, PALE, Result, arguments, machine, save
from benches.peers.cells import FIRST_KILL, Plan, Settings, carry_out, is_done, plan_cells, settled
from benches.peers.systems import QUICK, SYSTEMS
from benches.peers.training import MODELS
from benches.tables import excess

NAME = "peers_overhead"
#: Of a size and a number of ranks, in the picture.
_MARKS = ("o", "s", "^", "D")
_TICKS = (0, 5, 10, 20, 50, 100, 200, 500)


def results_of(path: Path) -> dict[str, Any]:
    """Cells that are there already."""
    if not path.exists():
        return {}
    cells: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))["samples"]
    return cells


def result_from(cells: Mapping[str, Any], seed: int, facts: Mapping[str, Any]) -> Result:
    """The whole bench as it stands."""
    ran = {name: cell["summary"] for name, cell in cells.items() if cell["summary"]}
    processors = sorted({cell["machine"]["processor"] for cell in cells.values()})
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
        machine={**facts, "processor": " and ".join(processors)},
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
    """A row for each system: the ratio of each of its cells that ran, with its spread."""
    shown = [(c["plan"], c["summary"]) for c in result.samples.values() if "ratio" in c["summary"]]
    groups = sorted({(plan["model"], plan["num_ranks"]) for plan, _ in shown})
    marks = dict(zip(groups, cycle(_MARKS), strict=False))
    ratios: dict[str, list[float]] = {}
    for plan, summary in shown:
        ratios.setdefault(plan["system"], []).append(summary["ratio"])
    systems = sorted(ratios, key=lambda name: -statistics.median(ratios[name]))
    for plan, summary in shown:
        group = plan["model"], plan["num_ranks"]
        place = (groups.index(group) + 1) / (len(groups) + 1)
        height = systems.index(plan["system"]) + 0.5 - place
        colour = BLUE if plan["system"].startswith("lowdiff") else MUTED
        spread = [100 * (summary[f"ratio_{end}"] - 1) for end in ("low", "high")]
        axes.plot(
            spread, [height, height], color=PALE, linewidth=3, solid_capstyle="butt", zorder=1
        )
        for key, fill in (("ratio", "full"), ("ratio_over_dense", "none")):
            if key in summary:
                axes.plot(
                    [100 * (summary[key] - 1)], [height], marks[group],
                    color=colour, markersize=5, fillstyle=fill,
                )  # fmt: skip
    for (model, num_ranks), mark in marks.items():
        ranks = "rank" if num_ranks == 1 else "ranks"
        axes.plot([], [], mark, color=INK, markersize=5, label=f"{model}, {num_ranks} {ranks}")
    axes.legend(loc="lower left", fontsize=7, frameon=False)
    axes.set_yticks(range(len(systems)), [SYSTEMS[name].label for name in systems], fontsize=8)
    axes.set_xscale("symlog", linthresh=10)
    axes.set_xticks(_TICKS, [f"{tick} %" for tick in _TICKS], fontsize=8)
    axes.grid(axis="x", color=PALE, linewidth=0.5)
    axes.set_xlabel("more training time with a checkpoint at every step than without", fontsize=8)
    axes.set_title(
        "A checkpoint at every step, drained; mark: median, bar: least to greatest,\n"
        "open mark: with snapshots, on the disk, over training that does not compress",
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
        return Settings(args.seed, 2, 1, 1, FIRST_KILL, (), args.timeout)
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
    facts = machine()
    wanted = settings_from(args)
    args.out.mkdir(parents=True, exist_ok=True)
    cells = results_of(args.out / f"{NAME}.json")
    for plan in plan_cells(args.systems, args.models, args.ranks):
        settings = settled(wanted, plan)
        if is_done(cells.get(plan.name), settings, facts["processor"]) and not args.again:
            print(f"{plan.name}: done before")
            continue
        cells[plan.name] = carry_out(plan, settings, args.environments, args.out)
        save(result_from(cells, args.seed, facts), args.out, draw)
        say(plan, cells[plan.name])
    print(args.out / f"{NAME}.json")
    if inexact := [name for name, cell in cells.items() if is_inexact(cell)]:
        sys.exit(f"other bits came back than were saved: {', '.join(inexact)}")


def is_inexact(cell: Mapping[str, Any]) -> bool:
    """Whether lowdiff broke its promise; that others break theirs is a result."""
    is_ours = cell["plan"]["system"].startswith("lowdiff")
    return is_ours and not cell["summary"].get("bit_identical", True)


if __name__ == "__main__":
    ending.run(main)
