"""Run the demo: one run without interruption, one killed and resumed, and the comparison."""

from __future__ import annotations

import random
import re
import shutil
import statistics
import time
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from lowdiff.demo.launch import Launch, torchrun_command
from lowdiff.errors import ConfigError

_SCRIPT = "lowdiff.examples.ddp_gpt"
_SIZE = ("--width=128", "--batch-size=64")  # half a million parameters
_MARKER, _CHECKPOINT = ".lowdiff-demo", "final.pt"
_FEWEST_STEPS = 10
_SEEDS = 2**31
_START = re.compile(r"starting at step (\d+)")
_STEP = re.compile(r"step (\d+): loss (\S+)")
_END = re.compile(r"rank (\d+): weights ([\da-f]+), lowdiff ([\d.]+) ms a step")


def plan_kill(seed: int, steps: int) -> tuple[int, float]:
    """Draw the instant of the kill: a step, and a share of a step's time after it.

    The step lies between 30 % and 70 % of the run, and the share in ``[0, 1)``, so that the kill
    hits any instant of a step. The same seed gives the same instant.
    """
    chance = random.Random(seed)
    return chance.randint(round(0.3 * steps), round(0.7 * steps)), chance.random()


@dataclass(slots=True)
class LaunchOutput:
    """Output of the processes of one launch, with times in seconds since the launch.

    Attributes:
        resumed_from: Step that ``attach`` returned; -1 before.
        attached_after: Time at which ``attach`` returned.
        losses: Step -> loss of rank 0 as printed, with nine digits: all bits of a float32.
        times: Step -> time at which its loss was printed.
        weights: Rank -> digest of its weights after the last step.
        lowdiff_seconds: Rank -> mean time per step that lowdiff took from its training thread.
    """

    resumed_from: int = -1
    attached_after: float = 0.0
    losses: dict[int, str] = field(default_factory=dict)
    times: dict[int, float] = field(default_factory=dict)
    weights: dict[int, str] = field(default_factory=dict)
    lowdiff_seconds: dict[int, float] = field(default_factory=dict)

    def hear(self, line: str, after: float) -> None:
        """Parse a line that was printed at time ``after``; two ranks may print into one line."""
        if start := _START.search(line):
            self.resumed_from, self.attached_after = int(start[1]), after
        if done := _STEP.search(line):
            self.losses[int(done[1])], self.times[int(done[1])] = done[2], after
        for rank, digest, milliseconds in _END.findall(line):
            self.weights[int(rank)] = digest
            self.lowdiff_seconds[int(rank)] = float(milliseconds) / 1000

    def step_seconds(self, first: int, last: int) -> float:
        """Return the median time from one step to the next, for steps ``first`` to ``last``."""
        times = [after for step, after in self.times.items() if first <= step <= last]
        return statistics.median(after - before for before, after in pairwise(times))


@dataclass(frozen=True, slots=True)
class DemoResult:
    """Everything that the report shows.

    Attributes:
        run: Folder of the run that was killed and resumed.
        seed: Seed of the training and of the kill.
        world_size: Worker processes.
        steps: Steps of each run. After them each trains some more with lowdiff detached, in the same processes, so
            that other load on the machine slows both alike.
        reference: The run that was never interrupted.
        killed: The other run until SIGKILL.
        resumed: The other run after SIGKILL.
        num_parameters: Elements of the model.
        num_values: Tensors, generators and positions compared, as recovered from both runs.
        differences: Names of those that differ.
        stored_bytes: Step -> bytes of its differential over all ranks, for steps that are kept.
        full_checkpoint_bytes: Bytes of a ``torch.save`` of model and optimizer.
    """

    run: Path
    seed: int
    world_size: int
    steps: int
    reference: LaunchOutput
    killed: LaunchOutput
    resumed: LaunchOutput
    num_parameters: int
    num_values: int
    differences: tuple[str, ...]
    stored_bytes: dict[int, int]
    full_checkpoint_bytes: int

    @property
    def committed(self) -> int:
        """Return the last step that the killed run's output proves to be committed on every rank.

        Rank 0 prints a step before committing it. The step's exchange of gradients includes every
        rank, and a rank takes part only after it committed the step before.
        """
        return max(self.killed.losses, default=1) - 1

    @property
    def steps_lost(self) -> int:
        """Return the number of committed steps that had to be trained again."""
        return max(0, self.committed - self.resumed.resumed_from)

    @property
    def mean_stored_bytes(self) -> float:
        """Return the mean bytes of a step's differential over all ranks."""
        return statistics.mean(self.stored_bytes.values())

    @property
    def failures(self) -> tuple[str, ...]:
        """Return failures in words; empty if the demo succeeded."""
        found = [f"{self.steps_lost} committed steps were lost"] if self.steps_lost else []
        for step, expected in self.reference.losses.items():
            losses = {launch.losses.get(step, expected) for launch in (self.killed, self.resumed)}
            found += [f"step {step}: loss {x} instead of {expected}" for x in losses - {expected}]
        made = self.killed.losses.keys() | self.resumed.losses.keys()
        found += [f"step {step}: no loss" for step in sorted(self.reference.losses.keys() ^ made)]
        for rank in range(self.world_size):
            ours, others = self.reference.weights.get(rank), self.resumed.weights.get(rank)
            if ours is None or ours != others:
                found.append(f"rank {rank}: weights {others} instead of {ours}")
        return (*found, *self.differences)


