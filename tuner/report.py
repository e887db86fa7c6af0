"""Make one report for a run or a plan: a plain value, which terminal, JSON and HTML show alike.

`facts` and `basis` are its figures as text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from lowdiff.errors import ConfigError
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
from lowdiff.tuner.copies import PlannedCopies
from lowdiff.tuner.costs import (
    Costs,
    Estimate,
    Waste,
    effective_share,
    lost_steps,
    recovery_seconds,
    store_lag_steps,
    store_share,
    waste,
    writer_share,
)
from lowdiff.tuner.failures import FailureRates, Rate
from lowdiff.tuner.logged import logged_cells, logged_per_day
from lowdiff.tuner.lost_tail import Curves, Interval
from lowdiff.tuner.side_by_side import Assumptions, Published, Row, SideBySide, side_by_side
from lowdiff.tuner.simulate import FailureModel, Simulated, simulate, trace_for
from lowdiff.tuner.strategies import alternatives, lowdiff, published_choice
from lowdiff.tuner.units import readable_bytes, readable_seconds

#: Batch sizes of the heat map: powers of 2 up to the largest that is ever chosen.
_BATCHES = tuple(1 << level for level in range(MAX_BATCH.bit_length()))
_INTERVAL_CELLS = 25
#: Number of failures in the simulated time: enough for three digits in a fraction of a second.
_FAILURES, _TRIALS = 400, 64
#: Mean time between failures beyond which a job counts as one that never fails.
_NEVER_SECONDS = 1e12
_FACTORS = (0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0)


@dataclass(frozen=True, slots=True)
class Question:
    """Input of a report.

    Attributes:
        title: The run, or the planned job.
        costs: Costs, measured or planned.
        estimates: Cost -> spread and source.
        rates: Failure rates.
        limits: Limits to be kept.
        num_nodes: Machines of the ranks.
        network_bytes_per_second: One rank's share of its node's bandwidth, for Gemini's copies.
        current: Current setting of the run; None for a plan.
        failure_shape: Weibull shape of the simulated failures.
        assumptions: What the table of strategies assumes.
        copies: Copies in other nodes' memory; None where there are none, and for a run.
        known_warnings: Warnings that are known before anything is computed.
        assumed_because: Reason why costs are assumed, if any are.
        decisions: Decisions of the online policy, oldest first.
        elements: Parameters of the model; 0 if unknown.
        curves: What is known about predicting lost steps; None if nothing was asked about that.
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
    assumptions: Assumptions = field(default_factory=Assumptions)
    copies: PlannedCopies | None = None
    known_warnings: tuple[str, ...] = ()
    assumed_because: str = "never measured"
    decisions: Sequence[Mapping[str, Any]] = ()
    elements: float = 0.0
    curves: Curves | None = None


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
    """Effect of one wrong assumption.

    Attributes:
        what: The assumption.
        factors: Factors that the assumption is multiplied by.
        kept: Wasted seconds per hour with the setting recommended now.
        retuned: Wasted seconds per hour with the setting recommended then. The difference is the
            gain of tuning.
    """

    what: str
    factors: tuple[float, ...]
    kept: tuple[float, ...]
    retuned: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Report:
    """Answer to a question.

    Attributes:
        effective: Effective training time ratio of the recommended setting, in closed form.
        current_waste: Waste of the current setting; None without a current setting.
        published: The published model's choice in this framework's units.
        published_waste: Waste of lowdiff with that setting; LowDiff as published is in `simulated`.
        simulated: The recommended setting first, then the alternatives, best first.
        side_by_side: ``torch.save`` and lowdiff's strategies; None for a job that never fails.
        bytes_per_day: Bytes that all ranks write in a day.
        stored_bytes: Most bytes that the run folder holds.
        predicting: How often to save if lost steps were predicted; None if nothing was asked about that.
        warnings: Warnings in plain words.
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
    side_by_side: SideBySide | None
    bytes_per_day: float
    stored_bytes: float
    predicting: Interval | None
    warnings: tuple[str, ...]

    def document(self) -> dict[str, Any]:
        """Return JSON content; durations in seconds, sizes in bytes, shares from 0 to 1."""
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
                    "note": found.strategy.detail,
                    "effective_share": found.effective_share,
                    "standard_error": found.standard_error,
                    "lost_steps": found.lost_steps,
                }
                for found in self.simulated
            ],
            "side_by_side": self.side_by_side
            and {
                "assumptions": asdict(question.assumptions),
                **asdict(self.side_by_side),
            },
            "copies": question.copies and question.copies.document(),
            "log_bytes_per_day": logged_per_day(question.elements, *_pace(question.costs)),
            "predicting": self.predicting and asdict(self.predicting),
            "heat_map": asdict(self.heat_map),
            "sensitivities": [asdict(found) for found in self.sensitivities],
            "limits_broken": list(self.choice.broken),
            "warnings": list(self.warnings),
            "decisions": [dict(decision) for decision in question.decisions],
        }


def _rate(rate: Rate) -> dict[str, float | None]:
    """Return a rate as JSON; a kind that never happens has no mean, as JSON has no infinity."""
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
        side_by_side=_side_by_side(question, choice.setting),
        bytes_per_day=24 * written_bytes_per_hour(costs, f, b),
        stored_bytes=stored_bytes(costs, limits, f),
        predicting=None if question.curves is None else _predicting(question, question.curves),
        warnings=(*_warnings(question, choice), *_better(simulated)),
    )


def _predicting(question: Question, curves: Curves) -> Interval:
    """Choose how often to save if steps that a lost node takes along were predicted; a crash loses none.

    Raises:
        ConfigError: If the model's size is unknown, or no failure loses a node.
    """
    costs, node = question.costs, question.rates.node.mtbf_seconds
    if not question.elements or node > _NEVER_SECONDS:
        why = "it never loses a node" if question.elements else "its parameters are sharded"
        raise ConfigError(f"{question.title}: {why}, so there are no lost steps to predict")
    return curves.planned(
        num_parameters=question.elements,
        step_seconds=_pace(costs)[1],
        failures_per_second=1 / node,
        save_seconds=costs.snapshot_seconds,
    )


def _numbers(setting: Setting) -> tuple[int, int]:
    """Return ``f`` and ``b``."""
    return setting.snapshot_every, setting.batch_size


def _heat_map(question: Question, shown: Sequence[Setting]) -> HeatMap:
    """Compute a heat map that is wide enough for every marked setting.

    The published model or a user may choose a batch beyond ``MAX_BATCH``; the last row marks it.
    """
    points = [setting.snapshot_every for setting in shown]
    low, high = max(1, min(points) // 6), max(points) * 6
    intervals = np.unique(np.rint(np.geomspace(low, high, _INTERVAL_CELLS)).astype(int)).tolist()
    most = 4 * max(setting.batch_size for setting in shown)
    rows = next((row for row, b in enumerate(_BATCHES, 1) if b >= most), len(_BATCHES))
    batches = _BATCHES[: max(rows, 5)]
    costs, rates, limits = question.costs, question.rates, question.limits
    wasted = [[waste(costs, rates, f, b).seconds_per_hour for f in intervals] for b in batches]
    allowed = [[is_allowed(costs, limits, Setting(f, b)) for f in intervals] for b in batches]
    return HeatMap(tuple(intervals), batches, tuple(map(tuple, wasted)), tuple(map(tuple, allowed)))


def _sensitivities(question: Question, setting: Setting) -> tuple[Sensitivity, ...]:
    costs, rates = question.costs, question.rates
    load = question.estimates.get("load_seconds")
    # A load time that was not measured is derived from the write bandwidth and changes with it. A
    # measured load time is that of reading, which need not become faster by the same factor.
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
    """Simulate all strategies under one trace of failures."""
    costs, rates = question.costs, question.rates
    if rates.total.mtbf_seconds > _NEVER_SECONDS:
        return ()
    model = replace(FailureModel.of(rates), shape=question.failure_shape)
    horizon = _FAILURES * rates.total.mtbf_seconds
    rng = np.random.default_rng(seed)
    trace = trace_for(model, horizon_seconds=horizon, trials=_TRIALS, rng=rng)
    network = question.network_bytes_per_second
    others = alternatives(
        costs, rates, num_nodes=question.num_nodes, network_bytes_per_second=network
    )
    own, *found = (
        simulate(strategy, trace, useful_step_seconds=costs.step_seconds, horizon_seconds=horizon)
        for strategy in (lowdiff(costs, setting), *others)
    )
    return own, *sorted(found, key=lambda one: -one.effective_share)


def _side_by_side(question: Question, setting: Setting) -> SideBySide | None:
    if question.rates.total.mtbf_seconds > _NEVER_SECONDS:
        return None
    return side_by_side(
        question.costs,
        question.rates,
        setting,
        question.assumptions,
        num_nodes=question.num_nodes,
    )


def _better(simulated: Sequence[Simulated]) -> list[str]:
    """Name the best alternative, if it wastes less by more than the simulation's error."""
    if not simulated:
        return []
    own, best = simulated[:2]  # alternatives follow, best first
    gain = best.effective_share - own.effective_share
    if gain <= 2 * (own.standard_error + best.standard_error):
        return []
    detail = f" ({best.strategy.detail})" if best.strategy.detail else ""
    name = f"{best.strategy.name}{detail}"
    shares = f"{best.effective_share:.2%} of the time would be training, {own.effective_share:.2%}"
    return [f"{name} would waste less here: {shares} with lowdiff at its best setting"]


