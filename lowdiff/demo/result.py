"""What the demo found, worked out from the records of its three lives.

An uninterrupted run is one *life*; the interrupted run has two, killed and resumed.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lowdiff.demo.records import Attached, Finished, Record, RecordReader, StepDone, log_path
from lowdiff.errors import LowDiffError

#: Losses of rank 0: ``(step, loss)``.
Curve = tuple[tuple[int, float], ...]


class IncompleteLog(LowDiffError):
    """A training process left out a record that the demo needs."""


@dataclass(frozen=True, slots=True)
class Life:
    """The records of one rank from start to end or death."""

    attached: Attached
    steps: tuple[StepDone, ...]
    finished: Finished | None

    @property
    def committed(self) -> int:
        """Last step that this life proves to be committed (see ``StepDone``)."""
        return max([self.attached.completed, *(done.step - 1 for done in self.steps)])

    @property
    def curve(self) -> Curve:
        """Loss by step."""
        return tuple((done.step, float.fromhex(done.loss)) for done in self.steps)


def read_life(folder: Path, *, world_size: int) -> tuple[Life, ...]:
    """The records of one life, by rank.

    Raises:
        IncompleteLog: A rank never attached.
    """
    return tuple(
        make_life(RecordReader(log_path(folder, rank)).new(), source=str(log_path(folder, rank)))
        for rank in range(world_size)
    )


def make_life(records: Sequence[Record], *, source: str) -> Life:
    """Sort one rank's records; ``source`` is named when one is missing."""
    attached = next((r for r in records if isinstance(r, Attached)), None)
    if attached is None:
        raise IncompleteLog(f"{source} does not say that the checkpointer was attached")
    steps = tuple(r for r in records if isinstance(r, StepDone))
    return Life(attached, steps, next((r for r in records if isinstance(r, Finished)), None))


@dataclass(frozen=True, slots=True)
class Comparison:
    """Outcome of comparing the two runs bit for bit.

    Attributes:
        num_tensors: Tensors and other parts of the final state compared, over all ranks.
        num_losses: Losses compared, over all ranks; a step done twice counts twice.
        differences: What differed, in words: rank by rank, losses first, in step order.
    """

    num_tensors: int
    num_losses: int
    differences: tuple[str, ...]


def compare(
    reference: Sequence[Life], killed: Sequence[Life], resumed: Sequence[Life], *, steps: int
) -> Comparison:
    """Compare an uninterrupted run with a killed and resumed one, rank by rank."""
    differences: list[str] = []
    num_losses = num_tensors = 0
    for rank, (whole, first, second) in enumerate(zip(reference, killed, resumed, strict=True)):
        expected = {done.step: done.loss for done in whole.steps}
        both = sorted([*first.steps, *second.steps], key=lambda done: done.step)
        num_losses += len(both)
        found = {done.step for done in both}
        missing = [s for s in range(1, steps + 1) if s not in found or s not in expected]
        differences += [f"rank {rank}: no loss of step {step}" for step in missing]
        differences += [
            f"rank {rank}, step {done.step}: loss {float.fromhex(done.loss)!r} instead of "
            f"{float.fromhex(expected[done.step])!r}"
            for done in both
            if expected.get(done.step, done.loss) != done.loss
        ]
        if whole.finished is None or second.finished is None:
            differences.append(f"rank {rank}: no final state")
            continue
        want, have = whole.finished.digests, second.finished.digests
        num_tensors += len(want)
        if whole.finished.held_out_loss != second.finished.held_out_loss:
            differences.append(f"rank {rank}: the held-out loss differs")
        differences += [
            f"rank {rank}: {name} differs after step {steps}"
            for name in sorted(want.keys() | have.keys())
            if want.get(name) != have.get(name)
        ]
    return Comparison(num_tensors, num_losses, tuple(differences))


@dataclass(frozen=True, slots=True)
class Resumption:
    """Where the time between starting the processes again and the next step went.

    Attributes:
        launch_seconds: torchrun, Python, ``import torch``, process group, corpus, model.
        attach_seconds: ``Checkpointer.attach``: find the newest step, load, replay.
        first_step_seconds: From there to the end of the first new step.
    """

    launch_seconds: float
    attach_seconds: float
    first_step_seconds: float

    @property
    def total_seconds(self) -> float:
        """From start to the end of the first new step."""
        return self.launch_seconds + self.attach_seconds + self.first_step_seconds