def run_demo(
    output: Path,
    *,
    steps: int = 60,
    world_size: int = 2,
    seed: int | None = None,
) -> DemoResult:
    """Train twice, kill one of the two in the middle, resume it, and compare them.

    Args:
        output: Folder for runs, staging and logs; emptied first if an earlier demo made it.
        steps: Steps of each run.
        world_size: Worker processes.
        seed: Seed of the training and of the kill; random by default.

    Raises:
        ConfigError: If a setting is out of range, or ``output`` holds something else.
        WorkersFailed: If the training processes failed.
    """
    if steps < _FEWEST_STEPS or world_size < 1:
        raise ConfigError(
            f"the demo needs at least {_FEWEST_STEPS} steps and 1 worker, got {steps} steps and "
            f"{world_size} workers"
        )
    seed = random.SystemRandom().randrange(_SEEDS) if seed is None else seed
    if not 0 <= seed < _SEEDS:
        raise ConfigError(f"seed must be in [0, {_SEEDS}), got {seed}")
    _prepare(output)
    with Progress(
        *(TextColumn("{task.description:<17}"), BarColumn(bar_width=32), MofNCompleteColumn()),
        *(TimeElapsedColumn(), TextColumn("{task.fields[status]}")),
    ) as progress:
        launches = _Launches(output, world_size, seed, progress)
        kill = plan_kill(seed, steps)
        progress.console.print(
            f"Seed {seed}: {world_size} workers train {steps} steps twice, and some more without lowdiff; "
            f"the second run's are killed (SIGKILL) right after step {kill[0]}"
        )
        reference = launches.live("uninterrupted", "whole", steps)
        killed = launches.live("killed", "killed", steps, kill=kill)
        resumed = launches.live("resumed", "killed", steps)
    from lowdiff.recovery import compare, recover
    from lowdiff.recovery.inspect.export import export
    from lowdiff.recovery.inspect.timeline import timeline

    whole, staging = output / "runs" / "whole", output / "staging"
    state = recover(whole, steps, staging=staging)
    other = recover(output / "runs" / "killed", steps, staging=staging)
    optimizer_values = (entries for o in state.optimizers for entries in o.state.values())
    parts = (state.parameters, *optimizer_values, *state.items)
    measured = timeline(whole, staging=staging).steps
    return DemoResult(
        run=output / "runs" / "killed",
        seed=seed,
        world_size=world_size,
        steps=steps,
        reference=reference,
        killed=killed,
        resumed=resumed,
        num_parameters=sum(tensor.numel() for tensor in state.parameters.values()),
        num_values=sum(map(len, parts)),
        differences=tuple(compare.differences(state, other)),
        stored_bytes={step.step: step.stored_bytes for step in measured},
        full_checkpoint_bytes=export(state, output / _CHECKPOINT, overwrite=True).stat().st_size,
    )


@dataclass(frozen=True, slots=True)
class _Launches:
    """Launches of the training script with common settings."""

    output: Path
    world_size: int
    seed: int
    progress: Progress

    def live(
        self, name: str, run: str, steps: int, *, kill: tuple[int, float] | None = None
    ) -> LaunchOutput:
        """Train the run up to ``steps``, and on without lowdiff; or until the kill."""
        last = steps + max(_FEWEST_STEPS, steps // 3)
        # Staging on disk also survives SIGKILL, and /dev/shm is small in many containers.
        folders = (str(self.output / "runs" / run), f"--staging={self.output / 'staging'}")
        ends = (f"--steps={last}", f"--detach-after={steps}")
        arguments = [*folders, *ends, f"--seed={self.seed}", *_SIZE]
        command = torchrun_command(_SCRIPT, arguments, world_size=self.world_size)
        bar = self.progress.add_task(name, total=last, status="starting the processes")
        printed, began = LaunchOutput(), time.monotonic()
        with Launch(command, self.output / "logs" / f"{name}.txt") as launch:
            for line in launch.lines():
                printed.hear(line, time.monotonic() - began)
                if not printed.losses:
                    continue
                step, loss = max(printed.losses.items())
                self.progress.update(bar, completed=step, status=f"loss {float(loss):.3f}")
                if kill is not None and step == kill[0]:
                    time.sleep(kill[1] * printed.step_seconds(1, step))
                    workers, kill = launch.kill(), None
                    self.progress.console.print(f"Killed {len(workers)} workers after step {step}")
        self.progress.stop_task(bar)
        return printed


def _prepare(output: Path) -> None:
    """Create ``output`` without the files of an earlier demo; touch nothing else."""
    if output.exists() and not (output / _MARKER).exists() and any(output.iterdir()):
        raise ConfigError(
            f"{output} holds something that no demo put there; give a new or empty folder"
        )
    output.mkdir(parents=True, exist_ok=True)
    (output / _MARKER).touch()
    for name in ("runs", "logs", "staging"):
        shutil.rmtree(output / name, ignore_errors=True)
