"""How recovery grows: its time with differentials, parameters and workers, and its memory.

    python -m benches.bench_recovery_growth --out DIR [--smoke]

Networks of square layers are stepped by AdamW under a ``Checkpointer``; then steps are recovered from
disk, each time in a new process, and every recovered state must equal the live one bit for bit. Against
each axis stands the straight line that the model says: load + r * differentials * elements / workers
is linear in each of them, and in 1 / workers, as long as every worker has a core. It is fitted on
every other point, and its error is reported on the others. Peak memory is what the process takes above
what it held before the recovery: the bound is state + 25 % + 256 MiB.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from matplotlib.axes import Axes

from benches import ending
from benches.growth_turn import Growth, Turn, alone
from benches.harness import BLUE, INK, MUTED, PALE, RED, Result, arguments, machine, write
from benches.replay_arms import digest
from benches.runs import Places, in_new_process, logged_steps, places
from lowdiff.recovery.replay.sizing import needed_bytes

_BYTES_PER_ELEMENT = 12  # a parameter and AdamW's two moments, float32
_AXES = {
    "differentials": "differentials replayed",
    "parameters": "million parameters",
    "workers": "worker threads",
}


@dataclass(frozen=True, slots=True)
class Made:
    """A run of one model.

    Attributes:
        digests: Step -> SHA-256 of the live state.
    """

    where: Places
    elements: int
    digests: Mapping[int, str]


def make_run(where: Places, layers: int, args: argparse.Namespace, counts: Sequence[int]) -> Made:
    """Step a network with synthetic gradients under a checkpointer."""
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    width = args.width
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(layers)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    found: dict[int, str] = {}
    # One step more than needed, because close takes a snapshot of the last.
    for done in logged_steps(model, optimizer, where, density=args.density, until=max(counts) + 1):
        if done in counts:
            named = model.named_parameters()
            found[done] = digest((n, p, optimizer.state[p]) for n, p in named)
    shutil.rmtree(where.staging)  # what counts is on disk
    where.staging.mkdir()
    return Made(where, sum(p.numel() for p in model.parameters()), found)


def turn(made: Made, steps: int, *, workers: int = 1) -> Turn:
    """Recover a step once, and compare its bits."""
    task = Growth(made.where, steps, workers, sorted(os.sched_getaffinity(0)))
    found: Turn = in_new_process(alone, task)
    assert found.digest == made.digests[steps], f"step {steps} differs: {task}"
    print(f"{steps:>5} steps, {made.elements / 1e6:6.2f} M, {workers} workers: "
          f"{found.seconds:.2f} s, {found.peak_bytes / 2**20:.0f} MiB")  # fmt: skip
    return found


def points(args: argparse.Namespace, out: Path) -> dict[str, dict[int, list[Turn]]]:
    """Every point of every axis, as often as asked; parameters are counted in elements."""
    found: dict[str, dict[int, list[Turn]]] = {axis: {} for axis in _AXES}

    def take(axis: str, x: int, taken: Turn) -> None:
        found[axis].setdefault(x, []).append(taken)

    most = max(args.counts)
    for layers in args.layers:
        is_middle = layers == args.middle
        with places(out) as where:
            made = make_run(where, layers, args, [args.steps, *(args.counts if is_middle else [])])
            for _ in range(args.rounds):
                take("parameters", made.elements, turn(made, args.steps))
                for count in args.counts if is_middle else ():
                    take("differentials", count, turn(made, count))
                for number in args.parallel if is_middle else ():
                    take("workers", number, turn(made, most, workers=number))
    return found


@dataclass(frozen=True, slots=True)
class Line:
    """What the model says of one axis.

    Attributes:
        constant: Seconds, whatever the axis.
        slope: Seconds per differential or element; of workers, what one of them would take.
        fitted: Points that it was fitted on.
        seconds: At every point.
        worst_residual: Of the points not fitted, the largest difference, relative to what was measured;
            None if there is none.
    """

    constant: float
    slope: float
    fitted: tuple[int, ...]
    seconds: tuple[float, ...]
    worst_residual: float | None


def model_line(axis: str, xs: Sequence[int], measured: Sequence[float]) -> Line:
    """The model's line through every other point; with fewer than three, through all."""
    cores = len(os.sched_getaffinity(0))
    # More workers than cores gain nothing.
    terms = [1 / min(x, cores) if axis == "workers" else float(x) for x in xs]
    fitted = list(range(0, len(xs), 2))
    if len({terms[i] for i in fitted}) < 2:
        fitted = list(range(min(2, len(xs))))
    matrix = np.array([[1.0, terms[i]] for i in fitted])
    solved, *_ = np.linalg.lstsq(matrix, np.array([measured[i] for i in fitted]))
    constant, slope = map(float, solved)
    seconds = tuple(constant + slope * term for term in terms)
    others = [i for i in range(len(xs)) if i not in fitted]
    residuals = [abs(measured[i] - seconds[i]) / measured[i] for i in others]
    worst = max(residuals, default=None)
    return Line(constant, slope, tuple(xs[i] for i in fitted), seconds, worst)


def _median(turns: Sequence[Turn]) -> float:
    return statistics.median(turn.seconds for turn in turns)