def measure_resumption(resumed: Life, *, started: float) -> Resumption:
    """Split the time to resume; ``started`` is in seconds since the epoch.

    Raises:
        IncompleteLog: The resumed life made no step.
    """
    if not resumed.steps:
        raise IncompleteLog("the resumed run made no step")
    attached = resumed.attached
    return Resumption(
        launch_seconds=attached.time - attached.seconds - started,
        attach_seconds=attached.seconds,
        first_step_seconds=resumed.steps[0].time - attached.time,
    )


@dataclass(frozen=True, slots=True)
class Cost:
    """What checkpointing every step cost the uninterrupted run.

    Attributes:
        staged_bytes: Bytes staged, ``[rank][step - 1]``.
        durable_bytes_per_step: Differentials on disk, mean over the steps, by rank.
        segment_bytes: Size of the segment files that retention has kept.
        full_checkpoint_bytes: What one full checkpoint of the same state holds.
        training_thread_seconds: Time taken from the training thread per step; mean, slowest rank.
        step_seconds: Median time of a whole step, rank 0.
    """

    staged_bytes: tuple[tuple[int, ...], ...]
    durable_bytes_per_step: tuple[float, ...]
    segment_bytes: int
    full_checkpoint_bytes: int
    training_thread_seconds: float
    step_seconds: float


def measure_cost(reference: Sequence[Life], *, segment_bytes: int) -> Cost:
    """Collect the cost from an uninterrupted life.

    Raises:
        IncompleteLog: It did not reach its end.
    """
    finished = [life.finished for life in reference if life.finished is not None]
    if len(finished) < len(reference) or not reference[0].steps:
        raise IncompleteLog("the uninterrupted run did not report its end")
    staged = []
    for life, end in zip(reference, finished, strict=True):
        totals = [*(done.staged_bytes for done in life.steps), int(end.stats["staged_bytes"])]
        staged.append(tuple(after - before for before, after in itertools.pairwise(totals)))
    return Cost(
        staged_bytes=tuple(staged),
        durable_bytes_per_step=tuple(e.stats["durable_bytes"] / e.stats["steps"] for e in finished),
        segment_bytes=segment_bytes,
        full_checkpoint_bytes=finished[0].full_checkpoint_bytes,
        training_thread_seconds=max(
            e.stats["training_thread_seconds"] / e.stats["steps"] for e in finished
        ),
        step_seconds=statistics.median(done.seconds for done in reference[0].steps),
    )


@dataclass(frozen=True, slots=True)
class DemoResult:
    """Everything the report shows.

    Attributes:
        seed: Seed of the training and of the kill.
        steps: Steps of each run.
        world_size: Worker processes.
        num_parameters: Elements of the model.
        killed_at: Last step that rank 0 had proved to be committed when it died.
        resumed_from: Step that ``attach`` returned afterwards.
        comparison: The two runs bit for bit.
        resumption: Time to resume.
        cost: Bytes and time per step.
        held_out_loss: At the end, of the resumed run.
        uninterrupted: Loss curve of rank 0.
        killed: Loss curve of rank 0 up to the kill.
        resumed: Loss curve of rank 0 from there.
        total_seconds: Of all three lives.
    """

    seed: int
    steps: int
    world_size: int
    num_parameters: int
    killed_at: int
    resumed_from: int
    comparison: Comparison
    resumption: Resumption
    cost: Cost
    held_out_loss: float
    uninterrupted: Curve
    killed: Curve
    resumed: Curve
    total_seconds: float

    @property
    def steps_lost(self) -> int:
        """Committed steps that had to be trained again."""
        return max(0, self.killed_at - self.resumed_from)

    @property
    def failures(self) -> tuple[str, ...]:
        """What went wrong, in words; empty when the demo shows what it promises."""
        lost = f"{self.steps_lost} committed steps were lost"
        return ((lost,) if self.steps_lost else ()) + self.comparison.differences
