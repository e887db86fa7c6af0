"""Figures of a report as text, for the terminal and for HTML."""

from __future__ import annotations

from lowdiff.tuner.costs import Costs, lost_steps, recovery_seconds, store_lag_steps, store_share
from lowdiff.tuner.failures import Rate
from lowdiff.tuner.report import Report
from lowdiff.tuner.side_by_side import Published, Row
from lowdiff.tuner.units import readable_bytes, readable_seconds


def facts(report: Report) -> list[tuple[str, str]]:
    """Return the figures that a reader wants first, as text."""
    question, setting = report.question, report.choice.setting
    costs, rates = question.costs, question.rates
    f, b = setting.snapshot_every, setting.batch_size
    process, node = lost_steps(costs, f, b)
    rows = [
        ("recommended", f"snapshot_every = {f:,}, batch_size = {b}"),
    ]
    if question.current is not None and report.current_waste is not None:
        now = question.current
        rows.append(
            (
                "current",
                (
                    f"snapshot_every = {now.snapshot_every:,}, batch_size = {now.batch_size}: "
                    f"{report.current_waste.seconds_per_hour:.1f} s wasted per hour"
                ),
            )
        )
    rows += [
        ("wasted", f"{report.choice.waste.seconds_per_hour:.1f} s per hour of training"),
        ("effective training time", f"{report.effective:.2%}"),
        ("a failure every", _time_between(rates.total)),
        ("a failure takes", f"{readable_seconds(recovery_seconds(costs, f, b))} to recover from"),
        ("steps lost", f"process crash {process:.1f}, loss of a node {node:.1f}"),
        *_store_facts(costs, f, b),
        ("written", f"{readable_bytes(report.bytes_per_day)} a day, all ranks"),
        (
            "stored",
            (
                f"up to {readable_bytes(report.stored_bytes)}, all ranks, "
                f"{_kept(question.limits.kept_snapshots)}"
            ),
        ),
        (
            "lowdiff with the published model's setting",
            (
                f"snapshot_every = {report.published.snapshot_every:,}, batch_size = "
                f"{report.published.batch_size}: {report.published_waste.seconds_per_hour:.1f} s wasted "
                "per hour"
            ),
        ),
    ]
    return rows


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
