"""What ckpt-chaos leaves is judged without mercy: whatever is not as it should be is a failure."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benches.report import chaos
from tests.chaos import __main__ as campaigns
from tests.chaos.__main__ import Campaign, judge, killed_at, main

TRAINER = Campaign("log")
WRITER = Campaign("log", "writer", trainer_dies=False)
LINE = "7\topen\trun.json.0123abcd.partial\t1\n"
JOURNAL = ("begin", "attached 0", "ended 3", "begin", "attached 3", "ended 12")


def kill(
    folder: Path, *, rc: int = 137, log: str = LINE, journal: Any = JOURNAL, **outcome: Any
) -> None:
    """One killed and resumed training, and the control, as the tool leaves them."""
    point, control = folder / "pt_001", folder / "pt_control"
    for made in (point, control):
        made.mkdir(parents=True, exist_ok=True)
    good = {"raised": None, "resumed_from_step": 3, "weights_diff": 0.0}
    record = {"rc": rc, "point": [7, "before"], "outcome": {**good, **outcome}}
    (point / "result.json").write_text(json.dumps(record))
    (point / "events.log.rank0").write_text(log)
    (folder / "pt_001" / "out.rank-0").write_text("\n".join(journal))
    (folder / "reference").mkdir(exist_ok=True)
    (folder / "reference" / "events.log.rank0").write_text(log + log)
    (control / "result.json").write_text(json.dumps({"rc": 0, "outcome": {"weights_diff": 0.0}}))


def test_a_resumed_training_with_the_same_end_is_clean(tmp_path: Path) -> None:
    kill(tmp_path)
    judged = judge(TRAINER, tmp_path, 0)
    assert (judged.verdicts, judged.failed) == ({"clean": 1}, [])
    assert judged.boundaries == {"open run.json.*.partial": 1}


@pytest.mark.parametrize(
    ("verdict", "status", "change"),
    [
        ("cleanup", 1, {"raised": "ExitCode1", "resumed_from_step": None, "weights_diff": None}),
        ("cleanup", 1, {"raised": "Timeout"}),
        ("other_weights", 1, {"weights_diff": 1.0}),
        ("other_weights", 1, {"weights_diff": None}),
        ("lost_work", 0, {"resumed_from_step": 2}),
        ("not_killed", 0, {"rc": 0}),
        ("not_killed", 0, {"rc": 1}),
        ("not_killed", 0, {"log": ""}),
        ("not_killed", 0, {"log": LINE.replace("7", "6")}),
    ],
)
def test_anything_else_is_a_failure(
    tmp_path: Path, verdict: str, status: int, change: dict[str, Any]
) -> None:
    kill(tmp_path, **change)
    judged = judge(TRAINER, tmp_path, status)
    assert judged.verdicts == {verdict: 1}
    assert len(judged.failed) == 1


def test_steps_that_may_be_lost_are_counted_and_more_of_them_are_a_failure(tmp_path: Path) -> None:
    kill(tmp_path, resumed_from_step=1)
    judged = judge(Campaign("survivors", may_lose=2), tmp_path, 0)
    assert (judged.verdicts, judged.most_lost, judged.failed) == ({"lost_work": 1}, 2, [])
    assert len(judge(Campaign("survivors", may_lose=1), tmp_path, 0).failed) == 1


def test_of_two_ranks_the_one_behind_counts(tmp_path: Path) -> None:
    kill(tmp_path, resumed_from_step=2)
    (tmp_path / "pt_001" / "out.rank-1").write_text(
        "begin\nattached 0\nended 2\nbegin\nattached 2\n"
    )
    assert judge(Campaign("survivors", rank=0), tmp_path, 0).verdicts == {"clean": 1}


def test_a_writer_was_killed_only_if_its_trainer_saw_it_end(tmp_path: Path) -> None:
    kill(tmp_path, rc=0)
    assert judge(WRITER, tmp_path, 0).verdicts == {"not_killed": 1}
    (tmp_path / "pt_001" / "out.victim").write_text("0")
    assert judge(WRITER, tmp_path, 0).verdicts == {"not_killed": 1}
    (tmp_path / "pt_001" / "out.victim").write_text("137")
    assert judge(WRITER, tmp_path, 0).verdicts == {"clean": 1}


def test_a_training_ends_with_its_writer_in_attach_alone(tmp_path: Path) -> None:
    kill(tmp_path, rc=1, journal=("begin", "begin", "attached 0", "ended 12"), resumed_from_step=0)
    (tmp_path / "pt_001" / "out.victim").write_text("137")
    judged = judge(WRITER, tmp_path, 0)
    assert (judged.verdicts, judged.attach_failed, judged.failed) == ({"clean": 1}, 1, [])
    kill(tmp_path, rc=1)
    assert judge(WRITER, tmp_path, 0).failed == ["pt_001: the training ended with its writer"]


def test_a_campaign_without_kills_a_control_that_differs_and_a_tool_that_disagrees_are_failures(
    tmp_path: Path,
) -> None:
    assert len(judge(TRAINER, tmp_path / "nothing", 0).failed) == 2
    kill(tmp_path)
    assert judge(TRAINER, tmp_path, 1).failed == [
        "ckpt-chaos ended with status 1, unlike these verdicts"
    ]
    (tmp_path / "pt_001" / "result.json").unlink()
    assert judge(TRAINER, tmp_path, 0).verdicts == {"not_killed": 1}
    kill(tmp_path)
    control = tmp_path / "pt_control" / "result.json"
    for changed in (
        {"rc": 1, "outcome": {"weights_diff": None}},
        {"rc": 0, "outcome": {"weights_diff": 1.0}},
    ):
        control.write_text(json.dumps(changed))
        assert len(judge(TRAINER, tmp_path, 0).failed) == 1


def test_what_is_random_in_a_name_is_left_out(tmp_path: Path) -> None:
    kill(tmp_path, log="7\tos.mkdir\t87f20bfbfc2a42f3a06b5d56bb290042\t0\n")
    record = {"point": [7, "torn"]}
    assert killed_at(tmp_path / "pt_001", TRAINER, record) == ["os.mkdir", "*", "torn"]


@pytest.mark.parametrize(("difference", "status"), [(0.0, 0), (1.0, 1)])
def test_the_exit_status_and_the_table_tell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, difference: float, status: int
) -> None:
    def run(campaign: Campaign, tool: Path, folder: Path, points: int) -> int:
        kill(folder, weights_diff=difference)
        return status

    monkeypatch.setattr(campaigns, "fetch_tool", lambda folder: None)
    monkeypatch.setattr(campaigns, "run", run)
    assert main(["--out", str(tmp_path), "--only", "0"]) == status
    document = json.loads((tmp_path / "chaos.json").read_text())
    assert document["failed"] == status
    monkeypatch.delattr(campaigns, "run")
    assert main(["--out", str(tmp_path), "--only", "0", "--resume"]) == status
    text = chaos(document)
    assert f"| log | trainer | 2 | 1 | {1 - status} | 0 | {status} | 0 |" in text
    assert f"1 kills, **{status} failed**" in text
