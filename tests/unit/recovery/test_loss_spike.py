"""The story of docs/recovery.md, told by the example it uses and the commands it shows."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from lowdiff.cli.app import app
from lowdiff.examples import loss_spike
from lowdiff.recovery.inspect.timeline import TimelineStep, first_outlier

SPIKE = 120


def command(*arguments: Any) -> str:
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    assert result.exit_code == 0, result.output
    return result.stdout


def train(tmp_path: Path, run: str, *more: str) -> list[float]:
    return loss_spike.main(
        [
            *(str(tmp_path / run), "--staging", str(tmp_path / "staging")),
            *("--spike-step", str(SPIKE), "--until", str(SPIKE + 30), *more),
        ]
    )


@pytest.mark.slow
def test_a_spike_is_seen_in_the_timeline_and_healed_by_a_new_run(tmp_path: Path) -> None:
    losses = train(tmp_path, "spike")
    before = max(losses[SPIKE - 31 : SPIKE - 1])
    assert not max(losses[SPIKE:]) < 10 * before, "the run is spoilt"

    told = command("timeline", tmp_path / "spike", "--json", "--staging", tmp_path / "staging")
    steps = json.loads(told)["steps"]
    # What is not finite is null; the first step that is far out is the one.
    norms = [math.inf if s["gradient_norm"] is None else s["gradient_norm"] for s in steps]
    typical = sorted(norms[: SPIKE - 1])[(SPIKE - 1) // 2]
    guilty = next(s["step"] for s, n in zip(steps, norms, strict=True) if n > 100 * typical)
    assert guilty == SPIKE
    said = command("timeline", tmp_path / "spike", "--staging", tmp_path / "staging")
    assert f"the first far out of line is step {SPIKE};" in said

    command(
        "recover", tmp_path / "spike", "--step", guilty - 1,
        "--as-run", tmp_path / "healed", "--staging", tmp_path / "staging",
    )  # fmt: skip
    healed = train(tmp_path, "healed", "--skip", str(SPIKE))
    assert len(healed) == 31, "it goes on at the step that went wrong"
    assert max(healed) < 2 * before


@pytest.mark.slow
def test_the_timeline_says_when_no_step_stands_out(tmp_path: Path) -> None:
    def told(until: int) -> str:
        place = [str(tmp_path / "calm"), "--staging", str(tmp_path / "staging")]
        loss_spike.main([*place, "--spike-step", "1000", "--until", str(until)])
        return command("timeline", tmp_path / "calm", "--staging", tmp_path / "staging")

    assert "too few steps to tell whether one is far out of line: it takes 11" in told(10)
    calm = told(40)
    assert "no step is far out of line: no norm is over 50 times the median" in calm
    assert "the first far out of line" not in calm


@pytest.mark.parametrize(
    ("norms", "expected"),
    [
        ([1.0] * 30, None),
        ([1.0] * 9 + [1e9] + [1.0] * 9, None),
        ([1.0] * 12 + [49.0, 51.0, 1e9], 14),
        ([1.0] * 12 + [math.nan, 1.0], 13),
        ([0.0] * 20 + [1.0], None),
        ([1.0] * 3 + [math.nan] * 30, 4),
        ([math.inf, 1.0], 1),
    ],
)
def test_the_first_step_far_out_of_line(norms: list[float], expected: int | None) -> None:
    steps = [
        TimelineStep(i + 1, 0, 1.0, norm, 0.1, (0.1,), stepped=True, stored_bytes=8)
        for i, norm in enumerate(norms)
    ]
    found = first_outlier(steps)
    assert (found and found.step) == expected
