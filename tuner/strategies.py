"""Ways to save a training run, as the simulator models them: cost of a step, loss by a failure.

References: Young, CACM 17 (1974) and Daly, FGCS 22 (2006) for the interval of periodic snapshots;
CheckFreq (Mohan et al., FAST 2021); Gemini (Wang et al., SOSP 2023); just-in-time checkpointing
(Gupta et al., EuroSys 2024); LowDiff (arXiv 2509.04084).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from lowdiff.tuner.choice import Setting
from lowdiff.tuner.costs import (
    Costs,
    batch_seconds,
    loop_seconds,
    snapshot_write_seconds,
    without_residual,
)
from lowdiff.tuner.failures import FailureRates

#: Largest number of steps; an optimum beyond it is out of every run's reach.
_MAX_STEPS = 10**9
#: Overhead that CheckFreq's tuner allows for checkpoints, as in its paper.
_CHECKFREQ_BUDGET = 0.035
#: Interval at which Gemini and just-in-time also save to storage, for failures that take all
#: copies.
_FALLBACK_SECONDS = 3 * 3600.0


@dataclass(frozen=True, slots=True)
class Recovery:
    """Recovery after a failure of one kind.

    Attributes:
        grain_steps: Steps between two saves; inf: nothing is ever saved.
        lag_seconds: Time from a save until it can be used.
        fixed_seconds: Time from the failure to the beginning of replay.
        base_steps: Steps between two snapshots; replay starts from a snapshot.
        base_lag_seconds: Time from a snapshot until it can be used.
        replay_seconds: Replay time per step from the snapshot to the newest save.
        start_is_safe: Whether the state that a restart began with also survives this kind.
    """

    grain_steps: float
    lag_seconds: float
    fixed_seconds: float
    base_steps: float = math.inf
    base_lag_seconds: float = 0.0
    replay_seconds: float = 0.0
    start_is_safe: bool = True


@dataclass(frozen=True, slots=True)
class Strategy:
    """One way to save a run.

    Attributes:
        name: Name for people.
        detail: Chosen settings, for people.
        step_seconds: One step, including what saving adds to each step.
        stall_seconds: Time that training waits for every ``interval_steps``.
        interval_steps: Steps between two stalls; inf for none.
        process: Recovery after a crash of processes only.
        node: Recovery after the loss of a node.
        group: Recovery after the loss of several nodes, with all copies of some data.
    """

    name: str
    detail: str
    step_seconds: float
    stall_seconds: float
    interval_steps: float
    process: Recovery
    node: Recovery
    group: Recovery

    @property
    def loop_seconds(self) -> float:
        """Return the time of one step with its share of the stalls."""
        return self.step_seconds + self.stall_seconds / self.interval_steps


def lowdiff(costs: Costs, setting: Setting, name: str = "lowdiff") -> Strategy:
    """Model lowdiff: staging survives a crash, batches are durable, replay starts at a snapshot."""
    f, b = setting.snapshot_every, setting.batch_size
    loop = loop_seconds(costs, f, b)
    process = Recovery(
        grain_steps=1,
        lag_seconds=0.0,
        fixed_seconds=costs.restart_seconds + costs.load_seconds,
        base_steps=f,
        base_lag_seconds=costs.snapshot_bytes / costs.write_bytes_per_second,
        replay_seconds=costs.replay_seconds,
    )
    node = replace(process, grain_steps=b, lag_seconds=batch_seconds(costs, b))
    return Strategy(
        name=name,
        detail=f"f = {f:,}, b = {b}",
        step_seconds=max(costs.step_seconds, loop - costs.snapshot_seconds / f),
        stall_seconds=costs.snapshot_seconds,
        interval_steps=f,
        process=process,
        node=node,
        group=node,
    )


def no_checkpoints(costs: Costs) -> Strategy:
    """Model training without checkpoints: every failure restarts from the beginning."""
    nothing = Recovery(math.inf, 0.0, costs.restart_seconds)
    return Strategy("no checkpoints", "", costs.step_seconds, 0.0, math.inf, *(nothing,) * 3)


def periodic_full(costs: Costs, rates: FailureRates) -> Strategy:
    """Model full snapshots at the Young/Daly interval; training stops while the state is written."""
    write = snapshot_write_seconds(costs) + costs.snapshot_seconds
    interval = _young_daly(write, rates.total.mtbf_seconds, costs.step_seconds)
    saved = Recovery(interval, 0.0, costs.restart_seconds + costs.load_seconds)
    detail = _every(interval)
    return Strategy("periodic full", detail, costs.step_seconds, write, interval, *(saved,) * 3)


def checkfreq(costs: Costs) -> Strategy:
    """Model CheckFreq: training waits for a copy only, as often as 3.5 % overhead allow."""
    budget = costs.snapshot_seconds / (_CHECKFREQ_BUDGET * costs.step_seconds)
    interval = max(1, math.ceil(max(budget, snapshot_write_seconds(costs) / costs.step_seconds)))
    saved = Recovery(
        interval, snapshot_write_seconds(costs), costs.restart_seconds + costs.load_seconds
    )
    detail = _every(interval)
    return Strategy(
        "CheckFreq", detail, costs.step_seconds, costs.snapshot_seconds, interval, *(saved,) * 3
    )


def gemini(costs: Costs, network_bytes_per_second: float) -> Strategy:
    """Model Gemini: a full copy in peers' memory as often as the network allows, plus storage.

    Its traffic hides in idle network time. Its training cost is only the local part of the copy,
    which is taken as zero, to Gemini's advantage.
    """
    send = costs.snapshot_bytes / network_bytes_per_second
    every = max(1, math.ceil(send / costs.step_seconds))
    load = costs.restart_seconds + send
    peers = Recovery(every, send, load)
    detail = f"{_every(every)} to a peer, every 3 h to storage"
    return Strategy(
        "Gemini", detail, costs.step_seconds, 0.0, math.inf, peers, peers, _fallback(costs)
    )


def just_in_time(costs: Costs, *, num_nodes: int) -> Strategy:
    """Model just-in-time: surviving replica ranks save after a failure; storage is the fallback."""
    save = costs.restart_seconds + snapshot_write_seconds(costs) + costs.load_seconds
    survivors, storage = Recovery(1, 0.0, save), _fallback(costs)
    # If all ranks are on one node, no rank outlives the node.
    node = survivors if num_nodes > 1 else storage
    detail = "on failure, every 3 h to storage"
    return Strategy(
        "just-in-time", detail, costs.step_seconds, 0.0, math.inf, survivors, node, storage
    )


def published_lowdiff(costs: Costs, rates: FailureRates) -> Strategy:
    """Model LowDiff as published: batches are in the trainer's memory, so a crash loses them, too.

    A batch is merged into one update. Replay is therefore ``b`` times as fast, but it is not exact
    for an optimizer with state.
    """
    f, b = published_choice(costs, rates)
    saved = Recovery(
        grain_steps=b,
        lag_seconds=batch_seconds(costs, b),
        fixed_seconds=costs.restart_seconds + costs.load_seconds,
        base_steps=f,
        base_lag_seconds=snapshot_write_seconds(costs),
        replay_seconds=costs.replay_seconds / b,  # a merged batch is one update
    )
    loop = loop_seconds(costs, f, b)
    return Strategy(
        "LowDiff as published", f"f = {f:,}, b = {b}; exact for plain SGD only",
        max(costs.step_seconds, loop - costs.snapshot_seconds / f), costs.snapshot_seconds, f, *(saved,) * 3,
    )  # fmt: skip


def alternatives(
    costs: Costs, rates: FailureRates, *, num_nodes: int, network_bytes_per_second: float
) -> tuple[Strategy, ...]:
    """Return the usual alternatives, without costs for error feedback, which none of them saves.

    Args:
        costs: Costs of the job.
        rates: Failure rates of the job.
        num_nodes: Machines of the job's ranks.
        network_bytes_per_second: One rank's share of its node's bandwidth.
    """
    costs = without_residual(costs)
    found = [
        published_lowdiff(costs, rates),
        checkfreq(costs),
        periodic_full(costs, rates),
        no_checkpoints(costs),
    ]
    # A single rank has no other rank with equal parameters that could survive its crash.
    if costs.world_size > 1:
        found.append(just_in_time(costs, num_nodes=num_nodes))
    # Gemini's copies protect against the loss of a node; a peer on the same node is lost with it.
    if num_nodes > 1:
        found.append(gemini(costs, network_bytes_per_second))
    return tuple(found)


def _fallback(costs: Costs) -> Recovery:
    every = max(1, math.ceil(_FALLBACK_SECONDS / costs.step_seconds))
    load = costs.restart_seconds + costs.load_seconds
    return Recovery(every, snapshot_write_seconds(costs), load, start_is_safe=False)


def _young_daly(write_seconds: float, mtbf_seconds: float, step_seconds: float) -> int:
    """Return ``sqrt(2 C M)`` (Young) less ``C`` (Daly), in steps, at least one."""
    if math.isinf(mtbf_seconds):
        return 1_000_000
    interval = math.sqrt(2 * write_seconds * mtbf_seconds) - write_seconds
    return max(1, round(interval / step_seconds))


def _every(steps: int) -> str:
    return "every step" if steps == 1 else f"every {steps:,} steps"


def published_optimum(
    write_seconds: float, merge_seconds: float, mtbf_seconds: float
) -> tuple[float, float]:
    """Return full checkpoints per second (``F``) and seconds per batch (``B``) that waste least.

    Reference: Yao et al., "LowDiff", arXiv 2509.04084, section on configuration tuning. In this
    model, full checkpoints have a frequency, batches a duration, a merge costs ``R_D`` per batch,
    and any failure loses half a batch. We differ in three points. We replay step by step from
    concatenated batches. We count the training time of a snapshot instead of its write time. A
    crash loses nothing, because staging memory outlives the process. The paper's ``f`` and ``b``
    are called ``F`` and ``B`` here and its ``S`` is ``S_F``; elsewhere these letters mean steps,
    and a share with its residual.

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
