"""One report for a run and for a plan: a plain value, which terminal, JSON and HTML show alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from lowdiff.tuner.choice import (
    MAX_BATCH,
    Choice,
    Limits,
    Setting,
    is_allowed,
    recommend,
    stored_bytes,
    written_bytes_per_hour,
)
from lowdiff.tuner.costs import (
    Costs,
    Waste,
    effective_share,
    recovery_seconds,
    store_share,
    waste,
    writer_share,
)
from lowdiff.tuner.estimates import Estimate
from lowdiff.tuner.failures import FailureRates, Rate
from lowdiff.tuner.paper import published_choice
from lowdiff.tuner.simulate import FailureModel, Simulated, simulate, trace_for
from lowdiff.tuner.strategies import alternatives, lowdiff
from lowdiff.tuner.units import readable_bytes, readable_seconds

#: Of the heat map; a power of 2 apart, up to the largest that is ever chosen.
_BATCHES = tuple(1 << level for level in range(MAX_BATCH.bit_length()))
_INTERVAL_CELLS = 25
#: Failures in the simulated time: enough for three digits in a fraction of a second.
_FAILURES, _REPLICAS = 400, 64
_FACTORS = (0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0)


@dataclass(frozen=True, slots=True)
class Question:
    """What is reported on.

    Attributes:
        title: The run, or what is planned.
        costs: As measured or planned.
        estimates: By cost: spread and source.
        rates: Of failures.
        limits: To be kept.
        num_nodes: Machines that the ranks are on.
        network_bytes_per_second: One rank's share of its node's, for Gemini's copies.
        current: What the run uses; None for a plan.
        failure_shape: Weibull shape of the simulated failures.
        notes: Warnings that are known before anything is computed.
        assumed_because: Why costs are assumed, where they are.
        decisions: Of the online policy, oldest first.
    """

    title: str
    costs: Costs
    estimates: Mapping[str, Estimate]
    rates: FailureRates
    limits: Limits
    num_nodes: int
    network_bytes_per_second: float
    current: Setting | None = None
    failure_shape: float = 1.0
    notes: tuple[str, ...] = ()
    assumed_because: str = "never measured"
    decisions: Sequence[Mapping[str, Any]] = ()


@dataclass(frozen=True, slots=True)
class HeatMap:
    """Wasted seconds per hour over settings.

    Attributes:
        intervals: Columns, ascending.
        batches: Rows, ascending.
        seconds_per_hour: [rows][columns].
        allowed: [rows][columns], whether all limits are kept.
    """

    intervals: tuple[int, ...]
    batches: tuple[int, ...]
    seconds_per_hour: tuple[tuple[float, ...], ...]
    allowed: tuple[tuple[bool, ...], ...]


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """What happens if one assumption is off.

    Attributes:
        what: The assumption.
        factors: By which it is multiplied.
        kept: Wasted seconds per hour with the setting recommended now.
        retuned: With the one that would be recommended then; the difference is what tuning is worth.
    """

    what: str
    factors: tuple[float, ...]
    kept: tuple[float, ...]
    retuned: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Report:
    """The answer.

    Attributes:
        effective: Effective training time ratio of the recommended setting, in closed form.
        current_waste: Of the current setting; None without one.
        published: The published model's choice in this framework's units.
        published_waste: Of lowdiff with that setting; LowDiff as published is among `simulated`.
        simulated: The recommended setting first, then what else users know, best first.
        bytes_per_day: Written by all ranks.
        stored_bytes: Most that the run holds.
        warnings: In plain words.
    """

    question: Question
    choice: Choice
    effective: float
    current_waste: Waste | None
    published: Setting
    published_waste: Waste
    heat_map: HeatMap
    sensitivities: tuple[Sensitivity, ...]
    simulated: tuple[Simulated, ...]
    bytes_per_day: float
    stored_bytes: float
    warnings: tuple[str, ...]

    def document(self) -> dict[str, Any]:
        """As JSON content; durations in seconds, sizes in bytes, shares from 0 to 1."""
        question, setting = self.question, self.choice.setting
        return {
            "title": question.title,
            "recommended": {**asdict(setting), "reasons": list(self.choice.reasons)},
            "current": None if question.current is None else asdict(question.current),
            "published": asdict(self.published),
            "waste_seconds_per_hour": {
                "recommended": self.choice.waste.seconds_per_hour,
                "current": self.current_waste and self.current_waste.seconds_per_hour,
                "published": self.published_waste.seconds_per_hour,
            },
            "waste_terms": asdict(self.choice.waste),
            "effective_share": self.effective,
            "bytes_per_day": self.bytes_per_day,
            "stored_bytes": self.stored_bytes,
            "estimates": {name: asdict(e) for name, e in question.estimates.items()},
            "mtbf": {
                kind: _rate(getattr(question.rates, kind)) for kind in ("process", "node", "total")
            },
            "strategies": [
                {
                    "name": found.strategy.name,
                    "note": found.strategy.note,
                    "effective_share": found.effective_share,
                    "standard_error": found.standard_error,
                    "lost_steps": found.lost_steps,
                }
                for found in self.simulated
            ],
            "heat_map": asdict(self.heat_map),
            "sensitivities": [asdict(found) for found in self.sensitivities],
            "limits_broken": list(self.choice.broken),
            "warnings": list(self.warnings),
            "decisions": [dict(decision) for decision in question.decisions],
        }


def _rate(rate: Rate) -> dict[str, float | None]:
    """JSON has no infinity: a kind that never happens has no mean."""
    return {name: value if value < 1e300 else None for name, value in asdict(rate).items()}


def make_report(question: Question, *, seed: int = 0) -> Report:
    """Recommend, compare and warn.

    Raises:
        ConfigError: If the job cannot progress.
    """
    costs, rates, limits = question.costs, question.rates, question.limits
    choice = recommend(costs, rates, limits)
    f, b = choice.setting.snapshot_every, choice.setting.batch_size
    published = Setting(*published_choice(costs, rates))
    now = question.current
    simulated = _compare(question, choice.setting, seed)
    return Report(
        question=question,
        choice=choice,
        effective=effective_share(costs, rates, f, b),
        current_waste=None if now is None else waste(costs, rates, *_numbers(now)),
        published=published,
        published_waste=waste(costs, rates, *_numbers(published)),
        heat_map=_heat_map(question, [choice.setting, published, *([now] if now else [])]),
        sensitivities=_sensitivities(question, choice.setting),
        simulated=simulated,
        bytes_per_day=24 * written_bytes_per_hour(costs, f, b),
        stored_bytes=stored_bytes(costs, limits, f),
        warnings=(*_warnings(question, choice), *_better(simulated)),
    )


def _numbers(setting: Setting) -> tuple[int, int]:
    """``f`` and ``b``."""
    return setting.snapshot_every, setting.batch_size


def _heat_map(question: Question, shown: Sequence[Setting]) -> HeatMap:
    """Wide enough for every setting that is marked.

    A batch beyond ``MAX_BATCH``, which the published model or a user may choose, is marked in the
    last row.
    """
    points = [setting.snapshot_every for setting in shown]
    low, high = max(1, min(points) // 6), max(points) * 6
    intervals = np.unique(np.rint(np.geomspace(low, high, _INTERVAL_CELLS)).astype(int)).tolist()
    rows = 1 + next(
        (
            row
            for row, b in enumerate(_BATCHES)
            if b >= 4 * max(setting.batch_size for setting in shown)
        ),
        len(_BATCHES) - 1,
    )
    batches = _BATCHES[: max(rows, 5)]
    costs, rates = question.costs, question.rates
    return HeatMap(
        tuple(intervals),
        batches,
        tuple(
            tuple(waste(costs, rates, f, b).seconds_per_hour for f in intervals) for b in batches
        ),
        tuple(
            tuple(is_allowed(costs, question.limits, Setting(f, b)) for f in intervals)
            for b in batches
        ),
    )


def _sensitivities(question: Question, setting: Setting) -> tuple[Sensitivity, ...]:
    costs, rates = question.costs, question.rates
    load = question.estimates.get("load_seconds")
    # A load time that nobody measured was derived from the write bandwidth, so it changes with it.
    # One that was measured is of reading, which need not be as much faster.
    load_is_derived = load is not None and load.source != "measured"

    def scaled(rate: Rate, x: float) -> Rate:
        return Rate(rate.mtbf_seconds * x, rate.low_seconds, rate.high_seconds, rate.failures)

    def failing(x: float) -> tuple[Costs, FailureRates]:
        kinds = (scaled(rate, x) for rate in (rates.process, rates.node, rates.total))
        return costs, FailureRates(*kinds)

    def writing(x: float) -> tuple[Costs, FailureRates]:
        faster = replace(costs, write_bytes_per_second=costs.write_bytes_per_second * x)
        if load_is_derived:
            faster = replace(faster, load_seconds=costs.load_seconds / x)
        return faster, rates

    def growing(x: float) -> tuple[Costs, FailureRates]:
        grown = (
            "differential_seconds", "snapshot_seconds", "staged_bytes", "differential_bytes",
            "snapshot_bytes", "encode_seconds", "load_seconds", "replay_seconds", "step_seconds",
            "residual_bytes",
        )  # fmt: skip
        return replace(costs, **{name: getattr(costs, name) * x for name in grown}), rates

    return tuple(
        _sensitivity(what, question.limits, setting, [change(x) for x in _FACTORS])
        for what, change in (
            ("time between failures", failing),
            ("write bandwidth", writing),
            ("model size", growing),
        )
    )


def _sensitivity(
    what: str, limits: Limits, setting: Setting, cases: Sequence[tuple[Costs, FailureRates]]
) -> Sensitivity:
    f, b = setting.snapshot_every, setting.batch_size
    kept, retuned = [], []
    for costs, rates in cases:
        kept.append(waste(costs, rates, f, b).seconds_per_hour)
        possible = rates.total.mtbf_seconds > recovery_seconds(costs, 1, 1)
        best = recommend(costs, rates, limits).waste.seconds_per_hour if possible else kept[-1]
        retuned.append(best)
    return Sensitivity(what, _FACTORS, tuple(kept), tuple(retuned))


def _compare(question: Question, setting: Setting, seed: int) -> tuple[Simulated, ...]:
    """All strategies under one trace of failures."""
    costs, rates = question.costs, question.rates
    if rates.total.mtbf_seconds > 1e12:
        return ()
    model = replace(FailureModel.of(rates), shape=question.failure_shape)
    horizon = _FAILURES * rates.total.mtbf_seconds
    rng = np.random.default_rng(seed)
    trace = trace_for(model, horizon_seconds=horizon, replicas=_REPLICAS, rng=rng)
    found = [
        simulate(strategy, trace, useful_step_seconds=costs.step_seconds, horizon_seconds=horizon)
        for strategy in (
            lowdiff(costs, setting),
            *alternatives(
                costs,
                rates,
                num_nodes=question.num_nodes,
                network_bytes_per_second=question.network_bytes_per_second,
            ),
        )
    ]
    others = sorted(found[1:], key=lambda one: -one.effective_share)
    return found[0], *others


def _better(simulated: Sequence[Simulated]) -> list[str]:
    """Name the best other strategy, if it wastes less by more than the simulation's error."""
    if not simulated:
        return []
    own, best = simulated[:2]  # the others are in order
    gain = best.effective_share - own.effective_share
    if gain <= 2 * (own.standard_error + best.standard_error):
        return []
    note = f" ({best.strategy.note})" if best.strategy.note else ""
    name = f"{best.strategy.name}{note}"
    shares = f"{best.effective_share:.2%} of the time would be training, {own.effective_share:.2%}"
    return [f"{name} would waste less here: {shares} with lowdiff at its best setting"]


