"""Figures of a training's wall time, from the lines that ``effective_life`` noted."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from benches.effective_life import LOWDIFF
from benches.effective_supervisor import NODE, PROCESS, Strike, Struck
from benches.survivors_life import WORLD_SIZE, Line
from lowdiff.tuner.simulate import FailureModel, Trace, draw_trace, simulate
from lowdiff.tuner.strategies import Recovery, Strategy

_TRIALS, _MANY = 4, 2000
#: What happens after a kill, in order.
MARKS = ("up", "joined", "made", "attached")


@dataclass(frozen=True, slots=True)
class Failure:
    """Costs of one failure.

    Attributes:
        kind: `PROCESS` or `NODE`.
        victim: The rank.
        at_seconds: Since the training began.
        reached: The last step that had ended.
        resumed: The step from which training went on.
        seconds: Name of a mark -> seconds since the kill, of the last rank to come there: ``ended``: all
            processes are gone; ``up``, ``joined``, ``made``, ``attached``; ``first_step``; ``new_step``: the
            first one that had not been made before. What another failure prevented is not in it.
        restart_seconds: Until training goes on, or until the next failure.
        open_seconds: What the step in flight had taken.
    """

    kind: int
    victim: int
    at_seconds: float
    reached: int
    resumed: int
    seconds: Mapping[str, float]
    restart_seconds: float
    open_seconds: float

    @property
    def starting_seconds(self) -> float:
        """Time that starting processes took, without what the arm did itself."""
        return self.seconds.get("made", self.seconds["ended"]) - self.seconds["ended"]


@dataclass(frozen=True, slots=True)
class Life:
    """Times and steps of one training.

    Attributes:
        wall_seconds: From the moment all ranks train to the end of the last step.
        steps: Distinct steps, all of which stand at the end.
        made_again: Steps that were made more than once, counted each further time.
        loop_seconds: Mean time of a step, saves included.
        step_seconds: Mean time of a step after which nothing is saved in whole.
        save_seconds: What a step with such a save takes more; 0 for arms of lowdiff.
        failures: In order.
    """

    wall_seconds: float
    steps: int
    made_again: int
    loop_seconds: float
    step_seconds: float
    save_seconds: float
    failures: tuple[Failure, ...]

    def as_row(self) -> dict[str, Any]:
        """For a line of JSON."""
        return asdict(self) | {
            "restart_seconds": sum(f.restart_seconds for f in self.failures),
            "starting_seconds": sum(f.starting_seconds for f in self.failures),
            "lost_seconds": self.made_again * self.loop_seconds
            + sum(f.open_seconds for f in self.failures),
        }


def life_of(began: float, struck: Sequence[Struck], lines: Sequence[Line]) -> Life:
    """Read a life from what was noted."""
    steps = [line for line in lines if line.what == "step"]
    saved = {(line.attempt, line.step) for line in lines if line.what == "saved"}
    own = [line for line in steps if line.rank == 0]
    plain: list[float] = []
    saving: list[float] = []
    for before, after in pairwise(own):
        if before.attempt == after.attempt:
            is_saving = (after.attempt, after.step) in saved
            (saving if is_saving else plain).append(after.when - before.when)
    made = max(
        len(of_rank) - len({line.step for line in of_rank})
        for of_rank in ([s for s in steps if s.rank == rank] for rank in range(WORLD_SIZE))
    )
    kills = [*(one.killed for one in struck), steps[-1].when]
    return Life(
        wall_seconds=max(line.when for line in steps) - began,
        steps=max(line.step for line in steps),
        made_again=made,
        loop_seconds=statistics.mean(plain + saving),
        step_seconds=statistics.mean(plain),
        save_seconds=statistics.mean(saving) - statistics.mean(plain) if saving else 0.0,
        failures=tuple(
            _failure(attempt, one, kills[attempt + 1], began, lines)
            for attempt, one in enumerate(struck)
        ),
    )


def _failure(
    attempt: int, struck: Struck, next_kill: float, began: float, lines: Sequence[Line]
) -> Failure:
    """The failure that ended an attempt."""
    killed = struck.killed
    after = [line for line in lines if line.attempt > attempt]
    resumed = min(
        (line for line in after if line.what == "attached"), key=lambda line: line.when
    ).step
    past = [line for line in lines if line.what == "step" and line.attempt <= attempt]
    ended = [line for line in past if line.attempt == attempt]
    reached = max((line.step for line in ended), default=resumed)
    newest = max(
        (line.step for line in past), default=resumed
    )  # it may strike before the first step

    def last(of: Sequence[Line]) -> float | None:
        """When the last rank got there."""
        first: dict[int, float] = {}
        for line in of:
            first.setdefault(line.rank, line.when)
        return max(first.values()) - killed if len(first) == WORLD_SIZE else None

    anew = [line for line in after if line.attempt == attempt + 1]
    steps = [line for line in after if line.what == "step"]
    times = {
        "ended": struck.ended - killed,
        **{mark: last([line for line in anew if line.what == mark]) for mark in MARKS},
        "first_step": last(steps),
        "new_step": last([line for line in steps if line.step > newest]),
    }
    seconds = {mark: value for mark, value in times.items() if value is not None}
    return Failure(
        kind=struck.strike.kind,
        victim=struck.strike.victim,
        at_seconds=killed - began,
        reached=reached,
        resumed=resumed,
        seconds=seconds,
        restart_seconds=min(seconds.get("attached", next_kill - killed), next_kill - killed),
        open_seconds=killed - max(line.when for line in ended) if ended else 0.0,
    )


def refuse_other_bits(arm: str, struck: Sequence[Struck], lines: Sequence[Line]) -> int:
    """See that a step that was made again has the loss that it had before; how many were.

    The log's arms lose error feedback with a node, so later steps may differ from those before.
    """
    kinds = [one.strike.kind for one in struck]
    known: dict[tuple[int, int, int], int] = {}
    again = 0
    for line in (line for line in lines if line.what == "step"):
        has_residual = "compressor" in LOWDIFF.get(arm, {})
        nodes_lost = kinds[: line.attempt].count(NODE) if has_residual else 0
        key = nodes_lost, line.rank, line.step
        again += key in known
        before = known.setdefault(key, line.checksum)
        assert before == line.checksum, f"{arm}: rank {line.rank} differs at step {line.step}"
    return again


def figures_of(row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Shares of one life's wall time, beside what the simulator says.

    Args:
        row: The life.
        rows: All lives of its arm, which give the simulator's costs.
    """
    one, wall = plain_seconds(row), row["wall_seconds"]
    useful = row["steps"] * one
    # A restart weighs as much as with steps of one second, but for what the arm itself does.
    scaled_wall = wall - row["starting_seconds"] * max(0.0, 1 - one)
    failures = row["failures"]
    found = {
        "effective_share": useful / wall,
        "effective_share_start_scaled": useful / scaled_wall,
        "restart_share": row["restart_seconds"] / wall,
        "lost_share": row["lost_seconds"] / wall,
        "slower_share": 1 - (useful + row["restart_seconds"] + row["lost_seconds"]) / wall,
        "steps_made_again": row["made_again"],
        "failures": len(failures),
        "new_step_seconds": statistics.mean(
            f["seconds"].get("new_step", f["restart_seconds"]) for f in failures
        ),
        **_simulated(row, rows),
    }
    turns = row["plain_seconds"]
    if len(turns) > 1:
        found["effective_error"] = (
            statistics.stdev(turns) / math.sqrt(len(turns)) * row["steps"] / wall
        )
    if "compressor" in LOWDIFF.get(row["arm"], {}):
        found["effective_share_of_compressed"] = row["compressed_over_plain"] * useful / wall
    return found


