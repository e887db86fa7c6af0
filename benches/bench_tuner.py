"""What the tuner's choice wastes, against every setting of a grid.

    python -m benches.bench_tuner --out DIR [--smoke]

First a training is run through several lives here, killed by SIGKILL in between, the last time with
its staging memory wiped, and the tuner reads its costs from what the run recorded of itself. Then
every setting of a grid, and the tuner's, is scored by the simulator on one shared trace of failures,
half of which wipe staging. The newest state must be recovered bit for bit.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import shutil
import signal
from collections.abc import Sequence
from dataclasses import asdict

import numpy as np
from matplotlib.axes import Axes

import lowdiff
from benches import ending
from benches.gpt import GPTConfig
from benches.harness import (
    BLUE,
    INK,
    MUTED,
    PALE,
    RED,
    Result,
    arguments,
    machine,
    write,
)  # fmt: skip
from benches.replay_arms import digest
from benches.runs import Places, places
from benches.tables import excess
from benches.tuner_life import LifePlan, live
from lowdiff.persistence.files.locks import FileLock
from lowdiff.persistence.files.paths import RunFolder, StagingFolder
from lowdiff.persistence.run.fences import read_run_id
from lowdiff.persistence.staging.measurements import read_all_measurements
from lowdiff.tuner.choice import Limits, Setting, recommend
from lowdiff.tuner.costs import effective_share
from lowdiff.tuner.failures import FailureRates
from lowdiff.tuner.measured import Measured, MeasuredIncarnation, measure
from lowdiff.tuner.simulate import FailureModel, Simulated, Trace, draw_trace, simulate
from lowdiff.tuner.strategies import lowdiff as strategy_of

_MODEL = GPTConfig(vocabulary=4096, context=128, layers=6, heads=4, width=256)
_SMOKE_MODEL = GPTConfig(layers=1, heads=2, width=32, context=16)
_SNAPSHOT_EVERY, _BATCH = 20, 4
_TRIALS = 4
_BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128)
TARGET = 1.05


def run_lives(args: argparse.Namespace, where: Places) -> list[MeasuredIncarnation]:
    """Train through kills and return what the run recorded."""
    model = _SMOKE_MODEL if args.smoke else _MODEL
    rows = 1 if args.smoke else 8
    context = multiprocessing.get_context("spawn")
    for number, until in enumerate(args.ends):
        last = number == len(args.ends) - 1
        plan = LifePlan(where, model, until, not last, _SNAPSHOT_EVERY, _BATCH, rows, args.seed)
        process = context.Process(target=live, args=(plan,))
        process.start()
        process.join()
        assert process.exitcode == (0 if last else -signal.SIGKILL), process.exitcode
        if number == len(args.ends) - 2:
            _wipe_staging(where)
    state = lowdiff.recover(where.run, staging=where.staging)
    found = state.model_state_dict()
    names = {spec.name for spec in state.fence.layout.parameters}
    recovered = digest((name, found[name], {}) for name in names)
    assert recovered == where.run.with_name("digest").read_text(), "another state was recovered"
    folder = RunFolder(where.run)
    return [
        MeasuredIncarnation(found.incarnation, found.samples, found.facts)
        for found in read_all_measurements(folder, read_run_id(folder), 0)
    ]


def _wipe_staging(where: Places) -> None:
    """Lose the memory, as with a node, once its writer is no longer using it."""
    run_id = read_run_id(RunFolder(where.run))
    for stage in StagingFolder.all_of_run(where.staging, run_id):
        lock = FileLock(stage.writer_lock)
        assert lock.acquire("the bench", timeout_seconds=60.0)
        lock.release()
    shutil.rmtree(where.staging / run_id)


def score(measured: Measured, setting: Setting, trace: Trace) -> Simulated:
    """A setting's waste under the trace."""
    costs = measured.costs
    return simulate(strategy_of(costs, setting), trace, useful_step_seconds=costs.step_seconds)