def _warnings(question: Question, choice: Choice) -> list[str]:
    costs, rates = question.costs, question.rates
    f, b = choice.setting.snapshot_every, choice.setting.batch_size
    found = [*question.known_warnings, *choice.broken]
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
            "failures is stated or assumed"
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


def facts(report: Report) -> list[tuple[str, str]]:
    """Return the figures that a reader wants first, as text."""
    question, setting = report.question, report.choice.setting
    costs, rates = question.costs, question.rates
    f, b = setting.snapshot_every, setting.batch_size
    process, node = lost_steps(costs, f, b)
    now = []
    if question.current is not None and report.current_waste is not None:
        now = [("current", _wasting(question.current, report.current_waste))]
    stored = f"up to {readable_bytes(report.stored_bytes)}, all ranks"
    published = _wasting(report.published, report.published_waste)
    return [
        ("recommended", _named(setting)),
        *now,
        ("wasted", f"{report.choice.waste.seconds_per_hour:.1f} s per hour of training"),
        ("effective training time", f"{report.effective:.2%}"),
        ("a failure every", _time_between(rates.total)),
        ("a failure takes", f"{readable_seconds(recovery_seconds(costs, f, b))} to recover from"),
        ("steps lost", f"process crash {process:.1f}, loss of a node {node:.1f}"),
        *_store_facts(costs, f, b),
        ("written", f"{readable_bytes(report.bytes_per_day)} a day, all ranks"),
        ("stored", f"{stored}, {_kept(question.limits.kept_snapshots)}"),
        ("lowdiff with the published model's setting", published),
        *_predicting_facts(report.predicting),
    ]


