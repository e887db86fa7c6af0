"""The share of wall time that went into steps that survive, of trainings that fail along a drawn trace.

    python -m benches.bench_effective_time --out DIR [--smoke] [--failures 2] [--arms ...] [--mean-steps 600 1800]

A small GPT is trained by two ranks, each on a node of its own (a staging folder of its own), and fails along a trace
that `lowdiff.tuner.simulate` draws: on average every 600 or every 1,800 steps' time, so every 10 or 30 minutes if a step
took a second. Here a step takes 0.2 to 0.4 s, and times between failures are shorter in proportion. Half of the
failures are SIGKILL of one rank, half are the loss of a node: SIGKILL of its rank with writer and replica, and the
removal of its staging folder. Then all ranks start anew. All arms meet the same failures:

- ``log`` (PowerSGD of rank 4), ``log_copies`` (with ``copies=2``), ``replica``, ``survivors``, with default settings;
- ``torch_save``, by rank 0, and ``dcp`` (``async_save``), of everything, at the interval of Young's formula. Both sync
  their files, because a file in a shared folder that was not does not outlive the node that wrote it.

The effective share is the number of distinct steps at the end, times the time of a step without checkpoints,
compression and failures, over wall time. That step is measured within each life, by a training that takes turns with
it: every 25 s the life's processes are stopped for some steps, and its clock with them.

Restarts do not shrink with the step: with a step of T seconds they weigh 1/T times as much as with one of one second.
``..._start_scaled`` counts the start of processes (up, joined, model made) times T, all else as it was. Processes are
forked from one that has imported PyTorch, as hot spares are; ``--cold`` starts Python anew.

The default has two failures at 600 steps' time and one at 1,800, six arms: two hours with a step of 0.33 s. ``--rows 32``
makes steps, and all times between failures, four times as long: what lowdiff takes of each step weighs less then. A life
that has ended is in ``effective_time.jsonl``, and a call with the same ``--out`` goes on behind it. A step that is
made again must have the loss that it had, bit for bit.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes

from benches import ending
from benches.effective_figures import (
    figures_of,
    life_of,
    plain_seconds,
    refuse_other_bits,
    strikes_of,
)
from benches.effective_life import (
    ARMS,
    COMPRESSED,
    COMPRESSOR,
    LOWDIFF,
    PERIODIC,
    PLAIN,
    ROWS,
    Plan,
)
from benches.effective_reference import Reference
from benches.effective_supervisor import NODE, removed, run, run_whole
from benches.gpt import GPT
from benches.harness import BLUE, GREEN, INK, MUTED, RED, Result, arguments, machine, write
from benches.runs import Places, places
from benches.survivors_life import WORLD_SIZE
from lowdiff.tuner.lost_tail import young_interval
from lowdiff.tuner.simulate import FailureModel, draw_trace

TARGETS = {1800: 0.97, 600: 0.94}
_NODE_SHARE = 0.5
_DRAWS = 1000
#: Steps of each turn, and pairs of turns, that measure the time of a step before all lives.
_PLAIN_STEPS, _PLAIN_PAIRS, _SMOKE_PLAIN_STEPS = 10, 4, 4
#: Of the trainings that measure what a save costs.
_PROBE_INTERVAL, _PROBE_SAVES, _SMOKE_PROBE_SAVES = 8, 7, 2
#: Seconds that stand for a step's in the smoke test's trace, which real steps would make too short.
_SMOKE_CLOCK_SECONDS = 1 / 300
_LABELS = {
    "log": "log", "log_copies": "log, 2 copies", "replica": "replica", "survivors": "survivors",
    "torch_save": "torch.save", "dcp": "DCP async_save",
}  # fmt: skip
#: Parts of wall time, and how they are drawn.
_PARTS = (
    ("effective_share", "steps that stand", GREEN),
    ("slower_share", "saving, slower steps", BLUE),
    ("restart_share", "restarts", MUTED),
    ("lost_share", "steps lost", RED),
)


@dataclass(frozen=True, slots=True)
class Drawn:
    """A trace of failures.

    Attributes:
        gaps_steps: Between failures, and from the last one to the end, in steps' times.
        kinds: `PROCESS` or `NODE`, of each failure.
        victims: Rank of each.
    """

    gaps_steps: tuple[float, ...]
    kinds: tuple[int, ...]
    victims: tuple[int, ...]


def drawn(mean_steps: int, failures: int, seed: int) -> Drawn:
    """Draw a trace with a failure every so many steps' times on average, half of them of nodes.

    With exponential gaps, one more than failures, that are stretched to ``failures`` mean gaps in all, this is a trace
    of just so many failures in that time. Of several draws the first with the right number of each kind counts; an odd one is a node's.
    """
    rng = np.random.default_rng((seed, mean_steps))
    model = FailureModel(float(mean_steps), node_share=_NODE_SHARE, group_share=0.0)
    trace = draw_trace(model, failures=failures + 1, trials=_DRAWS, rng=rng)
    kinds = trace.kinds[:, :-1]
    chosen = int(np.argmax((kinds == NODE).sum(axis=1) == math.ceil(failures * _NODE_SHARE)))
    gaps = trace.gaps[chosen]
    stretched = gaps * (failures * mean_steps / gaps.sum())
    victims = rng.integers(WORLD_SIZE, size=failures)
    return Drawn(tuple(stretched.tolist()), tuple(kinds[chosen].tolist()), tuple(victims.tolist()))


class Bench:
    """Trainings of all arms, one after the other, in folders of their own.

    Args:
        args: Of the command line.
        where: Their folders.
        plain: Takes turns with them.
    """

    def __init__(self, args: argparse.Namespace, where: Places, plain: Reference) -> None:
        self._args, self._where, self._plain = args, where, plain
        self._turn_steps = _SMOKE_PLAIN_STEPS if args.smoke else _PLAIN_STEPS
        self._number = 0

    def save_seconds(self, arm: str) -> float:
        """Time that a save costs: its call, or all that it takes of the steps, whichever is more."""
        plan = self._plan(arm, _PROBE_INTERVAL)
        saves = _SMOKE_PROBE_SAVES if self._args.smoke else _PROBE_SAVES
        before = self._plain.step_seconds(self._turn_steps)
        lines = run_whole(plan, saves * _PROBE_INTERVAL)
        one = (before + self._plain.step_seconds(self._turn_steps)) / 2
        removed(plan)
        calls = [line.checksum / 1e9 for line in lines if line.what == "saved" and line.rank == 0]
        ends = [line.when for line in lines if line.what == "saved" and line.rank == 0]
        extra = [b - a - _PROBE_INTERVAL * one for a, b in pairwise(ends)]
        return max(statistics.median(calls), statistics.median(extra))

    def started(self) -> dict[str, Any]:
        """Measure before all lives; this fixes when failures come and how often peers save."""
        one, compressed = self._steps_seconds()
        begun = time.perf_counter()
        subprocess.run([sys.executable, "-c", "import torch, lowdiff, torch._dynamo"], check=True)
        cold = time.perf_counter() - begun
        return {
            "step_seconds": one,
            "compressed_step_seconds": compressed,
            "save_seconds": {arm: self.save_seconds(arm) for arm in PERIODIC if arm in self._args.arms},
            "clock_seconds": _SMOKE_CLOCK_SECONDS if self._args.smoke else one,
            "cold_import_seconds": cold,
        }  # fmt: skip

    def _steps_seconds(self) -> tuple[float, float]:
        """A step without checkpoints, and one with compression, measured in turns."""
        with Reference(self._plan(COMPRESSED, 0)) as compressed:
            pairs = [
                (self._plain.step_seconds(self._turn_steps), compressed.step_seconds(self._turn_steps))
                for _ in range(_PLAIN_PAIRS)
            ]  # fmt: skip
        plain, other = map(statistics.mean, zip(*pairs, strict=True))
        return plain, other

    def live(self, arm: str, mean_steps: int, start: Mapping[str, Any]) -> dict[str, Any]:
        """Train one arm along its trace."""
        clock = start["clock_seconds"]
        interval = 0
        if arm in PERIODIC:
            best = young_interval(1 / (mean_steps * clock), start["save_seconds"][arm])
            interval = max(1, round(best / start["step_seconds"]))
        trace = drawn(mean_steps, self._args.failures[mean_steps], self._args.seed)
        gaps = [clock * gap for gap in trace.gaps_steps]
        strikes = strikes_of(gaps, trace.kinds, trace.victims)
        plan = self._plan(arm, interval)
        ran = run(plan, strikes, sum(gaps), self._plain, cold=self._args.cold)
        removed(plan)
        again = refuse_other_bits(arm, ran.struck, ran.lines)
        compression = start["compressed_step_seconds"] / start["step_seconds"]
        return {
            "arm": arm, "mean_steps": mean_steps, "interval": interval, "gaps_seconds": gaps,
            "kinds": trace.kinds, "victims": trace.victims, "losses_compared": again,
            "plain_seconds": ran.plain_seconds, "compressed_over_plain": compression,
            **life_of(ran.began, ran.struck, ran.lines).as_row(),
        }  # fmt: skip

    def _plan(self, arm: str, interval: int) -> Plan:
        self._number += 1
        name = f"{self._number}-{arm}"
        folder = self._where.run.with_name(name)
        return Plan(
            arm, folder, self._where.staging / name, interval, self._args.smoke, self._args.rows
        )


def measured(ended: Path, args: argparse.Namespace, bench: Bench) -> None:
    """Add a line for everything that has none yet."""
    told = {key: str(getattr(args, key)) for key in ("smoke", "seed", "failures", "rows", "cold")}
    known = rows(ended)
    if not known:
        _add(ended, {"start": bench.started(), "told": told})
    start = rows(ended)[0]
    assert start["told"] == told, f"{ended} was begun with {start['told']}"
    done = {(row["arm"], row["mean_steps"]) for row in known[1:]}
    for mean_steps, arm in lives_of(args):
        if (arm, mean_steps) in done:
            continue
        row = bench.live(arm, mean_steps, start["start"])
        _add(ended, row)
        shown = {key: round(value, 4) for key, value in figures_of(row, [row]).items()}
        print(f"{arm:<11} {mean_steps:>5} {json.dumps(shown)}", flush=True)


def lives_of(args: argparse.Namespace) -> list[tuple[int, str]]:
    """Lives in order; in the smoke test each arm has one, and survivors all."""
    every = [(mean_steps, arm) for mean_steps in args.mean_steps for arm in args.arms]
    if not args.smoke:
        return every
    return [(m, arm) for m, arm in every if m == args.mean_steps[0] or arm == "survivors"]


def _add(ended: Path, row: Mapping[str, Any]) -> None:
    with ended.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def rows(ended: Path) -> list[dict[str, Any]]:
    """Lines of the file; the first one has what was measured before all lives."""
    if not ended.exists():
        return []
    return [json.loads(line) for line in ended.read_text(encoding="utf-8").splitlines()]


def summary_of(lives: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Figures of each life, and the best of lowdiff's at each mean time between failures."""
    found: dict[str, Any] = {}
    for mean_steps in sorted({row["mean_steps"] for row in lives}):
        own = [row for row in lives if row["mean_steps"] == mean_steps]
        for row in own:
            same_arm = [other for other in lives if other["arm"] == row["arm"]]
            for name, value in figures_of(row, same_arm).items():
                found[f"{row['arm']}/{mean_steps}/{name}"] = value
        arms = [row["arm"] for row in own if row["arm"] in LOWDIFF]
        for name in ("effective_share", "effective_share_start_scaled"):
            shares = {arm: found[f"{arm}/{mean_steps}/{name}"] for arm in arms}
            if shares:
                key = name.replace("share", f"share_{mean_steps // 60}min")
                found[key] = max(shares.values())
                found[f"{key}_arm"] = max(shares, key=lambda arm: shares[arm])
    plain = [plain_seconds(row) for row in lives]
    found["step_seconds"] = statistics.mean(plain)
    found["step_seconds_least"], found["step_seconds_most"] = min(plain), max(plain)
    found["losses_compared"] = sum(row["losses_compared"] for row in lives)
    found["bit_identical"] = True  # asserted for every life
    return found


