"""A report as tables of text, which the terminal and HTML show alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from lowdiff.tuner.choice import Setting
from lowdiff.tuner.costs import Costs, lost_steps, recovery_seconds, store_lag_steps, store_share
from lowdiff.tuner.failures import Rate
from lowdiff.tuner.report import Report
from lowdiff.tuner.units import readable_bytes, readable_seconds


@dataclass(frozen=True, slots=True)
class Table:
    """One table.

    Attributes:
        title: Its heading.
        heads: Of the columns.
        rows: A text for each column.
    """

    title: str
    heads: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]


def tables(report: Report) -> list[Table]:
    """All tables of a report, the most wanted first; none without rows."""
    found = [
        Table("In figures", ("", ""), facts(report)),
        Table(
            "Wasted by cause, with the recommended setting",
            ("cause", "an hour of training"),
            [
                (cause.replace("_", " "), f"{3600 * share:.2f} s")
                for cause, share in asdict(report.choice.waste).items()
            ],
        ),
        Table(
            "Against what else there is, simulated under the same failures",
            ("strategy", "effective", "saving", "recovering", "done again", ""),
            [
                (
                    one.strategy.name,
                    *(
                        f"{share:.2%}"
                        for share in (one.effective_share, one.stalls, one.recovering, one.lost)
                    ),
                    one.strategy.note,
                )
                for one in report.simulated
            ],
        ),
        Table(
            "Based on, per rank",
            ("", "median", "middle 80 %", "source"),
            [
                (
                    name.replace("_", " "),
                    _cost(name, e.median),
                    f"{_cost(name, e.low)} to {_cost(name, e.high)}" if e.count > 1 else "",
                    f"measured {e.count} times" if e.count > 1 else e.source,
                )
                for name, e in report.question.estimates.items()
            ],
        ),
        Table(
            "What the run decided itself",
            ("step", "from then on", "because"),
            [
                (
                    str(decision.get("step", "")),
                    f"f = {decision.get('snapshot_every')}, b = {decision.get('batch_size')}",
                    "; ".join(map(str, decision.get("reasons", []))),
                )
                for decision in report.question.decisions
            ],
        ),
    ]
    return [table for table in found if table.rows]


def facts(report: Report) -> list[tuple[str, str]]:
    """The figures that a reader wants first."""
    question, setting = report.question, report.choice.setting
    costs, rates = question.costs, question.rates
    f, b = setting.snapshot_every, setting.batch_size
    process, node = lost_steps(costs, f, b)
    kept = question.limits.kept_snapshots
    newest = "the newest snapshot" if kept == 1 else f"the {kept} newest snapshots"
    published = report.published_waste.seconds_per_hour
    rows = [("recommended", _in_words(setting))]
    if question.current is not None and report.current_waste is not None:
        wasted = report.current_waste.seconds_per_hour
        rows.append(("current", f"{_in_words(question.current)}: {wasted:.1f} s wasted per hour"))
    return [
        *rows,
        ("wasted", f"{report.choice.waste.seconds_per_hour:.1f} s per hour of training"),
        ("effective training time", f"{report.effective:.2%}"),
        ("a failure every", _time_between(rates.total)),
        ("a failure takes", f"{readable_seconds(recovery_seconds(costs, f, b))} to recover from"),
        ("steps lost", f"process crash {process:.1f}, loss of a node {node:.1f}"),
        *_store_facts(costs, f, b),
        ("written", f"{readable_bytes(report.bytes_per_day)} a day, all ranks"),
        ("stored", f"up to {readable_bytes(report.stored_bytes)}, all ranks, with {newest} kept"),
        (
            "lowdiff with the published model's setting",
            f"{_in_words(report.published)}: {published:.1f} s wasted per hour",
        ),
    ]


def _in_words(setting: Setting) -> str:
    return f"snapshot_every = {setting.snapshot_every:,}, batch_size = {setting.batch_size}"


def _time_between(failures: Rate) -> str:
    mean, low, high = (
        readable_seconds(value)
        for value in (failures.mtbf_seconds, failures.low_seconds, failures.high_seconds)
    )
    if failures.low_seconds == failures.high_seconds:
        return f"{mean} (given)"
    return f"{mean} (90 %: {low} to {high}; {failures.failures} seen)"


def _store_facts(costs: Costs, f: float, b: float) -> list[tuple[str, str]]:
    if not costs.store_bytes_per_second:
        return []
    share = store_share(costs, f, b)
    if share >= 1:
        return [("in the store", "ever later: it takes less than the run writes")]
    lag = store_lag_steps(costs, f, b)
    return [("in the store", f"{lag:.1f} steps later; busy for {share:.0%} of the time")]


def _cost(name: str, value: float) -> str:
    # Its name carries the unit.
    if name.endswith("bytes_per_second"):
        return f"{readable_bytes(value)}/s"
    return readable_bytes(value) if name.endswith("bytes") else readable_seconds(value)
