from __future__ import annotations

import io
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from lowdiff.demo.report import draw, print_report, write_json
from lowdiff.demo.result import Comparison, Cost, DemoResult, Resumption

CURVE = tuple((step, 2.5 + 3 * math.exp(-step / 10)) for step in range(1, 61))
GOOD = DemoResult(
    seed=1,
    steps=60,
    world_size=2,
    num_parameters=1_800_000,
    killed_at=30,
    resumed_from=31,
    comparison=Comparison(num_tensors=428, num_losses=120, differences=()),
    resumption=Resumption(launch_seconds=4.0, attach_seconds=0.5, first_step_seconds=0.5),
    cost=Cost(
        staged_bytes=((150_000,) * 60, (149_000,) * 60),
        durable_bytes_per_step=(41_000.0, 40_000.0),
        segment_bytes=3_000_000,
        full_checkpoint_bytes=22_000_000,
        training_thread_seconds=0.003,
        step_seconds=0.3,
    ),
    held_out_loss=2.9,
    uninterrupted=CURVE,
    killed=CURVE[:31],
    resumed=CURVE[31:],
    total_seconds=80.0,
)


def printed(result: DemoResult) -> str:
    console = Console(file=io.StringIO(), width=100)
    print_report(result, console, picture=Path("demo.png"))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_table_answers_the_five_questions() -> None:
    text = printed(GOOD)
    rows = [
        ("steps lost", "0"),
        ("bit-identical", "yes"),
        ("bytes per step", "81.0 kB"),
        ("training thread", "3.0 ms per step"),
        ("time to resume", "5.0 s"),
    ]
    for question, answer in rows:
        [line] = [line for line in text.splitlines() if question in line]
        assert answer in line
    assert "demo.png" in text


def test_the_table_fits_a_terminal_of_80_columns() -> None:
    console = Console(file=io.StringIO(), width=80)
    print_report(GOOD, console, picture=Path("demo.png"))
    assert isinstance(console.file, io.StringIO)
    table = [line for line in console.file.getvalue().splitlines() if line.startswith("│")]
    assert all(line.split("│")[1].strip() for line in table)  # no row was wrapped


def test_failures_are_named() -> None:
    differences = tuple(f"rank 0: tensor {i} differs" for i in range(8))
    bad = replace(GOOD, comparison=replace(GOOD.comparison, differences=differences))
    text = printed(bad)
    assert "NO" in text
    assert "tensor 0 differs" in text
    assert "and 3 more" in text


def test_a_lost_step_is_a_failure() -> None:
    assert GOOD.failures == ()
    assert replace(GOOD, resumed_from=28).failures == ("2 committed steps were lost",)


@pytest.mark.parametrize("world_size", [1, 3])
def test_the_picture_is_a_png(tmp_path: Path, world_size: int) -> None:
    cost = replace(GOOD.cost, staged_bytes=(GOOD.cost.staged_bytes[0],) * world_size)
    draw(replace(GOOD, world_size=world_size, cost=cost), tmp_path / "demo.png")
    data = (tmp_path / "demo.png").read_bytes()
    assert data.startswith(b"\x89PNG")
    assert len(data) > 10_000


def test_the_json_holds_what_was_measured(tmp_path: Path) -> None:
    write_json(GOOD, tmp_path / "demo.json")
    record = json.loads((tmp_path / "demo.json").read_text())
    assert record["steps"] == 60
    assert record["comparison"]["num_tensors"] == 428
    assert record["failures"] == []
