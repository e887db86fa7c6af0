from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import partial
from html.parser import HTMLParser
from typing import Any

import pytest

from lowdiff.errors import ConfigError
from lowdiff.tuner import charts
from lowdiff.tuner.choice import Limits, Setting, recommend
from lowdiff.tuner.costs import Estimate, recovery_seconds, waste, without_residual
from lowdiff.tuner.failures import FailureHistory, FailureRates, estimate_rates
from lowdiff.tuner.html import html_page
from lowdiff.tuner.plan import Job, planned
from lowdiff.tuner.report import Question, facts, make_report
from lowdiff.tuner.strategies import alternatives, published_choice
from lowdiff.tuner.units import readable_bytes
from tests.unit.tuner.jobs import JOBS, LAPTOP


def question(job: str = "laptop") -> Question:
    costs, rates = JOBS[job]
    return Question(
        title="runs/<gpt> & co",
        costs=costs,
        estimates={"step_seconds": Estimate(0.3, 0.29, 0.35, 48)},
        rates=rates,
        limits=Limits(),
        num_nodes=costs.world_size,
        network_bytes_per_second=10e9,
        current=Setting(100, 16),
    )


class Page(HTMLParser):
    """What a browser would fetch, and whether tags are closed in order."""

    VOID = ("meta", "link")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.references: list[str] = []
        self.texts: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.references += [v or "" for k, v in attrs if k in ("src", "href", "srcset")]
        assert tag != "script"
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in ("rect", "circle", "line", "polygon", "polyline")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


@pytest.mark.cases(1)
@pytest.mark.parametrize("job", JOBS)
def test_the_page_is_whole_and_asks_for_nothing(job: str) -> None:
    text = html_page(make_report(question(job)))
    page = Page()
    page.feed(text)
    assert page.open == []
    assert set(page.references) == {"data:,"}
    assert not re.search(r"https?://|@import|url\(", text)
    assert "runs/<gpt> & co" in "".join(page.texts)
    assert text.count("<svg") >= 6
    assert "NaN" not in text
    assert "nan" not in re.findall(r'"([^"]*)"', text)


def test_memory_that_is_too_little_is_said_and_crossed_out_everywhere() -> None:
    asked = replace(question(), limits=Limits(staging_bytes=LAPTOP.snapshot_bytes))
    report = make_report(asked)
    assert not any(cell for row in report.heat_map.allowed for cell in row)
    assert len(report.document()["limits_broken"]) == 1
    assert any("staging memory of 240 MB is too little" in text for text in report.warnings)


@pytest.mark.slow
def test_the_document_is_json_for_every_job() -> None:
    for job in JOBS:
        document = make_report(question(job)).document()
        assert json.loads(json.dumps(document, allow_nan=False)) == json.loads(json.dumps(document))
        assert document["recommended"]["snapshot_every"] >= 1
        assert document["strategies"][0]["name"] == "lowdiff"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rate", "fact", "warning"),
    [(1e12, "busy for 0%", ""), (3.0, "later; busy for", "fill"), (0.5, "ever later", "falls")],
)
def test_a_store_is_reported_on(rate: float, fact: str, warning: str) -> None:
    needed = LAPTOP.differential_bytes / LAPTOP.step_seconds
    store = replace(LAPTOP, store_bytes_per_second=rate * needed, store_latency_seconds=0.1)
    report = make_report(replace(question(), costs=store, rates=FailureRates.known(600.0)))
    assert fact in dict(facts(report))["in the store"]
    about = [text for text in report.warnings if "the store takes" in text]
    assert bool(about) == bool(warning)
    assert all(warning in text for text in about)
    assert "in the store" not in dict(facts(make_report(question())))


def test_a_kind_of_failure_that_never_happens_has_no_mean() -> None:
    asked = replace(question(), rates=FailureRates.known(3600.0, node_share=0.0))
    document = make_report(asked).document()
    assert document["mtbf"]["node"]["mtbf_seconds"] is None
    json.dumps(document, allow_nan=False)


def test_every_setting_that_is_marked_lies_on_the_map() -> None:
    report = make_report(question("cluster"))
    for setting in (report.choice.setting, report.published, Setting(100, 16)):
        found = report.heat_map
        assert found.intervals[0] <= setting.snapshot_every <= found.intervals[-1]
        assert found.batches[0] <= setting.batch_size <= found.batches[-1]


