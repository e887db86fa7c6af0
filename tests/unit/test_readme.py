"""README tells the truth: its script runs, is killed and goes on as its transcript shows; its table is of today's strategies."""

from __future__ import annotations

import re
import runpy
from contextlib import redirect_stdout
from inspect import signature
from io import StringIO
from pathlib import Path

import pytest

import lowdiff
from docs import make_strategies, make_transcript
from lowdiff.types import STRATEGIES

#: README's own script, of which this test takes a fifth.
STEPS = {"until=2000": "until=400", "% 400 == 399": "% 80 == 79"}
_LOSS = re.compile(r"step (\d+): loss (\S+)")


def masked(text: str) -> list[str]:
    """What is shown, without numbers; of lines that then look alike one stays."""
    lines = [re.sub(r"\d+(\.\d+)?", "N", " ".join(line.split())) for line in text.splitlines()]
    return [line for line, before in zip(lines, ["", *lines], strict=False) if line != before]


@pytest.mark.launch
@pytest.mark.timeout(300)
def test_what_the_transcript_shows_is_what_happens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = make_transcript.script()
    for old, new in STEPS.items():
        assert old in script
        script = script.replace(old, new)
    (tmp_path / "train.py").write_text(script)
    seen = make_transcript.transcript(tmp_path, 350)
    assert masked(seen) == masked(make_transcript.shown())
    assert (tmp_path / "earlier.pt").stat().st_size > 1000
    losses: dict[str, set[str]] = {}
    for step, loss in _LOSS.findall(seen):
        losses.setdefault(step, set()).add(loss)
    # The run that nobody killed, of another folder.
    (tmp_path / "whole").mkdir()
    monkeypatch.chdir(tmp_path / "whole")
    with redirect_stdout(StringIO()) as printed:
        runpy.run_path(str(tmp_path / "train.py"))
    assert losses == {step: {loss} for step, loss in _LOSS.findall(printed.getvalue())}
    begun = [int(step) for step in re.findall(r"begins at step (\d+)", seen)]
    last = int(_LOSS.findall(seen.partition("$ kill")[0])[-1][0])
    assert begun[0] == 0
    assert begun[1] >= last - 1, "the step was printed before it ended"


def test_its_tables_and_pictures_are_those_of_the_strategies(tmp_path: Path) -> None:
    for path, table in make_strategies.tables().items():
        assert make_strategies.written(path.read_text(), table) == path.read_text(), (
            "run python docs/make_strategies.py"
        )
    for theme, path in make_strategies.PICTURES.items():
        make_strategies.draw(tmp_path / path.name, theme)
        assert path.read_text() == (tmp_path / path.name).read_text()


def test_a_strategy_is_one_row_and_one_lane(tmp_path: Path) -> None:
    strategies = make_strategies.STRATEGIES
    assert [s.name for s in strategies] == [*STRATEGIES]
    more = [*strategies, strategies[1]]
    assert len(make_strategies.readme_rows(more).splitlines()) == 2 + len(more)
    lanes, more_lanes = tmp_path / "lanes.svg", tmp_path / "more.svg"
    make_strategies.draw(lanes, "light")
    make_strategies.draw(more_lanes, "light", more)
    assert height(more_lanes) > height(lanes)


def height(path: Path) -> float:
    found = re.search(r'viewBox="0 0 \S+ (\S+)"', path.read_text())
    assert found is not None
    return float(found[1])


def test_what_a_failure_costs_follows_from_the_defaults() -> None:
    settings = signature(lowdiff.Checkpointer).parameters
    batch, every = settings["batch_size"].default, settings["snapshot_every"].default
    assert make_strategies.SNAPSHOTS[1] - make_strategies.SNAPSHOTS[0] == every
    assert make_strategies.AT_RISK == 2 * batch
    power = make_strategies.FAILURES.index("power")
    for strategy in make_strategies.STRATEGIES:
        # Two batches, or two images, are on their way to the disk.
        assert strategy.lost[power] == 2 * (batch if strategy.is_logged else every)
