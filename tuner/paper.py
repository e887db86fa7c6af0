"""LowDiff's published model, for comparison.

Reference: Yao et al., "LowDiff", arXiv 2509.04084, section on configuration tuning. In this model,
full checkpoints have a frequency, batches a duration, a merge costs ``R_D`` per batch, and any
failure loses half a batch. We differ in three points. We replay step by step from concatenated
batches. We count the training time of a snapshot instead of its write time. A crash loses nothing,
because staging memory outlives the process. The paper's ``f`` and ``b`` are called ``F`` and ``B``
here and its ``S`` is ``S_F``; elsewhere these letters mean steps, and a share with its residual.
"""

from __future__ import annotations

from dataclasses import dataclass

from lowdiff.tuner.costs import Costs, without_residual
from lowdiff.tuner.failures import FailureRates

#: Largest number of steps; an optimum beyond it is out of every run's reach.
_MAX_STEPS = 10**9


@dataclass(frozen=True, slots=True)
class PublishedModel:
    """The published parameters of one rank.

    Attributes:
        full_bytes: One full checkpoint (``S_F``).
        write_bytes_per_second: Bandwidth (``W``).
        mtbf_seconds: Mean time between failures (``M``).
        merge_seconds: Merging one batch of differentials into the state (``R_D``).
        load_seconds: Loading a full checkpoint (``R_F``).
    """

    full_bytes: float
    write_bytes_per_second: float
    mtbf_seconds: float
    merge_seconds: float
    load_seconds: float

    @classmethod
    def of(cls, costs: Costs, rates: FailureRates) -> PublishedModel:
        """Return the parameters for our costs; a merge steps the whole optimizer once."""
        costs = without_residual(costs)
        return cls(
            full_bytes=costs.snapshot_bytes,
            write_bytes_per_second=costs.write_bytes_per_second,
            mtbf_seconds=rates.total.mtbf_seconds,
            merge_seconds=costs.replay_seconds,
            load_seconds=costs.load_seconds,
        )

    def waste(self, full_per_second: float, batch_seconds: float) -> float:
        """Return ``(B/2 + R_F + (R_D/2)(1/(F B) - 1))/M + F S_F/W`` in seconds per second."""
        merges = self.merge_seconds / 2 * (1 / (full_per_second * batch_seconds) - 1)
        failing = (batch_seconds / 2 + self.load_seconds + merges) / self.mtbf_seconds
        return failing + full_per_second * self.full_bytes / self.write_bytes_per_second

    def optimum(self) -> tuple[float, float]:
        """Return full checkpoints per second (``F``) and seconds per batch (``B``) that waste least.

        ``F* = cube root of R_D W^2 / (4 S_F^2 M^2)``, ``B* = cube root of 2 S_F R_D M / W``.
        """
        write = self.full_bytes / self.write_bytes_per_second
        frequency = (self.merge_seconds / (4 * write**2 * self.mtbf_seconds**2)) ** (1 / 3)
        batch = (2 * write * self.merge_seconds * self.mtbf_seconds) ** (1 / 3)
        return frequency, batch


def published_choice(costs: Costs, rates: FailureRates) -> tuple[int, int]:
    """Return the published optimum in our units: steps between snapshots, steps per batch."""
    frequency, batch = PublishedModel.of(costs, rates).optimum()
    b = min(_MAX_STEPS, max(1, round(batch / costs.step_seconds)))
    return min(_MAX_STEPS, max(b, round(1 / (frequency * costs.step_seconds)))), b
