"""Compare the simulator of a training that is killed with the same training really killed.

    python -m benches.bench_failures --out DIR [--smoke]

A training is killed by SIGKILL at the times of a drawn trace, in every other case together with its
writer and its staging memory, as when a node is lost; each time another process goes on at once.
Its diary says what each failure took. The simulator gets the same trace, and the costs that the tuner
read from what the run recorded of itself. What a step takes more is against the same training without
a checkpointer (and without compression, which a module without DDP gets from the checkpointer): lives as
short as the killed ones, before the kills and after them, because a machine's speed moves. None stands
between, where it would count as the time of a restart.
In the end all that is left of the run must replay bit for bit.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import signal
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from multiprocessing.context import SpawnProcess

import numpy as np
from matplotlib.axes import Axes

from benches import ending
from benches.gpt import GPTConfig
from benches.harness import BLUE, INK, MUTED, RED, Result, arguments, machine, write
from benches.runs import Places, places
from benches.tuner_life import LifePlan, live
from lowdiff.demo.launch import child_processes
from lowdiff.persistence.files.paths import RunFolder
from lowdiff.persistence.run.fences import read_run_id
from lowdiff.persistence.staging.measurements import read_all_measurements
from lowdiff.recovery.inspect.verify import verify
from lowdiff.tuner.choice import Setting
from lowdiff.tuner.costs import Costs, loop_seconds, lost_steps, recovery_seconds
from lowdiff.tuner.measured import MeasuredIncarnation, measure
from lowdiff.tuner.simulate import FailureModel, Simulated, Trace, draw_trace, simulate
from lowdiff.tuner.strategies import lowdiff as strategy_of

_MODEL = GPTConfig(vocabulary=4096, context=128, layers=6, heads=4, width=256)
_SMOKE_MODEL = GPTConfig(layers=1, heads=2, width=32, context=16)
_NODE = 1
_PLAIN_STEPS = 10
_PLAIN_LIVES = 4
TOLERANCE = 0.2


@dataclass(frozen=True, slots=True)
class Failure:
    """Costs of one failure, as they really were.

    Attributes:
        kind: 0 process, 1 node.
        starting_seconds: From the kill until the next process calls ``attach``.
        attaching_seconds: What ``attach`` takes then.
        lost_steps: From where the training was to where it went on, the step in flight by its part.
    """

    kind: int
    starting_seconds: float
    attaching_seconds: float
    lost_steps: float


@dataclass(frozen=True, slots=True)
class Reality:
    """Times and steps of a killed training.

    Attributes:
        wall_seconds: From the first life's first step to the last kill.
        steps: Where the last kill left it.
        loop_seconds: One step, with all that checkpointing adds.
    """

    wall_seconds: float
    steps: float
    loop_seconds: float
    failures: tuple[Failure, ...]


Line = tuple[str, int, float]


def diary(where: Places) -> list[Line]:
    """Read its lines: the event, the step, and seconds since 1970."""
    path = where.run.with_name("diary")
    lines = path.read_text().splitlines() if path.exists() else []
    return [(w, int(step), float(when)) for w, step, when in map(str.split, lines)]


def kill_along(trace: Trace, plan: LifePlan) -> list[tuple[float, list[Line]]]:
    """Kill a training at the times of a trace; each kill's time, and the killed life's diary."""
    context = multiprocessing.get_context("spawn")
    killed: list[tuple[float, list[Line]]] = []
    read = 0

    def begin() -> SpawnProcess:
        process = context.Process(target=live, args=(plan,))
        process.start()
        return process

    process = begin()
    while not any(what == "step" for what, *_ in diary(plan.where)):
        time.sleep(0.01)
    last = next(when for what, _, when in diary(plan.where) if what == "step")
    for gap, kind in zip(trace.gaps[0], trace.kinds[0], strict=True):
        time.sleep(max(0.0, last + float(gap) - time.time()))
        assert process.is_alive(), "the training ended by itself"
        assert process.pid is not None
        children = child_processes(process.pid) if kind == _NODE else []
        last = time.time()
        for pid in (process.pid, *children):
            os.kill(pid, signal.SIGKILL)
        process.join()
        if kind == _NODE:
            shutil.rmtree(plan.where.staging / read_run_id(RunFolder(plan.where.run)))
        lines = diary(plan.where)
        killed.append((last, lines[read:]))
        read = len(lines)
        if len(killed) < trace.gaps.shape[1]:
            process = begin()
    return killed


def told(trace: Trace, killed: Sequence[tuple[float, list[Line]]]) -> Reality:
    """Read from the diaries how long steps and failures took, the last failure left out."""
    loops = [
        b - a
        for _, lines in killed
        for (what, _, a), (_, _, b) in pairwise(lines)
        if what == "step"
    ]
    loop = float(np.mean(loops))
    reached = 0.0
    failures = []
    for number, (when, lines) in enumerate(killed):
        began = [line for line in lines if line[0] == "attached"]
        if number and began:
            called = next(t for what, _, t in lines if what == "attach")
            (_, resumed, attached) = began[0]
            before = killed[number - 1][0]
            failures.append(
                Failure(
                    int(trace.kinds[0, number - 1]),
                    called - before,
                    attached - called,
                    reached - resumed,
                )
            )
        if steps := [line for line in lines if line[0] == "step"]:
            _, step, since = steps[-1]
            reached = step + min(1.0, (when - since) / loop)
    first = next(when for _, lines in killed for what, _, when in lines if what == "step")
    return Reality(killed[-1][0] - first, reached, loop, tuple(failures))


def plain_lives(plan: LifePlan) -> list[list[float]]:
    """Time the steps of some lives of the same training without a checkpointer."""
    return [_plain_life(plan) for _ in range(_PLAIN_LIVES)]


def _plain_life(plan: LifePlan) -> list[float]:
    context = multiprocessing.get_context("spawn")
    with places(plan.where.run.parent / "plain") as where:
        bare = replace(plan, where=where, until=_PLAIN_STEPS, checkpoints=False)
        process = context.Process(target=live, args=(bare,))
        process.start()
        process.join()
        times = [when for _, _, when in diary(where)]
    return [b - a for a, b in pairwise(times)]


def terms(
    costs: Costs, setting: Setting, simulated: Simulated, real: Reality, step_seconds: float
) -> dict[str, tuple[float, float]]:
    """Each cost term as modelled or simulated, and as it really was."""
    f, b = setting.snapshot_every, setting.batch_size
    of_kind = [[x for x in real.failures if x.kind == kind] for kind in (0, _NODE)]
    lost = [float(np.mean([x.lost_steps for x in own])) for own in of_kind]
    modelled = lost_steps(costs, f, b)
    recovering = sum(x.starting_seconds + x.attaching_seconds for x in real.failures)
    return {
        "step_seconds": (costs.step_seconds, step_seconds),
        "loop_seconds": (loop_seconds(costs, f, b), real.loop_seconds),
        "recovery_seconds": (
            recovery_seconds(costs, f, b),
            float(np.mean([x.starting_seconds + x.attaching_seconds for x in real.failures])),
        ),
        "lost_steps_process": (modelled[0], lost[0]),
        "lost_steps_node": (modelled[1], lost[1]),
        "recovering_share": (simulated.recovering, recovering / real.wall_seconds),
        "lost_share": (
            simulated.lost,
            sum(x.lost_steps for x in real.failures) * real.loop_seconds / real.wall_seconds,
        ),
        "effective_share": (
            simulated.effective_share,
            real.steps * step_seconds / real.wall_seconds,
        ),
    }


def compare(args: argparse.Namespace, where: Places) -> Result:
    """Kill, simulate the same, and set each term beside the other."""
    facts = machine()
    rng = np.random.default_rng(args.seed)
    model = FailureModel(args.mtbf_seconds, node_share=0.0)
    drawn = draw_trace(model, failures=args.kills, trials=1, rng=rng)
    # A failure while another one is recovered from takes nothing that could be measured.
    gaps = np.maximum(drawn.gaps, args.least_seconds)
    trace = Trace(gaps, np.resize([0, _NODE], args.kills)[None].astype(np.int8))
    setting = Setting(args.snapshot_every, args.batch_size)
    plan = LifePlan(
        where, _SMOKE_MODEL if args.smoke else _MODEL, 1 << 30, False,
        setting.snapshot_every, setting.batch_size, 1 if args.smoke else 8, args.seed,
    )  # fmt: skip
    plain = plain_lives(plan)
    real = told(trace, kill_along(trace, plan))
    plain += plain_lives(plan)
    step_seconds = float(np.mean(plain))
    folder = RunFolder(where.run)
    lives = [
        MeasuredIncarnation(found.incarnation, found.samples, found.facts)
        for found in read_all_measurements(folder, read_run_id(folder), 0)
    ]
    costs = measure(lives, world_size=1).costs
    simulated = simulate(
        strategy_of(costs, setting), trace, useful_step_seconds=costs.step_seconds,
        horizon_seconds=float(np.nextafter(gaps.sum(), 0.0)),
    )  # fmt: skip
    found = terms(costs, setting, simulated, real, step_seconds)
    return Result(
        name="failures",
        settings={key: value for key, value in vars(args).items() if key != "out"},
        seed=args.seed,
        machine=facts,
        samples={
            "failures": [asdict(failure) for failure in real.failures],
            "gaps": gaps[0].tolist(),
            "plain_step_seconds": plain,
            "costs": asdict(costs),
        },
        summary={
            **{f"{name}_simulated": pair[0] for name, pair in found.items()},
            **{f"{name}_real": pair[1] for name, pair in found.items()},
            **{f"{name}_ratio": pair[0] / pair[1] for name, pair in found.items()},
            "largest_error": max(abs(a / b - 1) for a, b in found.values()),
            "kills": args.kills,
            "bit_identical": verify(where.run, where.staging).ok,
        },
    )


def draw(axes: Axes, result: Result) -> None:
    """The ratio of each term, simulated over real."""
    ratios = {
        key.removesuffix("_ratio"): value
        for key, value in result.summary.items()
        if key.endswith("_ratio")
    }
    names = list(reversed(ratios))
    axes.barh(names, [ratios[name] for name in names], color=BLUE, height=0.6)
    axes.axvline(1.0, color=INK, linewidth=1.0)
    for edge in (1 - TOLERANCE, 1 + TOLERANCE):
        axes.axvline(edge, color=RED, linewidth=1.0, linestyle=(0, (4, 3)))
    axes.set_xlabel("simulated, or modelled, over real", color=INK)
    axes.set_title(
        f"{result.summary['kills']} real kills, half of them with the loss of staging memory",
        loc="left", color=INK, fontsize=11.5, fontweight="bold", pad=10,
    )  # fmt: skip
    axes.tick_params(axis="y", colors=MUTED)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the bench."""
    parser = arguments((__doc__ or "").split("\n")[0])
    parser.add_argument("--kills", type=int, default=32)
    parser.add_argument("--mtbf-seconds", type=float, default=12.0)
    parser.add_argument("--least-seconds", type=float, default=8.0, help="between two kills")
    parser.add_argument("--snapshot-every", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=8)
    args = parser.parse_args(argv)
    if args.smoke:
        args.kills, args.mtbf_seconds, args.least_seconds = 5, 6.0, 6.0
    with places(args.out) as where:
        result = compare(args, where)
    write(result, args.out, draw)
    error = result.summary["largest_error"]
    verdict = "met" if error <= TOLERANCE else "MISSED"
    print(f"largest error of a term {error:.2f}, target {TOLERANCE}: {verdict}")


if __name__ == "__main__":
    ending.run(main)
