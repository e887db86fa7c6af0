"""LowDiff's published model, for comparison.

Reference: Yao et al., "LowDiff", arXiv 2509.04084, section on configuration tuning. Full
checkpoints come at a frequency, batches last a time, a merge costs ``R_D`` per batch, and any
failure loses half a batch. We differ in replaying step by step from concatenated batches, in
counting what a snapshot takes from training instead of its write time, and in crashes that lose
nothing because staging memory outlives the process. The paper's ``f`` and ``b`` are ``F`` and ``B``
here, its ``S`` is ``S_F``: elsewhere those letters mean steps, and a shard with its residual.
"""

from __future__ import annotations

from dataclasses import dataclass

from lowdiff.tuner.costs import Costs, without_residual
from lowdiff.tuner.failures import FailureRates

#: Where somebody's figures put the optimum beyond, it is out of every run's reach anyway.
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
        """From this framework's costs; a merge steps the whole optimizer once, as a replay does."""
        costs = without_residual(costs)
        return cls(
            full_bytes=costs.snapshot_bytes,
            write_bytes_per_second=costs.write_bytes_per_second,
            mtbf_seconds=rates.total.mtbf_seconds,
            merge_seconds=costs.replay_seconds,
            load_seconds=costs.load_seconds,
        )

    def waste(self, full_per_second: float, batch_seconds: float) -> float:
        """``(B/2 + R_F + (R_D/2)(1/(F B) - 1))/M + F S_F/W``: seconds per second."""
        merges = self.merge_seconds / 2 * (1 / (full_per_second * batch_seconds) - 1)
        failing = (batch_seconds / 2 + self.load_seconds + merges) / self.mtbf_seconds
        return failing + full_per_second * self.full_bytes / self.write_bytes_per_second

    def optimum(self) -> tuple[float, float]:
        """Full checkpoints per second (``F``) and seconds per batch (``B``) that waste least.

        ``F* = cube root of R_D W^2 / (4 S_F^2 M^2)``, ``B* = cube root of 2 S_F R_D M / W``.
        """
        write = self.full_bytes / self.write_bytes_per_second
        frequency = (self.merge_seconds / (4 * write**2 * self.mtbf_seconds**2)) ** (1 / 3)
        batch = (2 * write * self.merge_seconds * self.mtbf_seconds) ** (1 / 3)
        return frequency, batch


def published_choice(costs: Costs, rates: FailureRates) -> tuple[int, int]:
    """The published optimum in this framework's units: steps between snapshots, steps per batch."""
    frequency, batch = PublishedModel.of(costs, rates).optimum()
    b = min(_MAX_STEPS, max(1, round(batch / costs.step_seconds)))
    return min(_MAX_STEPS, max(b, round(1 / (frequency * costs.step_seconds)))), b
