"""A run of a million differentials: how long it takes to open, and how much memory.

    python -m benches.bench_catalog --out DIR [--smoke]

A run of one rank is made, with 256 differentials in a segment: 3,907 files. Then, each time in a new
process: the whole command ``lowdiff inspect``; the catalog, opened from Python, a plan for the newest
step and one for a step in the middle; and ``attach``. Warm, and with the files' pages evicted (names and
inodes stay cached, since dropping them takes the whole machine's). What is found must be the same every
time, and as a reading of every record has it; and recovery of the middle step must give the live
parameters.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
from crc32c import crc32c
from matplotlib.axes import Axes

import lowdiff
from benches import ending
from benches.catalog_run import Shape, checkpointer, make_run, trainer
from benches.harness import BLUE, INK, RED, Result, arguments, dots, machine, write
from benches.peak import Peak
from benches.restart_arms import evict
from benches.runs import Places, in_new_process, places
from lowdiff.persistence.files.paths import RunFolder
from lowdiff.persistence.run.catalog import scan
from lowdiff.recovery.plan import RecoveryPlan, plan_recovery

TARGET_SECONDS = 2.0
#: The command, which says at its end what it took. The kernel's own account of a child begins with
#: the memory of whoever started it.
_INSPECT = """
import atexit, sys, time
def told():
    with open("/proc/self/status") as file:
        peak = next(int(line.split()[1]) << 10 for line in file if line.startswith("VmHWM"))
    sys.stderr.write(f"{time.process_time()} {peak}")
