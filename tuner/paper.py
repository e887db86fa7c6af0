"""LowDiff's published model, for comparison.

Reference: Yao et al., "LowDiff", arXiv 2509.04084, section on configuration tuning. In this model,
full checkpoints have a frequency, batches a duration, a merge costs ``R_D`` per batch, and any
failure loses half a batch. We differ in three points. We replay step by step from concatenated
batches. We count the training time of a snapshot instead of its write time. A crash loses nothing,
because staging memory outlives the process. The paper's ``f`` and ``b`` are called ``F`` and ``B``
here and its ``S`` is ``S_F``; elsewhere these letters mean steps, and a share with its residual.
"""

from __future__ import annotations

from lowdiff.tuner.costs import Costs, without_residual
from lowdiff.tuner.failures import FailureRates

#: Largest number of steps; an optimum beyond it is out of every run's reach.
_MAX_STEPS = 10**9


def published_optimum(
    write_seconds: float, merge_seconds: float, mtbf_seconds: float
) -> tuple[float, float]:
    """Return full checkpoints per second (``F``) and seconds per batch (``B``) that waste least.

    ``F* = cube root of R_D W^2 / (4 S_F^2 M^2)``, ``B* = cube root of 2 S_F R_D M / W``.

    Args:
        write_seconds: Writing one full checkpoint (``S_F / W``).
        merge_seconds: Merging one batch of differentials into the state (``R_D``).
        mtbf_seconds: Mean time between failures (``M``).
    """
    frequency = (merge_seconds / (4 * write_seconds**2 * mtbf_seconds**2)) ** (1 / 3)
    return frequency, (2 * write_seconds * merge_seconds * mtbf_seconds) ** (1 / 3)


def published_choice(costs: Costs, rates: FailureRates) -> tuple[int, int]:
    """Return the published optimum in our units: steps between snapshots, steps per batch.

    A merge steps the whole optimizer once, as replaying a step does.
    """
    costs = without_residual(costs)
    write_seconds = costs.snapshot_bytes / costs.write_bytes_per_second
    frequency, batch = published_optimum(
        write_seconds, costs.replay_seconds, rates.total.mtbf_seconds
    )
    b = min(_MAX_STEPS, max(1, round(batch / costs.step_seconds)))
    return min(_MAX_STEPS, max(b, round(1 / (frequency * costs.step_seconds)))), b
