"""``lowdiff plan``, as a user types it, and the report that it shares with ``lowdiff tune``."""

from __future__ import annotations

import json
import math
import re
import shlex
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from lowdiff.tuner.side_by_side import (
    COPIES_OVERHEAD_SHARE,
    REPLICA_COPIES_OVERHEAD_SHARE,
    Assumptions,
)
from tests.unit.cli.commands import Command, command

__all__ = ["command"]

ROOT = Path(__file__).parents[3]
PLAN = ("plan", "--params", "350M", "--gpus", "8", "--mtbf", "6h", "--disk", "500MB/s")


@pytest.mark.slow
def test_a_store_of_a_plan_is_reported_on(command: Command) -> None:
    assert "in the store" in command(*PLAN, "--store", "100MB/s").out
    assert "in the store" not in command(*PLAN).out


@pytest.mark.slow
def test_a_report_is_printed_before_it_is_written(command: Command, tmp_path: Path) -> None:
    page = tmp_path / "reports/of today/plan.html"
    result = command(*PLAN, "--html", page)
    assert (result.code, result.err) == (0, "")
    assert result.out.splitlines()[-1] == f"Report with charts: {page}"
    assert page.read_text().startswith("<!doctype html>")
    result = command(*PLAN, "--html", page / "below.html")
    assert result.code == 1
    assert f"{page}/below.html could not be written: " in result.error
    assert "recommended" in result.out
    result = command(*PLAN, "--html", page.parent)
    assert result.code == 2
    assert f"--html {page.parent} is a folder; give the name of a file" in result.error
    assert list(page.parent.iterdir()) == [page]


def test_a_plan_counts_values_in_few_bits(command: Command) -> None:
    usual = json.loads(command(*PLAN, "--json").out)
    result = command(*PLAN, "--value-bits", "2", "--json")
    fewer = json.loads(result.out)
    assert "TopK(0.01, value_bits=2)" in fewer["title"]
    name = "differential_bytes"
    assert 0.25 < fewer["estimates"][name]["median"] / usual["estimates"][name]["median"] < 0.35


@pytest.mark.slow
def test_a_plan_says_how_often_to_save_if_lost_steps_were_predicted(
    command: Command, tmp_path: Path
) -> None:
    file = tmp_path / "tail.json"
    losses = [[step, 3 * math.exp(-step / 50_000)] for step in range(0, 20_000, 1000)]
    errors = [[saves, 1e-9 * math.exp(-saves / 4)] for saves in range(4, 20)]
    file.write_text(json.dumps({"losses": losses, "errors": errors}))
    found = json.loads(command(*PLAN, "--lost-tail", file, "--json").out)["predicting"]
    assert found["by"] in ("closed form", "clamped")
    assert "if lost steps were predicted" in command(*PLAN, "--lost-tail", file).out
    flat = [[saves, 1e-9 * (1 + saves % 2)] for saves in range(4, 20)]
    file.write_text(json.dumps({"losses": losses, "errors": flat}))
    found = json.loads(command(*PLAN, "--lost-tail", file, "--json").out)["predicting"]
    assert found["by"] == "Young"
    assert json.loads(command(*PLAN, "--json").out)["predicting"] is None


@pytest.mark.parametrize("text", ["", "[]", '{"losses": [[1, 2]]}', '{"losses": 3, "errors": []}'])
def test_a_plan_refuses_curves_that_it_cannot_read(
    command: Command, tmp_path: Path, text: str
) -> None:
    file = tmp_path / "tail.json"
    file.write_text(text)
    result = command(*PLAN, "--lost-tail", file)
    assert result.code == 2
    assert f'{file} is no JSON with "losses"' in result.error
    assert command(*PLAN, "--lost-tail", tmp_path / "none").code == 2