def _predicting_facts(found: Interval | None) -> list[tuple[str, str]]:
    if found is None:
        return []
    told = f"a snapshot every {readable_seconds(found.seconds)} ({found.by}): {found.reason}"
    return [("if lost steps were predicted", told)]


def _named(setting: Setting) -> str:
    return f"snapshot_every = {setting.snapshot_every:,}, batch_size = {setting.batch_size}"


def _wasting(setting: Setting, waste: Waste) -> str:
    return f"{_named(setting)}: {waste.seconds_per_hour:.1f} s wasted per hour"


def _time_between(failures: Rate) -> str:
    mean, low, high = (
        readable_seconds(value)
        for value in (failures.mtbf_seconds, failures.low_seconds, failures.high_seconds)
    )
    if failures.low_seconds == failures.high_seconds:
        return f"{mean} (given)"
    return f"{mean} (90 %: {low} to {high}; {failures.failures} seen)"


def _kept(snapshots: int) -> str:
    if snapshots == 1:
        return "with the newest snapshot kept"
    return f"with the {snapshots} newest snapshots kept"


def _store_facts(costs: Costs, f: float, b: float) -> list[tuple[str, str]]:
    if not costs.store_bytes_per_second:
        return []
    share = store_share(costs, f, b)
    if share >= 1:
        return [("in the store", "ever later: it takes less than the run writes")]
    lag = store_lag_steps(costs, f, b)
    return [("in the store", f"{lag:.1f} steps later; busy for {share:.0%} of the time")]


#: Heads of the table of strategies.
STRATEGY_HEADS = (
    "strategy",
    "overhead",
    "lost per failure",
    "restart",
    "written a day",
    "wasted",
    "",
)


def strategy_cells(row: Row) -> tuple[str, ...]:
    """Return one strategy's figures as text, in the order of `STRATEGY_HEADS`."""
    return (
        row.name,
        f"{row.overhead_share:.2%}",
        readable_seconds(row.lost_seconds),
        readable_seconds(row.restart_seconds),
        readable_bytes(row.bytes_per_day),
        f"{row.wasted_share:.3%}",
        row.detail,
    )


def published_text(found: Published) -> str:
    """Return what the model of Gupta et al. says, as a sentence."""
    return (
        f"By the model of Gupta et al. (EuroSys 2024) this job would waste {found.periodic:.3%} with "
        f"periodic checkpoints, {found.user_level:.3%} with just-in-time ones at user level, and "
        f"{found.transparent:.3%} with transparent ones."
    )


def logged(report: Report) -> list[tuple[str, str]]:
    """Return what the log of each compressor takes, in the order of `LOGGED_HEADS`."""
    return logged_cells(report.question.elements, *_pace(report.question.costs))


def _pace(costs: Costs) -> tuple[int, float]:
    """Return the number of ranks, and the time from one step to the next."""
    return costs.world_size, costs.step_seconds + costs.differential_seconds


def basis(report: Report) -> list[tuple[str, str, str, str]]:
    """Return the basis of the answer as text: cost, median, middle 80 % if known, and source."""
    return [
        (
            name.replace("_", " "),
            _cost(name, found.median),
            f"{_cost(name, found.low)} to {_cost(name, found.high)}" if found.count > 1 else "",
            f"measured {found.count} times" if found.count > 1 else found.source,
        )
        for name, found in report.question.estimates.items()
    ]


def _cost(name: str, value: float) -> str:
    # The cost's name ends with its unit.
    if name.endswith("bytes_per_second"):
        return f"{readable_bytes(value)}/s"
    return readable_bytes(value) if name.endswith("bytes") else readable_seconds(value)