def compare(args: argparse.Namespace, where: Places) -> Result:
    """Measure, choose, and score the choice against the grid."""
    facts = machine()
    lives = run_lives(args, where)
    measured = measure(lives, world_size=1)
    rates = FailureRates.known(args.mtbf_seconds, node_share=0.5)
    rng = np.random.default_rng(args.seed)
    model = FailureModel(args.mtbf_seconds, node_share=0.5)
    trace = draw_trace(model, failures=args.failures // _TRIALS, trials=_TRIALS, rng=rng)
    choice = recommend(measured.costs, rates, Limits())
    tuned = score(measured, choice.setting, trace)
    grid = [
        (setting, score(measured, setting, trace).waste)
        for b in _BATCHES
        for f in np.unique(np.rint(np.geomspace(2, 20_000, args.columns)).astype(int)).tolist()
        if f >= b
        for setting in [Setting(f, b)]
    ]
    best, least = min(grid, key=lambda scored: scored[1])
    f, b = choice.setting.snapshot_every, choice.setting.batch_size
    return Result(
        name="tuner",
        settings={
            **{key: value for key, value in vars(args).items() if key != "out"},
            "node_share": 0.5,
            "kinds_of_restarts": [str(life.facts["restart"]) for life in lives],
        },
        seed=args.seed,
        machine=facts,
        samples={
            "grid": [{**asdict(setting), "waste": waste} for setting, waste in grid],
            "estimates": {name: asdict(e) for name, e in measured.estimates.items()},
        },
        summary={
            "waste_over_best_fixed": tuned.waste / least,
            "tuned_waste": tuned.waste,
            "best_fixed_waste": least,
            "tuned_snapshot_every": f,
            "tuned_batch_size": b,
            "best_snapshot_every": best.snapshot_every,
            "best_batch_size": best.batch_size,
            "closed_form_share": effective_share(measured.costs, rates, f, b),
            "simulated_share": tuned.effective_share,
            "failures": int(trace.gaps.size),
            "node_failures": int(np.count_nonzero(trace.kinds)),
            "bit_identical": True,  # asserted above
        },
    )


def draw(axes: Axes, result: Result) -> None:
    """Waste over the interval, a line for each batch size, and the tuner's choice."""
    grid = result.samples["grid"]
    for b in sorted({point["batch_size"] for point in grid}):
        own = [point for point in grid if point["batch_size"] == b]
        colour = MUTED if b == result.summary["best_batch_size"] else PALE
        axes.plot([p["snapshot_every"] for p in own], [100 * p["waste"] for p in own], color=colour)
    for name, colour, marker in (("best", INK, "s"), ("tuned", BLUE, "o")):
        waste = result.summary["tuned_waste" if name == "tuned" else "best_fixed_waste"]
        axes.plot(
            result.summary[f"{name}_snapshot_every"], 100 * waste, marker, color=colour,
            label={"best": "best of the grid", "tuned": "the tuner's choice"}[name],
        )  # fmt: skip
    least = 100 * result.summary["best_fixed_waste"]
    axes.axhline(TARGET * least, color=RED, linewidth=1.0, linestyle=(0, (4, 3)))
    axes.set_xscale("log")
    axes.set_ylim(0.95 * least, 3 * least)
    axes.legend(frameon=False)
    axes.set_xlabel("steps between full snapshots", color=INK)
    axes.set_ylabel("wasted, % of useful time", color=INK)
    axes.set_title(
        f"{result.summary['failures']:,} failures, half of them wiping staging: the tuner is "
        f"{excess(result.summary['waste_over_best_fixed'])} from the best fixed setting",
        loc="left", color=INK, fontsize=11.5, fontweight="bold", pad=10,
    )  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
    """Run the bench."""
    parser = arguments((__doc__ or "").split("\n")[0])
    parser.add_argument("--mtbf-seconds", type=float, default=1800.0)
    parser.add_argument("--failures", type=int, default=8000)
    parser.add_argument("--columns", type=int, default=60, help="intervals of the grid")
    parser.add_argument(
        "--ends", type=json.loads, default=[58, 105, 154, 200], help="steps at which lives end"
    )
    args = parser.parse_args(argv)
    if args.smoke:
        args.failures, args.columns, args.ends = 2000, 20, [6, 11, 16]
    with places(args.out) as where:
        result = compare(args, where)
    write(result, args.out, draw)
    value = result.summary["waste_over_best_fixed"]
    print(
        f"waste_over_best_fixed {value:.4f}, target {TARGET}: {'met' if value <= TARGET else 'MISSED'}"
    )


if __name__ == "__main__":
    ending.run(main)