@pytest.mark.slow
def test_a_plan_says_what_it_assumed(command: Command) -> None:
    def assumed(*given: str) -> tuple[list[str], str]:
        document = json.loads(command(*PLAN, "--json", *given).out)
        start = "assumed, because not given: "
        (note,) = (text for text in document["warnings"] if text.startswith(start))
        sources = {name: e["source"] for name, e in document["estimates"].items()}
        names = sorted(name for name, source in sources.items() if source == "assumed")
        assert note == start + ", ".join(names).replace("_", " ")
        return names, " ".join(document["warnings"])

    names, notes = assumed()
    assert {"step_seconds", "restart_seconds", "snapshot_seconds", "snapshot_bytes"} <= set(names)
    assert "a step is assumed to take 5 s" in notes
    given = ("--restart", "2min", "--copy", "10GB/s", "--step-time", "5s", "--optimizer", "adamw")
    names, notes = assumed(*given, "--density", "0.01", "--gpus-per-node", "8")
    assert names == ["encode_seconds", "replay_seconds", "write_latency_seconds"]
    assert "a step is assumed" not in notes


def sections(page: str) -> str:
    """A page without what is simulated: random generators may differ between releases of numpy."""
    return re.sub(r"<h2>Against what else there is</h2>.*?</section>", "", page, flags=re.DOTALL)


def test_the_sample_report_is_what_the_documented_command_writes(
    command: Command, tmp_path: Path
) -> None:
    text = (ROOT / "docs/tuning.md").read_text()
    line = next(line for line in text.splitlines() if line.startswith("lowdiff plan "))
    *arguments, _ = shlex.split(line)[1:]
    assert command(*arguments, tmp_path / "plan.html").code == 0
    sample = (ROOT / "docs/tuning/report.html").read_text()
    made = (tmp_path / "plan.html").read_text()
    assert sections(sample) == sections(made), f"docs/tuning/report.html: {line}"
    # And the document says what the page says of the others, good or bad.
    shares = dict(
        re.findall(r'start" class="name[^>]*>([^<]+)</text>\n<text[^>]*>(.+?)% useful', sample)
    )
    assert len(shares) == 7
    del shares["no checkpoints"]
    assert [name for name, share in shares.items() if f"{share} %" not in text] == []
    rows = re.findall(
        r"<tr><td>((?:torch.save|log|gradients|replica|survivors)<.+?)</td></tr>", sample
    )
    assert len(rows) == 5
    for row in rows:
        name, *cells = row.split("</td><td>")
        assert f"| `{name}` | {' | '.join(cells)} |" in text


def test_a_plan_needs_no_run(command: Command, tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    result = command(*PLAN, "--html", page)
    assert (result.code, result.err) == (0, "")
    assert "3.5e+08 parameters, adamw, TopK(0.01), on 8 GPUs" in result.out
    assert "a step is assumed to take 5 s" in result.out
    assert page.read_text().startswith("<!doctype html>")


@pytest.mark.slow
def test_the_ranks_of_a_node_share_its_network(command: Command) -> None:
    def gemini(*given: str) -> str:
        found = json.loads(command(*PLAN, "--json", *given).out)["strategies"]
        return next(str(one["note"]) for one in found if one["name"] == "Gemini")

    alone = gemini("--gpus-per-node", "1", "--network", "10MB/s")
    assert gemini("--gpus-per-node", "4", "--network", "40MB/s") == alone
    assert gemini("--gpus-per-node", "4", "--network", "10MB/s") != alone


@pytest.mark.slow
def test_a_network_that_is_assumed_is_said_where_something_goes_over_it(command: Command) -> None:
    def notes(*given: str) -> list[str]:
        warnings = json.loads(command(*PLAN, "--json", *given).out)["warnings"]
        return [text for text in warnings if "Gemini" in text]

    assert notes() == []  # one node has no peer
    (note,) = notes("--gpus", "16")
    assert "10 GB/s of each node" in note
    assert "--network" in note
    assert notes("--gpus", "16", "--network", "10GB/s") == []


def test_neither_report_loads_torch() -> None:
    code = "import sys, lowdiff.cli.tuning_report; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True
    )
    assert done.stdout == "False\n"


