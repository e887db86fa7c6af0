from __future__ import annotations

import io

import pytest
from rich.console import Console

from lowdiff.demo.progress import LifeProgress


def shown(*, terminal: bool) -> str:
    file = io.StringIO()
    console = Console(file=file, width=100, force_terminal=terminal, color_system=None)
    with LifeProgress(console, steps=12) as progress:
        progress.begin("resumed")
        progress.attached(4)
        for step in range(5, 13):
            progress.step(step, loss=step / 8)
        progress.end("done")
    return file.getvalue()


@pytest.mark.parametrize("terminal", [True, False])
def test_name_place_and_outcome_are_shown(terminal: bool) -> None:
    text = shown(terminal=terminal)
    assert "resumed" in text
    assert "12" in text
    assert "done" in text


def test_without_a_terminal_there_are_plain_lines_and_no_control_codes() -> None:
    text = shown(terminal=False)
    assert "\x1b" not in text
    assert "resumed: resumed from step 4" in text
    assert "resumed: step 6 of 12, loss 0.750" in text
    assert "step 7" not in text