@pytest.mark.parametrize("batch", [1024, 4096])
def test_the_map_reaches_the_largest_batch_that_is_ever_chosen(batch: int) -> None:
    report = make_report(replace(question(), current=Setting(100, batch)))
    assert report.heat_map.batches[-1] == 4096
    charts.heat_map(report)


def test_the_recommendation_is_the_best_of_its_own_map() -> None:
    report = make_report(question("slow disk"))
    found = report.heat_map
    allowed = [
        waste
        for row, marks in zip(found.seconds_per_hour, found.allowed, strict=True)
        for waste, is_allowed in zip(row, marks, strict=True)
        if is_allowed
    ]
    assert report.choice.waste.seconds_per_hour <= min(allowed)


@pytest.mark.slow
def test_tuning_again_is_never_worse() -> None:
    for job in JOBS:
        for found in make_report(question(job)).sensitivities:
            pairs = zip(found.kept, found.retuned, found.factors, strict=True)
            for kept, retuned, factor in pairs:
                # What the kept setting saves by breaking a limit is not the tuner's to take.
                assert retuned <= kept * 1.25 + 1.0, (job, found.what, factor)


def test_a_busy_writer_is_named_in_plain_words() -> None:
    asked = replace(question(), costs=replace(LAPTOP, encode_seconds=0.28))
    warnings = make_report(asked).warnings
    assert any(
        "your writer is at 92 % of one core" in text.replace("92%", "92 %") for text in warnings
    )


def test_a_current_setting_that_makes_training_wait_is_named() -> None:
    asked = replace(question("slow disk"), current=Setting(10, 1))
    assert any("training waits for the disk" in text for text in make_report(asked).warnings)


def test_assumed_costs_are_named() -> None:
    asked = replace(question(), estimates={"replay_seconds": Estimate.assumed(0.1)})
    assert "assumed, because never measured: replay seconds" in make_report(asked).warnings
    planned = replace(asked, assumed_because="not given")
    assert "assumed, because not given: replay seconds" in make_report(planned).warnings


def test_the_first_figures_are_the_setting_and_what_it_wastes() -> None:
    report = make_report(question("cluster"))
    rows = dict(facts(report))
    assert f"snapshot_every = {report.choice.setting.snapshot_every:,}" in rows["recommended"]
    assert rows["effective training time"] == f"{report.effective:.2%}"
    assert report.simulated[0].effective_share == pytest.approx(report.effective, abs=0.002)


def test_a_time_between_failures_that_is_given_has_no_interval() -> None:
    assert dict(facts(make_report(question())))["a failure every"] == "2 h (given)"
    estimated = estimate_rates(FailureHistory(36000.0, process=3), None)
    row = dict(facts(make_report(replace(question(), rates=estimated))))["a failure every"]
    assert re.fullmatch(r".+ \(90 %: .+ to .+; 3 seen\)", row)


def test_a_job_that_cannot_progress_is_refused() -> None:
    asked = replace(question("cluster"), rates=FailureRates.known(60.0))
    with pytest.raises(ConfigError, match="cannot progress"):
        make_report(asked)


JOB = Job(
    params=7e9,
    optimizer="adamw",
    density=0.01,
    gpus=1024,
    step_seconds=8.0,
    disk_bytes_per_second=2e9,
)


def test_a_plan_knows_the_sizes_of_things() -> None:
    costs = planned(JOB).costs
    # Parameters and two moments, sharded; and on each rank the residual of all parameters.
    assert costs.residual_bytes == 4 * 7e9
    assert (costs.snapshot_bytes - costs.residual_bytes) * 1024 == 3 * 4 * 7e9
    assert costs.snapshot_seconds == costs.snapshot_bytes / 10e9
    assert costs.load_seconds == costs.snapshot_bytes * 1024 / 2e9  # every rank reads all shards
    assert costs.differential_bytes == pytest.approx(0.01 * 7e9 * 4.3)
    assert costs.write_bytes_per_second == 2e9 / 8


@pytest.mark.parametrize(
    ("density", "value_bits", "measured"),
    [(0.01, 2, 1.25), (0.03, 2, 0.97), (0.1, 2, 0.77), (0.01, 4, 1.45), (0.1, 4, 0.99)],
)
def test_a_plan_knows_the_size_of_entries_in_few_bits(
    density: float, value_bits: int, measured: float
) -> None:
    job = replace(JOB, density=density, value_bits=value_bits)
    entries = density * job.params
    assert planned(job).costs.differential_bytes / entries == pytest.approx(measured, rel=0.11)
    assert planned(job).costs.staged_bytes / entries == 8 + value_bits / 8


