from __future__ import annotations

import json
from pathlib import Path

import pytest

from benches.bench_device_ops import ARMS
from benches.report import REPORTED, ROOT, records_in, rendered, sections_of

DOCUMENT = ROOT / "docs" / "benchmarks.md"
RESULTS = ROOT / "docs" / "results"


@pytest.mark.cases(4)
@pytest.mark.parametrize("path", sorted((ROOT / "docs").glob("*.md")), ids=lambda path: path.stem)
def test_a_document_says_what_the_results_say(path: Path) -> None:
    document = path.read_text(encoding="utf-8")
    assert rendered(document, records_in(RESULTS)) == document, "run python -m benches.report"


def test_every_result_of_a_bench_has_one_section() -> None:
    names = sections_of(DOCUMENT.read_text(encoding="utf-8"))
    assert sorted(names) == sorted([*REPORTED, "overview", "peers_systems"])
    benches = {name for name, record in records_in(RESULTS).items() if "summary" in record}
    assert benches <= REPORTED.keys()


def test_a_figure_changed_by_hand_is_put_right_and_the_text_around_it_stays() -> None:
    document = DOCUMENT.read_text(encoding="utf-8")
    changed = document.replace("**missed**", "met")
    assert changed != document
    text = rendered("Kept.\n" + changed + "Kept, too.\n", records_in(RESULTS))
    assert text == "Kept.\n" + document + "Kept, too.\n"


def test_figures_follow_their_result(tmp_path: Path) -> None:
    record = json.loads((RESULTS / "overhead.json").read_text(encoding="utf-8"))
    record["summary"]["overhead_upper95"] = 0.049
    record["summary"]["overhead_watch_recovery_upper95"] = 0.031
    (tmp_path / "overhead.json").write_text(json.dumps(record), encoding="utf-8")
    text = rendered("<!-- figures: overhead -->\n<!-- end -->\n", records_in(tmp_path))
    assert "| its 95 % upper bound | 4.9 % | 3.1 % |" in text
    assert "| target of the bound | 5 %: met | 3 %: **missed** |" in text


def test_a_snapshot_is_weighed_against_a_copy_once_that_is_measured(tmp_path: Path) -> None:
    record = json.loads((RESULTS / "overhead.json").read_text(encoding="utf-8"))
    for arm, ratio in (("", 2.49), ("watch_recovery_", 2.51)):
        record["summary"][f"{arm}snapshot_over_memcpy"] = ratio
        record["summary"][f"{arm}snapshot_first_over_memcpy"] = 2 * ratio
    (tmp_path / "overhead.json").write_text(json.dumps(record), encoding="utf-8")
    text = rendered("<!-- figures: overhead -->\n<!-- end -->\n", records_in(tmp_path))
    row = "| the same, over a plain copy of its bytes | 2.49, target 2.5: met | 2.51, target 2.5: **missed** |"
    assert row in text
    assert "| the first one, in `attach`, likewise | 4.98 | 5.02 |" in text


def test_every_arm_that_was_counted_has_a_row(tmp_path: Path) -> None:
    record = json.loads((RESULTS / "device_ops.json").read_text(encoding="utf-8"))
    summary = record["summary"]
    of_first = {key: summary[key] for key in summary if f"clipped_{key}" in summary}
    for number, arm in enumerate(ARMS):
        own = {f"{arm}{key}": value for key, value in of_first.items()}
        record["summary"] |= own | {f"{arm}snapshot_launches": 9000 + number}
    (tmp_path / "device_ops.json").write_text(json.dumps(record), encoding="utf-8")
    text = rendered("<!-- figures: device_ops -->\n<!-- end -->\n", records_in(tmp_path))
    for number in range(len(ARMS)):
        assert f"| {9000 + number} |" in text


def test_a_bench_without_a_result_is_not_measured_yet() -> None:
    text = rendered("<!-- figures: replay -->\n<!-- end -->\n", {})
    assert "Not measured yet: `python -m benches.bench_replay" in text


def test_a_section_that_nobody_knows_is_an_error() -> None:
    with pytest.raises(KeyError, match="nonsense"):
        rendered("<!-- figures: nonsense -->\n<!-- end -->\n", {})
