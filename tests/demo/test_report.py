from __future__ import annotations

import io
import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from lowdiff.demo import report
from lowdiff.demo.picture import draw
from lowdiff.demo.report import print_report
from lowdiff.demo.run import DemoResult, LaunchOutput

LOSSES = {step: f"{2.5 + 3 * math.exp(-step / 10):.9g}" for step in range(1, 81)}


def life(first: int, last: int, step_seconds: float = 0.3) -> LaunchOutput:
    steps = range(first, last + 1)
    return LaunchOutput(
        resumed_from=first - 1,
        attached_after=4.5,
        losses={step: LOSSES[step] for step in steps},
        times={
            step: 4.5 + step_seconds * (step - first + 1) - 0.05 * max(0, step - 60)
            for step in steps
        },
        weights={0: "ce1e", 1: "ce1e"} if last == 80 else {},
        lowdiff_seconds={0: 0.003, 1: 0.002} if last == 80 else {},
    )


GOOD = DemoResult(
    run=Path("out/runs/killed"),
    seed=1,
    world_size=2,
    steps=60,
    reference=life(1, 80),
    killed=life(1, 31),
    resumed=life(32, 80),
    num_parameters=1_800_000,
    num_values=428,
    differences=(),
    stored_bytes=dict.fromkeys(range(1, 61), 81_000),
    full_checkpoint_bytes=22_000_000,
)


def printed(result: DemoResult) -> str:
    console = Console(file=io.StringIO(), width=100)
    print_report(result, console, picture="demo.png")
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_table_answers_what_a_reader_asks() -> None:
    text = printed(GOOD)
    rows = [
        ("steps lost", "0"),
        ("bit-identical", "yes"),
        ("bytes per step", "81.0 kB"),
        ("full checkpoint", "272 times"),
        ("time per step", "300 ms"),
        ("time per step", "250 ms after lowdiff was detached"),
        ("training thread", "3.0 ms per step"),
        ("time to resume", "4.8 s"),
    ]
    for question, answer in rows:
        [line] = [line for line in text.splitlines() if question in line]
        assert answer in line
    assert "demo.png" in text
    assert [line.split()[1] for line in text.splitlines() if line.startswith("  lowdiff ")] == [
        *("inspect", "timeline", "recover")
    ]


def test_the_table_fits_a_terminal_of_80_columns() -> None:
    console = Console(file=io.StringIO(), width=80)
    print_report(GOOD, console, picture="demo.png")
    assert isinstance(console.file, io.StringIO)
    table = [line for line in console.file.getvalue().splitlines() if line.startswith("│")]
    assert all(line.split("│")[1].strip() for line in table)  # no row was wrapped


def test_failures_are_named() -> None:
    text = printed(replace(GOOD, differences=tuple(f"tensor {i} differs" for i in range(8))))
    assert "NO" in text
    assert "tensor 0 differs" in text
    assert "and 3 more" in text


def test_a_lost_step_is_a_failure() -> None:
    assert GOOD.failures == ()
    assert GOOD.committed == 30, "a loss is printed before its step is committed"
    assert replace(GOOD, resumed=life(29, 80)).failures == ("2 committed steps were lost",)


def test_a_loss_that_differs_or_is_missing_is_a_failure() -> None:
    wrong = replace(life(32, 80), losses={**life(32, 80).losses, 40: "2.7"})
    expected = f"step 40: loss 2.7 instead of {LOSSES[40]}"
    assert replace(GOOD, resumed=wrong).failures == (expected,)
    assert replace(GOOD, resumed=life(33, 80)).failures == ("step 32: no loss",)
    assert replace(GOOD, reference=life(2, 80)).failures == ("step 1: no loss",)


def test_weights_that_differ_or_were_never_printed_are_a_failure() -> None:
    other = replace(life(32, 80), weights={0: "ce1e", 1: "0bad"})
    assert replace(GOOD, resumed=other).failures == ("rank 1: weights 0bad instead of ce1e",)
    silent = replace(life(1, 80), weights={}), replace(life(32, 80), weights={})
    assert len(replace(GOOD, reference=silent[0], resumed=silent[1]).failures) == 2


def test_the_picture_is_a_png(tmp_path: Path) -> None:
    draw(GOOD, tmp_path / "demo.png")
    data = (tmp_path / "demo.png").read_bytes()
    assert data.startswith(b"\x89PNG")
    assert len(data) > 10_000


def test_without_matplotlib_there_is_no_picture_and_all_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(report, "run_demo", lambda *_, **__: GOOD)
    monkeypatch.delitem(sys.modules, "lowdiff.demo.picture")
    for name in [n for n in sys.modules if n.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert report.main(tmp_path) == 0
    shown = capsys.readouterr().out
    assert "bit-identical" in shown
    assert "Picture: none without matplotlib" in shown