def test_a_plan_of_one_gpu_has_the_whole_disk() -> None:
    costs = planned(replace(JOB, gpus=1, params=1e6)).costs
    assert costs.write_bytes_per_second == 2e9


def test_other_strategies_are_not_charged_for_error_feedback() -> None:
    costs = planned(replace(JOB, gpus=16)).costs
    rates = FailureRates.known(8 * 3600.0)
    others_of = partial(alternatives, num_nodes=2, network_bytes_per_second=10e9)
    others = others_of(costs, rates)
    assert others == others_of(without_residual(costs), rates)
    assert published_choice(costs, rates) == published_choice(without_residual(costs), rates)
    (periodic,) = (one for one in others if one.name == "periodic full")
    assert periodic.stall_seconds == pytest.approx(3 * 4 * 7e9 / 2 / 2e9 + 0.01 + 0.525)


def plan_with(disk_bytes_per_second: float, given: tuple[str, ...] = ()) -> Question:
    job = replace(JOB, params=1.3e9, gpus=16, step_seconds=2.5)
    measured = planned(replace(job, disk_bytes_per_second=disk_bytes_per_second), given)
    return replace(
        question(),
        costs=measured.costs,
        estimates=measured.estimates,
        rates=FailureRates.known(8 * 3600.0),
        limits=Limits(total_bytes=500e9),
        current=None,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "given",
    [
        pytest.param((), id="loading assumed", marks=pytest.mark.slow),
        pytest.param(("optimizer",), id="loading follows"),
    ],
)
def test_another_write_bandwidth_is_a_plan_with_another_disk(given: tuple[str, ...]) -> None:
    report = make_report(plan_with(1e9, given))
    (found,) = (one for one in report.sensitivities if one.what == "write bandwidth")
    chosen = report.choice.setting
    for factor, kept, retuned in zip(found.factors, found.kept, found.retuned, strict=True):
        anew = plan_with(factor * 1e9, given)
        best = make_report(anew).choice.waste.seconds_per_hour
        same = waste(anew.costs, anew.rates, chosen.snapshot_every, chosen.batch_size)
        assert retuned == pytest.approx(best)
        assert kept == pytest.approx(same.seconds_per_hour)


def test_loading_that_was_measured_does_not_follow_the_write_bandwidth() -> None:
    asked = plan_with(1e9)
    load = Estimate.of([asked.costs.load_seconds])
    assert load is not None
    measured = replace(asked, estimates={**asked.estimates, "load_seconds": load})
    (found,) = (s for s in make_report(measured).sensitivities if s.what == "write bandwidth")
    slower = replace(asked.costs, write_bytes_per_second=asked.costs.write_bytes_per_second / 8)
    best = recommend(slower, asked.rates, asked.limits).waste.seconds_per_hour
    assert found.factors[0] == 1 / 8
    assert found.retuned[0] == pytest.approx(best)


@pytest.mark.parametrize(
    ("gpus", "num_nodes", "missing"),
    [(1, 1, {"Gemini", "just-in-time"}), (8, 1, {"Gemini"}), (9, 2, set())],
)
def test_a_plan_is_compared_with_what_can_exist(
    gpus: int, num_nodes: int, missing: set[str]
) -> None:
    job = replace(JOB, params=350e6, gpus=gpus)
    assert job.num_nodes == num_nodes
    rates = FailureRates.known(4 * 3600.0)
    found = alternatives(
        planned(job).costs, rates, num_nodes=job.num_nodes, network_bytes_per_second=1e9
    )
    assert {"Gemini", "just-in-time"} - {one.name for one in found} == missing
    assert len(found) == 6 - len(missing)


def test_the_setting_of_the_published_model_is_not_called_that_model() -> None:
    report = make_report(question())
    row = dict(facts(report))["lowdiff with the published model's setting"]
    assert f"{report.published_waste.seconds_per_hour:.1f} s wasted per hour" in row
    assert "LowDiff's published model" not in html_page(report)


