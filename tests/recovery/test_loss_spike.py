"""The story of docs/recovery.md, told by the example it uses and the commands it shows."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from examples import loss_spike
from lowdiff.cli import app

SPIKE = 120


def command(*arguments: Any) -> str:
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    assert result.exit_code == 0, result.output
    return result.stdout


def train(tmp_path: Path, run: str, *more: str) -> list[float]:
    return loss_spike.main(
        [
            *("--run", str(tmp_path / run), "--staging", str(tmp_path / "staging")),
            *("--spike-step", str(SPIKE), "--until", str(SPIKE + 30), *more),
        ]
    )


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

    command(
        "recover", tmp_path / "spike", "--step", guilty - 1,
        "--as-run", tmp_path / "healed", "--staging", tmp_path / "staging",
    )  # fmt: skip
    healed = train(tmp_path, "healed", "--skip", str(SPIKE))
    assert len(healed) == 31, "it goes on at the step that went wrong"
    assert max(healed) < 2 * before
