"""The published cost model of just-in-time checkpoints, for comparison.

Reference: Gupta et al., "Just-In-Time Checkpointing", EuroSys 2024. The model counts seconds that are
wasted per GPU and second of useful training (``w``). All ranks stop for a failure of any of them, so
failures come at ``N f`` a second. The paper's letters stand in brackets. Our own strategies are
weighed in ``side_by_side``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from lowdiff.errors import ConfigError


@dataclass(frozen=True, slots=True)
class GangJob:
    """A job whose ranks all stop when one of them fails.

    Attributes:
        num_ranks: Number of GPUs (``N``).
        failures_per_rank_second: Failures of one rank in a second (``f``).
        checkpoint_seconds: Time that training stops for one checkpoint (``o``).
        restart_seconds: Time from a failure until training goes on (``r``).
        step_seconds: One training step (``m``).
        overhead_share: Seconds that just-in-time adds to a second of training without a failure
            (``o_jit``).

    Raises:
        ConfigError: If a value is out of range.
    """

    num_ranks: int
    failures_per_rank_second: float
    checkpoint_seconds: float
    restart_seconds: float
    step_seconds: float
    overhead_share: float = 0.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            positive = field.name in ("num_ranks", "checkpoint_seconds")
            if not 0 <= value < math.inf or (positive and value == 0):
                least = "positive" if positive else "at least 0"
                raise ConfigError(f"{field.name} must be {least}, got {value}")

    @property
    def failures_per_second(self) -> float:
        """Return the failures of the whole job in a second (``N f``)."""
        return self.num_ranks * self.failures_per_rank_second


def best_checkpoints_per_second(job: GangJob) -> float:
    """Return how many periodic checkpoints a second waste least: ``c* = sqrt(N f / (2 o))``."""
    return math.sqrt(job.failures_per_second / (2 * job.checkpoint_seconds))


def periodic_waste(job: GangJob, checkpoints_per_second: float | None = None) -> float:
    """Return the waste of periodic checkpoints: ``w = c o + N f r + N f / (2 c)``.

    Args:
        job: The job.
        checkpoints_per_second: Checkpoints in a second (``c``); None for the best.

    Returns:
        Wasted seconds per second of useful training.
    """
    c = (
        best_checkpoints_per_second(job)
        if checkpoints_per_second is None
        else checkpoints_per_second
    )
    failures = job.failures_per_second
    lost = failures / (2 * c) if failures else 0.0
    return c * job.checkpoint_seconds + failures * job.restart_seconds + lost


def user_level_waste(job: GangJob) -> float:
    """Return the waste of checkpoints after a failure: ``w = N f o + o_jit + N f r + N f m / 2``.

    The ranks that live save, and all processes start anew.

    Returns:
        Wasted seconds per second of useful training.
    """
    per_failure = job.checkpoint_seconds + job.restart_seconds + job.step_seconds / 2
    return job.overhead_share + job.failures_per_second * per_failure


def transparent_waste(job: GangJob) -> float:
    """Return the waste of recovery within the processes: ``w = o_jit + N f m / 2``.

    Nothing is saved and no process starts anew: the step in flight is made again.

    Returns:
        Wasted seconds per second of useful training.
    """
    return job.overhead_share + job.failures_per_second * job.step_seconds / 2


def wasted_share(waste: float) -> float:
    """Return the share of all time that is wasted: ``w / (1 + w)``.

    Args:
        waste: Wasted seconds per second of useful training (``w``).
    """
    return waste / (1 + waste)