def measure(args: argparse.Namespace) -> Result:
    """Take every turn, fit the lines, and compare memory with its bound."""
    facts = machine()
    found = points(args, args.out)
    lines = {
        axis: model_line(axis, list(own), [_median(turns) for turns in own.values()])
        for axis, own in found.items()
    }
    middle = next(iter(found["differentials"].values()))[0].elements

    def over_bound(axis: str) -> float:
        return max(
            turn.peak_bytes / needed_bytes(_BYTES_PER_ELEMENT * turn.elements)
            for turns in found[axis].values()
            for turn in turns
        )

    return Result(
        name="recovery_growth",
        settings={
            **{key: value for key, value in vars(args).items() if key != "out"},
            "optimizer": "AdamW",
            "middle_elements": middle,
            "cores": len(os.sched_getaffinity(0)),
        },
        seed=args.seed,
        machine=facts,
        samples={
            axis: {str(x): [asdict(t) for t in turns] for x, turns in own.items()}
            for axis, own in found.items()
        },
        summary={
            "bit_identical": True,  # asserted at every turn
            **{f"{axis}_constant_seconds": line.constant for axis, line in lines.items()},
            **{f"{axis}_slope_seconds": line.slope for axis, line in lines.items()},
            **{f"{axis}_worst_residual": line.worst_residual for axis, line in lines.items()},
            **{f"{axis}_peak_over_bound": over_bound(axis) for axis in _AXES},
            "peak_over_bound": max(over_bound(axis) for axis in _AXES),
        },
    )


def draw_seconds(axis: str) -> Callable[[Axes, Result], None]:
    """A panel: measured medians with their spread, and the model's line."""

    def draw(axes: Axes, result: Result) -> None:
        own = result.samples[axis]
        scale = 1e6 if axis == "parameters" else 1
        xs = [int(x) / scale for x in own]
        seconds = [[t["seconds"] for t in turns] for turns in own.values()]
        medians = [statistics.median(values) for values in seconds]
        line = model_line(axis, [int(x) for x in own], medians)
        low = [m - min(v) for m, v in zip(medians, seconds, strict=True)]
        high = [max(v) - m for m, v in zip(medians, seconds, strict=True)]
        axes.plot(xs, line.seconds, color=PALE, linewidth=2.5, label="model")
        axes.errorbar(xs, medians, [low, high], fmt="o", color=BLUE, capsize=3, label="measured")
        title = f"fitted on {', '.join(f'{x / scale:.3g}' for x in line.fitted)}"
        if line.worst_residual is not None:
            title += f"; the others at most {100 * line.worst_residual:.0f} % off"
        axes.set_title(
            title,
            loc="left", color=INK, fontsize=9.5,
        )  # fmt: skip
        axes.set_ylim(bottom=0)
        axes.set_xlabel(_AXES[axis], color=INK)
        axes.set_ylabel("seconds", color=INK)
        axes.legend(frameon=False, fontsize=8)

    return draw


def draw_memory(axis: str) -> Callable[[Axes, Result], None]:
    """A panel: peak memory, and the bound."""

    def draw(axes: Axes, result: Result) -> None:
        own = result.samples[axis]
        scale = 1e6 if axis == "parameters" else 1
        xs = [int(x) / scale for x in own]
        peaks = [max(t["peak_bytes"] for t in turns) / 2**20 for turns in own.values()]
        bounds = [
            needed_bytes(_BYTES_PER_ELEMENT * turns[0]["elements"]) / 2**20
            for turns in own.values()
        ]
        states = [_BYTES_PER_ELEMENT * turns[0]["elements"] / 2**20 for turns in own.values()]
        axes.plot(xs, bounds, color=RED, linewidth=1.5, label="state + 25 % + 256 MiB")
        axes.plot(xs, peaks, "o-", color=BLUE, markersize=4, label="peak")
        axes.plot(xs, states, color=MUTED, linewidth=1.0, linestyle=(0, (4, 3)), label="state")
        axes.set_ylim(bottom=0)
        axes.set_xlabel(_AXES[axis], color=INK)
        axes.set_ylabel("peak memory, MiB", color=INK)
        axes.legend(frameon=False, fontsize=8)

    return draw


def main(argv: Sequence[str] | None = None) -> None:
    """Run the bench."""
    parser = arguments((__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=3, help="turns of every point")
    parser.add_argument("--density", type=float, default=0.01)
    parser.add_argument(
        "--width", type=int, default=1024, help="of a layer: its square is elements"
    )
    parser.add_argument("--layers", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--middle", type=int, default=4, help="layers, for the other axes")
    parser.add_argument("--steps", type=int, default=40, help="differentials, for parameters")
    parser.add_argument("--counts", type=int, nargs="+", default=[25, 50, 100, 200, 400])
    parser.add_argument("--parallel", type=int, nargs="+", default=[1, 2, 3, 4])
    args = parser.parse_args(argv)
    if args.smoke:
        args.rounds, args.width, args.layers, args.middle = 1, 64, [1, 2, 3], 2
        args.steps, args.counts, args.parallel = 3, [2, 4, 6], [1, 2]
    result = measure(args)
    seconds = [draw_seconds(axis) for axis in _AXES]
    write(result, args.out, *seconds, draw_memory("differentials"), draw_memory("parameters"))
    worst = result.summary["peak_over_bound"]
    print(f"peak memory over its bound {worst:.2f}: {'met' if worst <= 1 else 'MISSED'}")


if __name__ == "__main__":
    ending.run(main)