@pytest.mark.slow
def test_a_plan_keeps_limits(command: Command) -> None:
    free = json.loads(command(*PLAN, "--json").out)
    tight = json.loads(command(*PLAN, "--json", "--total", "60GB").out)
    assert tight["stored_bytes"] <= 60e9 < free["stored_bytes"]
    broken = json.loads(command(*PLAN, "--json", "--total", "1GB").out)["limits_broken"]
    assert broken == ["the run may hold 1 GB, but 3 snapshots alone take 46.2 GB; raise --total"]


@pytest.mark.slow
def test_strategies_stand_side_by_side(command: Command, tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    text = command(*PLAN, "--html", page).out
    found = json.loads(command(*PLAN, "--json").out)["side_by_side"]
    rows = found["rows"]
    assert [row["name"] for row in rows] == [
        "torch.save",
        "log",
        "gradients",
        "replica",
        "survivors",
    ]
    for row in rows:
        cells = [row["name"], f"{row['overhead_share']:.2%}", f"{row['wasted_share']:.3%}"]
        assert re.search(r"\s.+\s".join(map(re.escape, cells)), text)
        assert all(f"<td>{cell}</td>" in page.read_text() for cell in cells)
    published = f"{found['published']['user_level']:.3%} with just-in-time ones"
    assert published in page.read_text()
    assert published in " ".join(text.split())


@pytest.mark.slow
def test_what_the_table_assumes_can_be_given(command: Command) -> None:
    def document(*given: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(command(*PLAN, "--json", *given).out)
        return found

    usual = document()
    assert usual["side_by_side"]["assumptions"] == asdict(Assumptions())
    assert any("--log-overhead" in text for text in usual["warnings"])
    given = document(
        *("--log-overhead", "0.1", "--replica-overhead", "0.2", "--survivors-overhead", "0.3"),
        *("--gradients-overhead", "0.15"),
        *("--all-at-once", "0.4", "--snapshot-every", "7", "--save-time", "9s"),
    )
    assert given["side_by_side"]["assumptions"] == asdict(
        Assumptions(0.1, 0.2, 0.3, 0.4, 7, 9.0, gradients_overhead_share=0.15)
    )
    # Then all of the plan goes by what logging takes.
    assert given["estimates"]["differential_seconds"]["source"] == "given"
    assert given["waste_terms"]["differentials"] == pytest.approx(0.1)
    assert not any("--log-overhead" in text for text in given["warnings"])


COPIES = ("--gpus", "32", "--nodes", "16", "--copies", "2")


@pytest.mark.slow
def test_copies_are_reported_on(command: Command, tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    text = command(*PLAN, *COPIES, "--html", page).out
    document = json.loads(command(*PLAN, *COPIES, "--json").out)
    found = document["copies"]
    assert (found["copies"], found["nodes"]) == (2, 16)
    assert [round(one["probability"], 4) for one in found["survival"]] == [1, 0.9333, 0.8]
    assert found["gemini_sent_bytes"] == 12 * 350e6 / 32
    assert found["sent_bytes"] < 0.01 * found["gemini_sent_bytes"]
    for shown in (text, page.read_text()):
        words = " ".join(shown.split())
        assert "Copies on 2 of 16 nodes" in words
        assert "2 at once: 93.33%" in words
    assert any("--copies-overhead" in note for note in document["warnings"])
    details = [row["detail"] for row in document["side_by_side"]["rows"]]
    assert [detail.endswith(", 2 copies") for detail in details] == [False, True, True, True, False]


@pytest.mark.slow
def test_the_document_says_what_its_command_says_of_copies(command: Command) -> None:
    text = (ROOT / "docs/tuning.md").read_text()
    line = next(
        line for line in text.splitlines() if "--copies" in line and line[:13] == "lowdiff plan "
    )
    arguments = shlex.split(line)[1:]
    shown = " ".join(command(*arguments).out.split())
    rows = re.findall(r"^\| (.+) \| (.+) \|$", text.partition("| Copies on")[2], re.MULTILINE)[:6]
    assert [row for row in rows if " ".join(row) not in shown] == []
    assert len({name for name, _ in rows} & {"with Gemini", "memory of a node, replica"}) == 2
    log, without = (
        json.loads(command(*given, "--json").out)["side_by_side"]["rows"][1]["wasted_share"]
        for given in (arguments, [*arguments, "--copies", "1"])
    )
    said = f"wastes {100 * log:.2f} % of the time instead of {100 * without:.2f} %"
    assert said in " ".join(text.split())


@pytest.mark.slow
def test_without_copies_nothing_is_said_of_them(command: Command) -> None:
    document = json.loads(command(*PLAN, "--gpus", "16", "--json").out)
    assert document["copies"] is None
    assert not any("--copies-overhead" in note for note in document["warnings"])
    assert "Copies on" not in command(*PLAN, "--gpus", "16", "--copies", "1").out


@pytest.mark.slow
def test_what_copies_add_is_an_option(command: Command) -> None:
    document = json.loads(command(*PLAN, *COPIES, "--copies-overhead", "0.05", "--json").out)
    assert document["side_by_side"]["assumptions"]["copies_overhead_share"] == 0.05
    assert not any("--copies-overhead" in note for note in document["warnings"])
    measured = json.loads(command(*PLAN, *COPIES, "--json").out)["warnings"]
    shares = f"{COPIES_OVERHEAD_SHARE:.1%}", f"{REPLICA_COPIES_OVERHEAD_SHARE:.1%}"
    assert any(all(share in note for share in shares) for note in measured)
    help_text = " ".join(command("plan", "--help").out.replace("│", "").split())
    assert "the default was measured on CPUs, see docs/tuning.md" in help_text


@pytest.mark.slow
def test_nodes_are_another_way_to_say_how_many_gpus_are_on_each(command: Command) -> None:
    def document(*given: str) -> str:
        return command(*PLAN, "--gpus", "32", "--json", *given).out

    assert document("--nodes", "16") == document("--gpus-per-node", "2")
    both = command(*PLAN, "--gpus", "32", "--nodes", "16", "--gpus-per-node", "2")
    assert both.code == 2
    assert "give --nodes or --gpus-per-node, not both" in both.error


@pytest.mark.cases(12)
@pytest.mark.parametrize(
    ("option", "value", "text"),
    [
        ("--copies", "2", "copies=2 needs 2 nodes, and there are 1"),
        ("--nodes", "9", "8 GPUs, 1 on each node, take 8 nodes, not 9"),
        ("--copies-overhead", "inf", "the overhead of copies is a share"),
        ("--survivors-overhead", "inf", "the overhead of survivors is a share"),
        ("--optimizer", "adamv", "optimizer is one of"),
        ("--density", "2", "density must be in"),
        ("--value-bits", "3", "value_bits is 2, 4 or None, got 3; None is float32"),
        ("--disk", "2GB", "is not a rate"),
        ("--params", "many", "is not a number"),
        ("--mtbf", "30s", "the job cannot progress"),
        ("--mtbf", "1e300d", "is no plausible duration"),
        ("--mtbf", "1e150s", "is no plausible duration"),
        ("--step-time", "1e-300s", "is no plausible duration"),
        ("--disk", "1e300B/s", "is no plausible rate"),
        ("--disk", "1e-300B/s", "is no plausible rate"),
        ("--params", "1e300", "is no plausible number"),
    ],
)
def test_a_plan_of_nonsense_is_bad_usage(
    command: Command, option: str, value: str, text: str
) -> None:
    result = command(*PLAN, option, value)
    assert result.code == 2
    assert text in result.error
