"""Runs the demo: one run without interruption, one killed and resumed, and the comparison."""

from __future__ import annotations

import random
import shutil
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from lowdiff.demo.launch import Launch, torchrun_command
from lowdiff.demo.progress import LifeProgress
from lowdiff.demo.records import Attached, StepDone
from lowdiff.demo.result import (
    DemoResult,
    compare,
    measure_cost,
    measure_resumption,
    read_life,
)
from lowdiff.errors import ConfigError

_TRAINING_MODULE = "lowdiff.demo.train"
_MARKER = ".lowdiff-demo"
_SEGMENT_PATTERN = "*.seg"
_FEWEST_STEPS = 10
_SEEDS = 2**31


@dataclass(frozen=True, slots=True)
class KillPlan:
    """When to kill: after rank 0 did ``step``, and a share of a step's time later.

    Attributes:
        step: Between 30 % and 70 % of the run.
        share: In ``[0, 1)``, so that the kill hits any instant of a step.
    """

    step: int
    share: float


def plan_kill(seed: int, steps: int) -> KillPlan:
    """Draw the instant of the kill; the same seed gives the same one."""
    random_source = random.Random(seed)
    return KillPlan(
        step=random_source.randint(round(0.3 * steps), round(0.7 * steps)),
        share=random_source.random(),
    )


def run_demo(
    output: Path,
    *,
    steps: int = 60,
    world_size: int = 2,
    seed: int | None = None,
    snapshot_every: int = 20,
    console: Console | None = None,
) -> DemoResult:
    """Train twice, kill one of the two in the middle, resume it, and compare them.

    Args:
        output: Folder for runs and logs; emptied first if an earlier demo made it.
        steps: Steps of each run.
        world_size: Worker processes.
        seed: Of the training and of the kill; random by default.
        snapshot_every: Steps between full snapshots.
        console: Where progress goes.

    Raises:
        ConfigError: A setting cannot work, or ``output`` holds something else.
        WorkersFailed: The training processes failed.
    """
    if steps < _FEWEST_STEPS or world_size < 1:
        raise ConfigError(
            f"the demo needs at least {_FEWEST_STEPS} steps and 1 worker, got {steps} steps and "
            f"{world_size} workers"
        )
    seed = random.SystemRandom().randrange(_SEEDS) if seed is None else seed
    if not 0 <= seed < _SEEDS:
        raise ConfigError(f"seed must be in [0, {_SEEDS}), got {seed}")
    console = Console() if console is None else console
    plan = plan_kill(seed, steps)
    _prepare(output)
    console.print(
        f"Seed {seed}: {world_size} workers train {steps} steps twice; the second run's are "
        f"killed (SIGKILL) right after step {plan.step}"
    )
    lives = _Lives(output, steps, world_size, seed, snapshot_every)
    began = time.monotonic()
    with LifeProgress(console, steps=steps) as progress:
        lives.run("uninterrupted", progress)
        lives.run("killed", progress, plan)
        restarted = time.time()
        lives.run("resumed", progress)
    total_seconds = time.monotonic() - began

    reference, killed, resumed = (
        read_life(output / "logs" / name, world_size=world_size)
        for name in ("uninterrupted", "killed", "resumed")
    )
    segments = (output / "runs" / "uninterrupted").rglob(_SEGMENT_PATTERN)
    finished = resumed[0].finished
    return DemoResult(
        seed=seed,
        steps=steps,
        world_size=world_size,
        num_parameters=finished.num_parameters if finished else 0,
        killed_at=killed[0].committed,
        resumed_from=resumed[0].attached.completed,
        comparison=compare(reference, killed, resumed, steps=steps),
        resumption=measure_resumption(resumed[0], started=restarted),
        cost=measure_cost(reference, segment_bytes=sum(s.stat().st_size for s in segments)),
        held_out_loss=float.fromhex(finished.held_out_loss) if finished else float("nan"),
        uninterrupted=reference[0].curve,
        killed=killed[0].curve,
        resumed=resumed[0].curve,
        total_seconds=total_seconds,
    )


def main(output: Path, steps: int = 60, world_size: int = 2, seed: int | None = None) -> int:
    """Run the demo, print the table and draw the picture.

    Returns:
        Exit code: 0 when no step was lost and every bit agrees, 1 otherwise.
    """
    from lowdiff.demo.report import draw, print_report, write_json

    console = Console()
    result = run_demo(output, steps=steps, world_size=world_size, seed=seed, console=console)
    write_json(result, output / "demo.json")
    draw(result, output / "demo.png")
    print_report(result, console, picture=output / "demo.png")
    return 1 if result.failures else 0


@dataclass(frozen=True, slots=True)
class _Lives:
    """Starts lives that share all settings; killed and resumed share a run folder as well."""

    output: Path
    steps: int
    world_size: int
    seed: int
    snapshot_every: int

    def run(self, name: str, progress: LifeProgress, plan: KillPlan | None = None) -> None:
        """Follow one life to its end, or to the kill that ``plan`` asks for."""
        logs = self.output / "logs" / name
        run = self.output / "runs" / ("uninterrupted" if name == "uninterrupted" else "interrupted")
        arguments = [f"--checkpoints={run}", f"--records={logs}", f"--steps={self.steps}"]
        arguments += [f"--seed={self.seed}", f"--snapshot-every={self.snapshot_every}"]
        progress.begin(name)
        command = torchrun_command(_TRAINING_MODULE, arguments, world_size=self.world_size)
        durations = []
        with Launch(command, logs) as launch:
            for record in launch.records():
                if isinstance(record, Attached):
                    progress.attached(record.completed)
                elif isinstance(record, StepDone):
                    progress.step(record.step, float.fromhex(record.loss))
                    durations.append(record.seconds)
                    if plan is not None and record.step == plan.step:
                        time.sleep(plan.share * statistics.median(durations))
                        workers = launch.kill()
                        progress.end(f"killed {len(workers)} workers after step {record.step}")
                        return
        progress.end("done")


def _prepare(output: Path) -> None:
    """Make ``output``, without what an earlier demo left there, and touch nothing else."""
    if output.exists() and not (output / _MARKER).exists() and any(output.iterdir()):
        raise ConfigError(
            f"{output} holds something that no demo put there; give a new or empty folder"
        )
    output.mkdir(parents=True, exist_ok=True)
    (output / _MARKER).touch()
    for name in ("runs", "logs"):
        shutil.rmtree(output / name, ignore_errors=True)