def plain_seconds(row: Mapping[str, Any]) -> float:
    """Time of a step without checkpoints in a life, from its turns.

    The harmonic mean: turns come at equal intervals, and in one of these as many steps are made as it allows.
    """
    return float(statistics.harmonic_mean(row["plain_seconds"]))


def _simulated(row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    one = plain_seconds(row)
    strategy = _strategy(row, rows)
    gaps = np.asarray(row["gaps_seconds"])
    # The training ends before the failure behind its last gap.
    lasting = np.append(gaps[:-1], 2 * gaps[-1])
    trace = Trace(lasting[None], np.asarray([*row["kinds"], PROCESS], dtype=np.int8)[None])
    same = simulate(
        strategy, trace, useful_step_seconds=one, horizon_seconds=float(gaps.sum())
    )  # fmt: skip
    model = FailureModel(float(gaps.sum()) / len(row["kinds"]), group_share=0.0)
    rng = np.random.default_rng(0)
    many = draw_trace(model, failures=_MANY, trials=_TRIALS, rng=rng)
    return {
        "simulated_share": same.effective_share,
        "simulated_steps_lost": same.lost_steps * same.failures,
        "simulated_share_of_many": simulate(
            strategy, many, useful_step_seconds=one
        ).effective_share,
    }


def _strategy(row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> Strategy:
    """The arm with its measured costs: per step from this life's speed, restarts from all lives."""
    one = plain_seconds(row)
    step = one * statistics.mean(own["step_seconds"] / plain_seconds(own) for own in rows)
    stall = one * statistics.mean(own["save_seconds"] / plain_seconds(own) for own in rows)

    def restart(kind: int) -> float:
        found = [(f["kind"], f["seconds"]["first_step"] - step)
                 for own in rows for f in own["failures"] if "first_step" in f["seconds"]]  # fmt: skip
        own_kind = [seconds for k, seconds in found if k == kind]
        return max(0.0, float(statistics.mean(own_kind or [s for _, s in found] or [0.0])))

    interval = row["interval"]
    process, node = (
        Recovery(grain_steps=interval or 1, lag_seconds=0.0, fixed_seconds=restart(kind))
        for kind in (PROCESS, NODE)
    )
    return Strategy(
        name=row["arm"], detail="", step_seconds=step, stall_seconds=max(0.0, stall),
        interval_steps=interval or float("inf"), process=process, node=node, group=node,
    )  # fmt: skip


def strikes_of(
    gaps_seconds: Sequence[float], kinds: Sequence[int], victims: Sequence[int]
) -> list[Strike]:
    """Failures at the ends of all gaps but the last."""
    times = np.cumsum(gaps_seconds)[:-1].tolist()
    return [Strike(*one) for one in zip(times, kinds, victims, strict=True)]