@pytest.mark.parametrize(
    ("given", "costs"),
    [
        ((), {"residual_bytes"}),
        (("step_time",), {"step_seconds"}),
        (("restart",), {"restart_seconds"}),
        (("copy",), set()),
        (("copy", "density"), {"differential_seconds", "differential_bytes", "staged_bytes"}),
        (("copy", "optimizer"), {"snapshot_seconds", "snapshot_bytes", "load_seconds"}),
        (("gpus_per_node",), {"write_bytes_per_second"}),
    ],
)
def test_what_follows_from_what_was_given_is_given(given: tuple[str, ...], costs: set[str]) -> None:
    estimates = planned(JOB, given).estimates
    found = {name for name, estimate in estimates.items() if estimate.source == "given"}
    assert found == {"residual_bytes", *costs}
    assert {e.source for e in estimates.values()} == {"given", "assumed"}


def test_a_single_gpu_shares_its_disk_with_nobody() -> None:
    estimates = planned(replace(JOB, gpus=1)).estimates
    assert estimates["write_bytes_per_second"].source == "given"


def test_a_run_that_wastes_nothing_at_all_can_be_drawn() -> None:
    nothing = [replace(one, effective_share=1.0) for one in make_report(question()).simulated]
    assert charts.strategies(nothing).count("100.00% useful") == len(nothing)


@pytest.mark.parametrize(
    ("kept", "text"), [(1, "the newest snapshot kept"), (5, "the 5 newest snapshots kept")]
)
def test_how_many_snapshots_are_kept_is_said_beside_what_they_take(kept: int, text: str) -> None:
    report = make_report(replace(question(), limits=Limits(kept_snapshots=kept)))
    assert dict(facts(report))["stored"].endswith(f"all ranks, with {text}")
    assert dict(facts(report))["stored"].startswith(f"up to {readable_bytes(report.stored_bytes)}")


@pytest.mark.cases(6)
@pytest.mark.parametrize(
    "changes",
    [
        {"step_seconds": 1e-9},
        {"step_seconds": 3e10},
        {"disk_bytes_per_second": 1.0, "params": 1.0},
        {"disk_bytes_per_second": 1e21},
        {"disk_bytes_per_second": 10.0, "params": 1e9, "step_seconds": 1e-9},
        {
            "copy_bytes_per_second": 1.0,
            "params": 1e20,
            "disk_bytes_per_second": 1e21,
            "step_seconds": 1e-9,
        },
        {"density": 5e-324},
        {"density": 5e-324, "value_bits": 2},
        {"density": 1.0, "value_bits": 4},
    ],
    ids=str,
)
@pytest.mark.parametrize("mtbf_seconds", [1e-9, 3e10])
def test_the_ends_of_what_units_allow_are_reported_on_or_refused(
    mtbf_seconds: float, changes: dict[str, Any]
) -> None:
    job = replace(JOB, gpus=8, restart_seconds=1e-9, **changes)
    measured = planned(job)
    asked = replace(
        question(),
        costs=measured.costs,
        estimates=measured.estimates,
        rates=FailureRates.known(mtbf_seconds),
        current=None,
        limits=Limits(staging_bytes=1.0, bytes_per_hour=1e21),
    )
    if mtbf_seconds <= recovery_seconds(measured.costs, 1, 1):
        with pytest.raises(ConfigError, match="cannot progress"):
            make_report(asked)
        return
    report = make_report(asked)
    json.dumps(report.document(), allow_nan=False)
    assert "nan" not in re.findall(r'"([^"]*)"', html_page(report))


@pytest.mark.parametrize(
    "wrong",
    [{"optimizer": "adamv"}, {"density": 0.0}, {"density": 1.5}, {"gpus": 0}, {"params": 0.0}],
)
def test_a_plan_that_cannot_be_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        replace(JOB, **wrong)


@pytest.mark.slow
def test_another_strategy_that_wastes_less_is_named() -> None:
    def told(**changes: Any) -> tuple[list[str], Any]:
        asked = question("laptop")
        report = make_report(replace(asked, costs=replace(asked.costs, **changes)))
        return [text for text in report.warnings if "would waste less" in text], report

    # To stage a step takes as long as to train it.
    costs, _ = JOBS["laptop"]
    (text,), report = told(differential_seconds=costs.step_seconds)
    own, best = report.simulated[:2]
    assert best.effective_share > own.effective_share
    assert text.startswith(f"{best.strategy.name} (")
    assert f"{best.effective_share:.2%} of the time would be training" in text
    assert f"{own.effective_share:.2%} with lowdiff" in text
    found, report = told(differential_seconds=1e-6, snapshot_seconds=1e-6)
    assert report.simulated[0].effective_share >= report.simulated[1].effective_share
    assert found == []
