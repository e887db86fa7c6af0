"""What strategy survivors costs while nothing fails, and how soon training goes on after a failure.

    python -m benches.bench_survivors --out DIR [--smoke]

First the share of the training thread: the time in lowdiff's hooks and in ``commit()`` over that of the steps,
between two snapshots, in one process and in two. The average of gradients over the ranks is not
counted: DDP makes it as well.

Then trainings of two ranks, in which a rank is killed by SIGKILL in the middle between two snapshots. torchrun
starts all ranks anew (``--max-restarts``): with the log of steps, with a replica, with survivors, and with a
``torch.save`` of everything at each snapshot's step. In process, the rank that lives enters the
training function again, and a hot spare takes the place of the dead one (``lowdiff.integrations.nvrx``, where it
can be imported). Timed is the way from the kill to the first finished step, and to the first one
that had not been made before: the steps that ``torch.save`` makes again lie in between. The arms take turns.

Every state must have the same bits each time it is reached, in all arms that average whole gradients.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from benches import ending
from benches.gpt import GPT, GPTConfig
from benches.harness import BLUE, GREEN, INK, MUTED, PALE, RED, Result, arguments, machine, write
from benches.runs import Places, places
from benches.survivors_life import ARMS, DENSE, MODEL, SMOKE_MODEL, WORLD_SIZE, Line
from benches.survivors_share import MODEL as SHARE_MODEL
from benches.survivors_share import ROWS, Share, cpu_share_of, share_of
from lowdiff.errors import ConfigError

TARGET_SHARE, TARGET_IN_PROCESS_SECONDS = 0.005, 1.5
_ROOT = Path(__file__).parents[1]
_LOOK_SECONDS, _PATIENCE_SECONDS = 0.005, 600.0
#: Steps after the last failure, so that both ranks learn in time where they end.
_LAST_STEPS = 5
#: What happens after a kill, in order, and how the way there is drawn.
MARKS = {
    "noticed": ("noticed", RED),
    "saved": ("saved", "#e9a23b"),
    "up": ("processes up", PALE),
    "joined": ("joined", MUTED),
    "made": ("model made", "#8fb8de"),
    "attached": ("attached", BLUE),
    "first_step": ("first step", GREEN),
    "caught_up": ("steps made again", "#b9a5d6"),
}
_LABELS = {
    "torch_save": "torch.save",
    "log": "log",
    "replica": "replica",
    "survivors": "survivors",
    "in_process": "survivors,\nin process",
}


@dataclass(frozen=True, slots=True)
class Failure:
    """One failure.

    Attributes:
        victim: The rank that was killed.
        reached: The last step that had ended.
        resumed: The step from which training went on.
        seconds: Name of a mark -> seconds since the kill, of the last rank to come there; those of
            ``noticed`` and ``saved`` are of the ranks that lived.
    """

    victim: int
    reached: int
    resumed: int
    seconds: Mapping[str, float]


class Training:
    """One training of one arm, from its start to its end."""

    def __init__(self, arm: str, where: Places, args: argparse.Namespace, *, kills: int) -> None:
        self._interval = args.interval
        self._folder = where.run.with_name(arm)
        self._folder.mkdir(parents=True, exist_ok=True)
        launcher = ["torch.distributed.run", "--standalone", f"--nproc-per-node={WORLD_SIZE}"]
        launcher += [f"--max-restarts={kills}", "--monitor-interval=0.1"]
        script = ["-m", "benches.survivors_life"]
        if arm == "in_process":  # a spare for each kill; this launcher takes a script's path
            launcher = ["lowdiff.integrations.nvrx", f"--processes={WORLD_SIZE + kills}"]
            script = [str(_ROOT / "benches" / "survivors_life.py")]
        words = [arm, str(self._folder), str(where.staging / arm), str(args.interval)]
        self._output = (self._folder / "output").open("a+")
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                *launcher,
                *script,
                *words,
                *(["--smoke"] if args.smoke else []),
            ],
            cwd=_ROOT,
            env={**os.environ, "PYTHONPATH": str(_ROOT)},
            stdout=self._output,
            stderr=subprocess.STDOUT,
        )

    @property
    def lines(self) -> list[Line]:
        """What its processes noted so far."""
        return Line.read(self._folder)

    def fail(self, victim: int, rng: random.Random) -> Failure:
        """Kill a rank in the middle between two snapshots, at any place in a step; see it go on."""
        target, attempt = 1 << 60, -1

        def is_due() -> bool:
            nonlocal target, attempt
            lines = self.lines
            attached = [line for line in lines if line.what == "attached"]
            if not attached:
                return False
            attempt = max(line.attempt for line in attached)
            start = max(line.step for line in attached if line.attempt == attempt)
            target = (start // self._interval + 1) * self._interval + self._interval // 2
            return any(
                line.step >= target for line in _steps(lines, attempt) if line.rank == victim
            )

        self._wait(is_due)
        own = [line for line in _steps(self.lines, attempt) if line.rank == victim]
        time.sleep(rng.random() * step_seconds(own))
        killed = time.time()
        os.kill(own[-1].pid, 9)

        def is_caught_up() -> bool:
            lines = self.lines
            reached = max(line.step for line in _steps(lines, attempt))
            after = [line for line in lines if line.attempt > attempt and line.step > reached]
            return {line.rank for line in after if line.what == "step"} == set(range(WORLD_SIZE))

        self._wait(is_caught_up)
        return _failure(self.lines, attempt, victim, killed)

    def end(self) -> list[Line]:
        """Let it end by itself; all that its processes noted."""
        last = max(line.step for line in self.lines)
        part = self._folder / "stop.part"
        part.write_text(str(last + _LAST_STEPS))
        part.replace(self._folder / "stop")
        assert self._process.wait(_PATIENCE_SECONDS) == 0, self._printed()
        return self.lines

    def close(self) -> None:
        """Kill what is left of it."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
            for pid in {line.pid for line in self.lines}:
                with suppress(ProcessLookupError):
                    os.kill(pid, 9)
        self._output.close()

    def _wait(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while not condition():
            assert self._process.poll() is None, self._printed()
            assert time.monotonic() < deadline, self._printed()
            time.sleep(_LOOK_SECONDS)

    def _printed(self) -> str:
        self._output.seek(0)
        return self._output.read()[-8000:]


def _steps(lines: Iterable[Line], attempt: int) -> list[Line]:
    return [line for line in lines if line.what == "step" and line.attempt == attempt]


def step_seconds(steps: Sequence[Line]) -> float:
    """Median time of a step, of one rank in one attempt."""
    times = [line.when for line in steps]
    return statistics.median(b - a for a, b in pairwise(times))


def _failure(lines: Sequence[Line], attempt: int, victim: int, killed: float) -> Failure:
    reached = max(line.step for line in _steps(lines, attempt))
    before = [line for line in lines if line.attempt == attempt and line.when >= killed]
    new = min(line.attempt for line in lines if line.what == "step" and line.attempt > attempt)
    after = [line for line in lines if line.attempt == new]
    steps = _steps(after, new)

    def last(of: Iterable[Line]) -> float:
        """When the last rank got there."""
        first: dict[int, float] = {}
        for line in of:
            first.setdefault(line.rank, line.when)
        return max(first.values()) - killed

    seconds = {
        **{
            what: last(line for line in before if line.what == what)
            for what in ("noticed", "saved")
            if any(line.what == what for line in before)
        },
        **{
            what: last(line for line in after if line.what == what)
            for what in ("up", "joined", "made", "attached")
        },
        "first_step": last(steps),
        "caught_up": last(line for line in steps if line.step > reached),
    }
    resumed = next(line.step for line in after if line.what == "attached")
    return Failure(victim, reached, resumed, seconds)


def refuse_other_bits(found: Mapping[str, Sequence[Sequence[Line]]]) -> None:
    """See that each step of an arm has one state, and that of all dense arms if it is one."""
    states: dict[tuple[str, int], int] = {}
    for arm, trainings in found.items():
        kind = "dense" if arm in DENSE else arm
        for line in (line for lines in trainings for line in lines):
            if line.what in ("attached", "step"):
                known = states.setdefault((kind, line.step), line.checksum)
                assert known == line.checksum, (
                    f"{arm}: rank {line.rank} differs at step {line.step}"
                )


def why_not_in_process() -> str:
    """Why the arm in process cannot run here; empty if it can."""
    try:
        importlib.import_module("lowdiff.integrations.nvrx")
    except (ImportError, ConfigError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def shares(args: argparse.Namespace, where: Places, world_size: int) -> dict[str, Any]:
    """The share of the training thread on each rank of a training; samples by rank."""
    folder = where.run.with_name(f"share-{world_size}")
    folder.mkdir(parents=True)
    launcher = ["torch.distributed.run", "--standalone", f"--nproc-per-node={world_size}"]
    words = [str(folder), str(where.staging / folder.name), str(args.share_steps)]
    subprocess.run(
        [sys.executable, "-m", *launcher, "-m", "benches.survivors_share", *words]
        + (["--smoke"] if args.smoke else []),
        cwd=_ROOT,
        check=True,
    )
    return {
        str(rank): json.loads((folder / f"share.{rank}").read_text()) for rank in range(world_size)
    }


def _share_figures(found: Mapping[str, Any]) -> dict[str, float]:
    """The worst rank's share, and what it is made of."""
    ranks = [[Share(**step) for step in steps] for steps in found.values()]
    own = max(ranks, key=share_of)
    return {
        "training_thread_share": share_of(own),
        "training_thread_share_median": statistics.median(share_of([step]) for step in own),
        "training_thread_cpu_share": cpu_share_of(own),
        "step_seconds": statistics.median(step.seconds for step in own),
        "hooks_ms": 1e3 * statistics.median(step.hooks_seconds for step in own),
        "commit_ms": 1e3 * statistics.median(step.commit_seconds for step in own),
    }


def measure(args: argparse.Namespace, where: Places) -> Result:
    """Measure the share, then let each arm fail in turn."""
    facts = machine()
    rng = random.Random(args.seed)
    share = {ranks: shares(args, where, ranks) for ranks in (1, WORLD_SIZE)}
    missing = why_not_in_process()
    arms = [arm for arm in ARMS if arm != "in_process" or not missing]
    failures: dict[str, list[Failure]] = {arm: [] for arm in arms}
    lines: dict[str, list[list[Line]]] = {arm: [] for arm in arms}
    for number in range(args.rounds):
        for arm in arms if number % 2 else reversed(arms):
            own = Places(where.run.parent / f"round-{number}" / "run", where.staging / str(number))
            training = Training(arm, own, args, kills=args.kills)
            try:
                for kill in range(args.kills):
                    victim = (number * args.kills + kill + 1) % WORLD_SIZE
                    failure = training.fail(victim, rng)
                    failures[arm].append(failure)
                    print(f"{arm:<11} {json.dumps(failure.seconds)}", flush=True)
                lines[arm].append(training.end())
            finally:
                training.close()
    refuse_other_bits(lines)
    for arm in ("survivors", "in_process"):  # nothing is lost but the open body
        assert all(f.resumed >= f.reached - 1 for f in failures.get(arm, ())), failures[arm]

    def median(arm: str, mark: str) -> float | None:
        found = [f.seconds[mark] for f in failures.get(arm, ())]
        return statistics.median(found) if found else None

    step = {
        arm: statistics.median(
            step_seconds([line for line in _steps(own, 0) if line.rank == 0]) for own in lines[arm]
        )
        for arm in arms
    }
    redone_steps = args.interval / 2  # on average
    return Result(
        name="survivors",
        settings={
            **{key: value for key, value in vars(args).items() if key != "out"},
            "parameters": _parameters(SMOKE_MODEL if args.smoke else MODEL),
            "share_parameters": None if args.smoke else _parameters(SHARE_MODEL),
            "share_rows": ROWS,
            "ranks": WORLD_SIZE,
            "arms": arms,
            "in_process_skipped": missing,
        },
        seed=args.seed,
        machine=facts,
        samples={
            "failures": {arm: [asdict(f) for f in own] for arm, own in failures.items()},
            "shares": {str(ranks): found for ranks, found in share.items()},
        },
        summary={
            **_share_figures(share[WORLD_SIZE]),
            **{f"{key}_one_rank": value for key, value in _share_figures(share[1]).items()},
            **{f"restart_seconds_{arm}": median(arm, "first_step") for arm in ARMS},
            **{f"caught_up_seconds_{arm}": median(arm, "caught_up") for arm in ARMS},
            **{
                f"lost_steps_{arm}": statistics.median(f.reached - f.resumed for f in own)
                for arm, own in failures.items()
            },
            **{f"step_seconds_{arm}": value for arm, value in step.items()},
            "redone_steps_torch_save": redone_steps,
            "redone_seconds_torch_save": redone_steps * step["torch_save"],
            "bit_identical": True,  # asserted above
        },
    )


def _parameters(config: GPTConfig) -> int:
    return sum(parameter.numel() for parameter in GPT(config).parameters())


def draw(axes: Axes, result: Result) -> None:
    """The timeline of the median failure of each arm."""
    found = {arm: own for arm, own in result.samples["failures"].items() if own}
    drawn: set[str] = set()
    for height, own in enumerate(reversed(found.values())):
        by_length = sorted(own, key=lambda failure: float(failure["seconds"]["first_step"]))
        seconds = by_length[len(by_length) // 2]["seconds"]
        known = [mark for mark in MARKS if mark in seconds]
        # A mark may come late: a process is up while another one still saves.
        ends = [*accumulate((seconds[mark] for mark in known), max)]
        for mark, begin, end in zip(known, [0.0, *ends], ends, strict=False):
            label, colour = MARKS[mark]
            shown = "" if label in drawn else label
            drawn.add(label)
            axes.barh(height, end - begin, left=begin, height=0.55, color=colour, label=shown)
        axes.text(
            ends[-1], height, f" {seconds['first_step']:.1f} s", va="center", color=INK, fontsize=9
        )
    axes.set_yticks(range(len(found)), [_LABELS[arm] for arm in reversed(found)])
    axes.set_xlabel(
        "seconds after SIGKILL of one of two ranks; the figure: until the first step ended",
        color=INK,
    )
    axes.margins(x=0.08)
    axes.legend(
        frameon=False, fontsize=7.5, ncols=8, loc="upper center", bbox_to_anchor=(0.45, -0.16)
    )
    axes.set_title(
        f"One failure of a training of {result.settings['parameters'] / 1e6:.1f} M parameters",
        loc="left", color=INK, fontsize=11.5, fontweight="bold",
    )  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
    """Run the bench."""
    parser = arguments((__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=3, help="trainings of each arm")
    parser.add_argument("--kills", type=int, default=2, help="failures of each training")
    parser.add_argument("--interval", type=int, default=100, help="steps between snapshots")
    parser.add_argument(
        "--share-steps", type=int, default=100, help="steps whose share is measured"
    )
    args = parser.parse_args(argv)
    if args.smoke:
        args.rounds, args.kills, args.interval, args.share_steps = 1, 1, 6, 5
    with places(args.out) as where:
        result = measure(args, where)
    write(result, args.out, draw)
    share, in_process = (
        result.summary[key] for key in ("training_thread_share", "restart_seconds_in_process")
    )
    verdict = "met" if share <= TARGET_SHARE else "MISSED"
    print(f"training_thread_share {share:.4f}, target {TARGET_SHARE}: {verdict}")
    if in_process is not None:
        verdict = "met" if in_process <= TARGET_IN_PROCESS_SECONDS else "MISSED"
        print(f"in process {in_process:.2f} s, target {TARGET_IN_PROCESS_SECONDS} s: {verdict}")


if __name__ == "__main__":
    ending.run(main)
