"""Explain in sentences why a setting was chosen, with the figures behind the choice."""

from __future__ import annotations

from lowdiff.tuner.costs import Costs, batch_seconds, fixed_recovery_seconds, writer_share
from lowdiff.tuner.failures import FailureRates
from lowdiff.tuner.units import readable_seconds


def weighed(costs: Costs, rates: FailureRates, ideal: float) -> str:
    """Return the formula of `best_interval` with every number in it."""
    fixed = fixed_recovery_seconds(costs)
    sign = "-" if fixed < 0 else ""
    return (
        f"f = sqrt(2 C (M + K) / (r (T + d))) = {ideal:,.0f}: a snapshot takes C = "
        f"{readable_seconds(costs.snapshot_seconds)} of training, a failure comes every M = "
        f"{readable_seconds(rates.total.mtbf_seconds)}, a restart with its loading, less r/2, "
        f"takes K = {sign}{readable_seconds(abs(fixed))}, replaying one of the steps since "
        f"the snapshot r = {readable_seconds(costs.replay_seconds)}, and a step with its differential takes "
        f"T + d = {readable_seconds(costs.step_seconds + costs.differential_seconds)}"
    )


def why_batch(costs: Costs, f: int, b: int, *, most: int, allowed_share: float) -> str:
    """Explain the choice of a batch size; ``most`` is the largest that the limits allow."""
    busy = writer_share(costs, f, b)
    if busy > allowed_share + 1e-9:
        others = "" if most == 1 else ", and no larger batch would waste less"
        return (
            f"b = {b}: the writer is busy for {busy:.0%} of a step, more than the "
            f"{allowed_share:.0%} it should be{others}"
        )
    if b == 1:
        return "b = 1: the writer keeps up with every step by itself, so nothing is gained"
    return (
        f"b = {b}: a durable write takes {readable_seconds(batch_seconds(costs, b))}, and in "
        f"smaller batches the disk would be busy for more than {allowed_share:.0%}, or "
        "snapshots would have to be rarer"
    )