atexit.register(told)
from lowdiff.cli.app import main
main()
"""


@dataclass(frozen=True, slots=True)
class Taken:
    """What something took.

    Attributes:
        cpu_seconds: Processor time of the process.
        peak_bytes: Of a command, all its memory; else above what was there before.
    """

    seconds: float
    cpu_seconds: float
    peak_bytes: int


def command(where: Places) -> tuple[Taken, Any]:
    """``lowdiff inspect``, from its start to its end; and what it says."""
    words = ["inspect", str(where.run), "--json", "--staging", str(where.staging)]
    began = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", _INSPECT, *words], capture_output=True, text=True, check=False
    )
    seconds = time.perf_counter() - began
    assert done.returncode == 0, done.stderr
    cpu_seconds, peak_bytes = done.stderr.split()
    return Taken(seconds, float(cpu_seconds), int(peak_bytes)), json.loads(done.stdout)


def opened(where: Places, connection: Connection) -> None:
    """Open the catalog, plan for the newest and a middle step; send what each took, and the plans."""
    peak = Peak()
    times = [(time.perf_counter(), time.process_time())]
    peaks = []

    def done() -> None:
        times.append((time.perf_counter(), time.process_time()))
        peaks.append(peak.bytes())

    catalog = scan(RunFolder(where.run), [where.staging])
    done()
    newest = plan_recovery(catalog)
    done()
    middle = plan_recovery(catalog, newest.step // 2)
    done()
    taken = [
        Taken(after[0] - before[0], after[1] - before[1], most)
        for before, after, most in zip(times[:-1], times[1:], peaks, strict=True)
    ]
    connection.send((taken, _summary(newest), _summary(middle)))


def _summary(plan: RecoveryPlan) -> tuple[int, int, int, int]:
    """Its step, base and length, and a checksum over every byte that it reads."""
    checksum = 0
    for step in plan.steps:
        for shard in step.shards:
            checksum = crc32c(shard.record.body, checksum)
    return plan.step, plan.base.step, len(plan.steps), checksum


def attached(task: tuple[Places, int], connection: Connection) -> None:
    """Attach a trainer, and send what that took."""
    where, seed = task
    model, optimizer = trainer(seed)
    peak = Peak()
    began, cpu = time.perf_counter(), time.process_time()
    with checkpointer(where) as opened_run:
        opened_run.attach(model, optimizer)
        seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu
        connection.send(Taken(seconds, cpu_seconds, peak.bytes()))


def measure_run(where: Places, shape: Shape, args: argparse.Namespace) -> dict[str, Any]:
    """All samples of one run, by what was done."""
    began = time.perf_counter()
    make_run(where, shape, args.seed)
    print(f"{shape}: made in {time.perf_counter() - began:.0f} s")
    _, expected = command(where)
    assert expected["recoverable"] == {"first": 0, "last": shape.steps}
    plans = in_new_process(opened, where)[1:]
    found: dict[str, list[Taken]] = {}

    def note(name: str, taken: Taken) -> None:
        found.setdefault(name, []).append(taken)
        print(f"{name:<22} {taken.seconds:7.3f} s, {taken.cpu_seconds:7.3f} s of processor time, "
              f"{taken.peak_bytes / 2**20:5.0f} MiB")  # fmt: skip

    def look(suffix: str, before: Callable[[], object]) -> None:
        before()
        taken, said = command(where)
        assert said == expected
        note(f"inspect{suffix}", taken)
        before()
        several, *planned = in_new_process(opened, where)
        assert tuple(planned) == plans
        for name, taken in zip(("open", "plan_newest", "plan_middle"), several, strict=True):
            note(f"{name}{suffix}", taken)

    for _ in range(args.rounds):
        look("", lambda: None)
        look("_evicted", lambda: evict(where.run))
    checked = scan(RunFolder(where.run), check_all=True)
    assert not checked.damage
    assert _summary(plan_recovery(checked)) == plans[0]

    model, _ = trainer(args.seed)
    state = lowdiff.recover(where.run, shape.steps // 2, staging=where.staging)
    live = dict(model.named_parameters())
    for name, tensor in state.tensors().items():
        assert torch.equal(tensor, live[name]), f"{name} was not recovered"
    for _ in range(args.rounds):
        note("attach", in_new_process(attached, (where, args.seed)))
    return {
        "taken": {name: [asdict(one) for one in taken] for name, taken in found.items()},
        "segments": len(list(RunFolder(where.run).segments())),
    }


def measure(args: argparse.Namespace) -> Result:
    """Make and measure a run of every batch size."""
    facts = machine()
    samples: dict[str, Any] = {}
    for batch_size in args.batch_sizes:
        with places(args.out) as where:
            shape = Shape(args.steps, batch_size, args.snapshot_every)
            samples[str(batch_size)] = measure_run(where, shape, args)
    figures: dict[str, float] = {}
    for batch_size, own in samples.items():
        for name, taken in own["taken"].items():
            for key in ("seconds", "cpu_seconds", "peak_bytes"):
                middle = statistics.median(one[key] for one in taken)
                figures[f"{name}_{batch_size}_{key}"] = middle
        figures[f"segments_{batch_size}"] = own["segments"]
    worst = max(figures[f"inspect_evicted_{size}_seconds"] for size in samples)
    return Result(
        name="catalog",
        settings={key: value for key, value in vars(args).items() if key != "out"},
        seed=args.seed,
        machine=facts,
        samples=samples,
        summary={"bit_identical": True, "worst_inspect_seconds": worst, **figures},  # as asserted
    )


def draw(axes: Axes, result: Result) -> None:
    """A row for every thing that was done."""
    rows = [
        (name, size) for size in result.samples for name in reversed(result.samples[size]["taken"])
    ]
    for height, (name, size) in enumerate(rows):
        values = [one["seconds"] for one in result.samples[size]["taken"][name]]
        dots(axes, height, values, BLUE)
    labels = [f"{name.replace('_', ' ')}, {size} a segment" for name, size in rows]
    axes.set_yticks(range(len(rows)), labels, fontsize=6)
    axes.axvline(TARGET_SECONDS, color=RED, linewidth=1.0, linestyle=(0, (4, 3)))
    axes.set_xscale("log")
    axes.set_xlabel("seconds (dashed: the target)", color=INK)
    axes.set_title(
        f"A run of {result.settings['steps']:,} differentials",
        loc="left", color=INK, fontsize=11.5, fontweight="bold",
    )  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
    """Run the bench."""
    parser = arguments((__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[256])
    parser.add_argument("--snapshot-every", type=int, default=10_000)
    args = parser.parse_args(argv)
    if args.smoke:
        args.rounds, args.steps, args.batch_sizes, args.snapshot_every = 1, 8200, [256], 400
    result = measure(args)
    write(result, args.out, draw)
    worst = result.summary["worst_inspect_seconds"]
    verdict = "met" if worst < TARGET_SECONDS else "MISSED"
    print(f"inspect takes {worst:.2f} s, target {TARGET_SECONDS}: {verdict}")


if __name__ == "__main__":
    ending.run(main)