def _warnings(question: Question, choice: Choice) -> list[str]:
    costs, rates = question.costs, question.rates
    f, b = choice.setting.snapshot_every, choice.setting.batch_size
    found = [*question.notes, *choice.broken]
    loop = costs.step_seconds + costs.differential_seconds
    if costs.encode_seconds > 0.7 * loop:
        found.append(
            f"your writer is at {costs.encode_seconds / loop:.0%} of one core: it compresses for "
            f"{readable_seconds(costs.encode_seconds)} of every step; at 100 % training waits"
        )
    busy = writer_share(costs, f, b)
    if busy > 0.7 and costs.encode_seconds <= 0.7 * loop:
        found.append(f"your disk is busy for {busy:.0%} of the time with checkpoints")
    sent = store_share(costs, f, b)
    if sent > 0.7:
        found.append(
            f"the store takes {readable_bytes(costs.store_bytes_per_second)}/s of each rank, and "
            f"checkpoints fill {sent:.0%} of that; above 100 % it falls ever further behind, and "
            "what it lacks is lost with the run folder: a lower density or more bandwidth helps"
        )
    now = question.current
    if now is not None:
        share = writer_share(costs, now.snapshot_every, now.batch_size)
        if share > 1:
            found.append(
                f"with the current setting training waits for the disk: it needs {share:.1f} times "
                "as long as training takes"
            )
    if rates.total.failures == 0 and now is not None:
        found.append(
            f"no failure was seen yet: {readable_seconds(rates.total.mtbf_seconds)} between "
            "failures is what was given or assumed"
        )
    elif rates.total.high_seconds > 4 * rates.total.low_seconds:
        found.append(
            "the time between failures is known badly: between "
            f"{readable_seconds(rates.total.low_seconds)} and "
            f"{readable_seconds(rates.total.high_seconds)} with 90 % probability"
        )
    guessed = [name for name, e in question.estimates.items() if e.source == "assumed"]
    if guessed:
        found.append(
            f"assumed, because {question.assumed_because}: "
            f"{', '.join(sorted(guessed)).replace('_', ' ')}"
        )
    if costs.replay_seconds > costs.step_seconds:
        found.append(
            f"replaying a step ({readable_seconds(costs.replay_seconds)}) takes longer than "
            f"training it ({readable_seconds(costs.step_seconds)})"
        )
    return found