def draw(axes: Axes, result: Result) -> None:
    """Show into what wall time went: a bar for each arm and mean time between failures."""
    lives = result.samples["lives"]
    arms = [arm for arm in ARMS if any(row["arm"] == arm for row in lives)]
    means = sorted({row["mean_steps"] for row in lives})
    shown = [row for row in lives if row["arm"] in arms]
    useful = []
    for row in shown:
        mean = means.index(row["mean_steps"])
        height = len(arms) - 1 - arms.index(row["arm"]) + 0.2 - 0.4 * mean
        key = f"{row['arm']}/{row['mean_steps']}"
        left = 0.0
        for part, label, colour in _PARTS:
            width = 100 * max(0.0, result.summary[f"{key}/{part}"])
            is_first = row is shown[0]
            axes.barh(
                height, width, left=left, height=0.36, color=colour,
                label=label if is_first else None,
            )  # fmt: skip
            left += width
        useful.append(result.summary[f"{key}/effective_share"])
        axes.text(
            100.3, height, f"{100 * useful[-1]:.1f} %, every {row['mean_steps'] / 60:.0f} min",
            va="center", color=INK, fontsize=8,
        )  # fmt: skip
    axes.set_xlim(max(0.0, math.floor(100 * min(useful) - 3)), 100)
    axes.set_yticks(range(len(arms)), [_LABELS[arm] for arm in reversed(arms)])
    axes.set_xlabel("% of wall time; a minute of the trace is 60 steps' times", color=INK)
    axes.legend(frameon=False, fontsize=8, ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.14))
    axes.set_title(
        "Effective training time of two ranks under failures, half of them of nodes",
        loc="left", color=INK, fontsize=11.5, fontweight="bold",
    )  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
    """Run the bench."""
    parser = arguments((__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--failures",
        type=int,
        default=2,
        help="at the first mean time; at longer ones half as many",
    )
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--mean-steps", type=int, nargs="+", default=[600, 1800])
    parser.add_argument("--rows", type=int, default=ROWS, help="of a batch; a step takes as long")
    parser.add_argument("--cold", action="store_true", help="start Python anew at a restart")
    args = parser.parse_args(argv)
    if args.smoke:
        args.failures = 1
    first, *longer = args.mean_steps
    args.failures = {first: args.failures} | dict.fromkeys(longer, math.ceil(args.failures / 2))
    torch.set_num_threads(1)
    facts = machine()
    args.out.mkdir(parents=True, exist_ok=True)
    ended = args.out / "effective_time.jsonl"
    told = Plan(PLAIN, ended, ended, 0, args.smoke, args.rows)
    with places(args.out) as where, Reference(told) as plain:
        measured(ended, args, Bench(args, where, plain))
    start, *lives = rows(ended)
    result = Result(
        name="effective_time",
        settings={
            **{key: value for key, value in vars(args).items() if key != "out"},
            "parameters": sum(p.numel() for p in GPT(told.config).parameters()),
            "ranks": WORLD_SIZE,
            "compressor": repr(COMPRESSOR),
            "node_share": _NODE_SHARE,
            "targets": TARGETS,
            **start["start"],
        },
        seed=args.seed,
        machine=facts,
        samples={"lives": lives},
        summary=summary_of(lives),
    )  # fmt: skip
    write(result, args.out, draw)
    for mean_steps, target in TARGETS.items():
        share = result.summary.get(f"effective_share_{mean_steps // 60}min")
        if share is not None:
            verdict = "met" if share >= target else "MISSED"
            print(f"effective share at {mean_steps} steps {share:.4f}, target {target}: {verdict}")
    ended.unlink()


if __name__ == "__main__":
    ending.run(main)
