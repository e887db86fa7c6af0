"""What a command cannot do, it says in one line, and before it replays anything."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from lowdiff.recovery import search
from lowdiff.recovery.inspect.timeline import Timeline, timeline
from tests.unit.cli.commands import Command, command, trained
from tests.unit.recovery.training import Trained

__all__ = ["command", "trained"]  # fixtures


@pytest.fixture
def no_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    def replay(*_: object) -> None:
        raise AssertionError("nothing was to be replayed")

    monkeypatch.setattr(search, "replay", replay)


# Names


@pytest.mark.parametrize("name", ["r[lr=0.1]", "r[/x]", "r:smile:", "[bold]r", "r\\"])
def test_the_name_of_a_run_is_printed_as_it_is(
    command: Command, trained: Trained, tmp_path: Path, name: str
) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).symlink_to(trained.run)
    result = command("inspect", tmp_path / name, "--staging", trained.staging)
    assert result.code == 0
    assert result.out.splitlines()[0].rstrip() == str(tmp_path / name)


# Outputs


@pytest.mark.parametrize("kind", ["--out", "--as-run"])
@pytest.mark.parametrize("place", ["file/below/x", "/proc/x"])
@pytest.mark.usefixtures("no_replay")
def test_recover_refuses_a_place_where_nothing_can_be_written(
    command: Command, trained: Trained, tmp_path: Path, kind: str, place: str
) -> None:
    (tmp_path / "file").touch()
    out = tmp_path / (place + ".pt" if kind == "--out" else place)
    result = command("recover", trained.run, kind, out, "--staging", trained.staging)
    assert (result.code, result.out) == (1, "")
    assert result.error.startswith(f"lowdiff: {out} could not be written: ")


@pytest.mark.parametrize(
    ("place", "code", "message"),
    [
        ("file/x.png", 1, "could not be written"),
        ("/proc/x.png", 1, "could not be written"),
        ("folder.png", 2, "is a folder"),
        ("x.pdf", 2, "does not end in .png"),
    ],
)
@pytest.mark.usefixtures("no_replay")
def test_timeline_refuses_a_picture_that_cannot_be_written(
    command: Command, trained: Trained, tmp_path: Path, place: str, code: int, message: str
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder.png").mkdir()
    out = tmp_path / place
    result = command("timeline", trained.run, "--out", out, "--staging", trained.staging)
    assert (result.code, result.out) == (code, "")
    assert result.error.startswith(f"lowdiff: {out} {message}")


@pytest.mark.usefixtures("no_replay")
def test_timeline_says_how_to_get_matplotlib_before_it_replays(
    command: Command, trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [n for n in sys.modules if n.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = command(
        "timeline", trained.run, "--out", tmp_path / "x.png", "--staging", trained.staging
    )
    assert (result.code, result.out) == (2, "")
    assert result.error.endswith("needs matplotlib: pip install matplotlib")


@pytest.mark.slow
def test_a_picture_that_fails_in_the_end_costs_no_numbers(
    command: Command, trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "x.png"

    def measure(*arguments: Any, **options: Any) -> Timeline:
        out.mkdir()  # somebody else makes it while the run is replayed
        return timeline(*arguments, **options)

    monkeypatch.setattr("lowdiff.recovery.inspect.timeline.timeline", measure)
    result = command("timeline", trained.run, "--json", "--out", out, "--staging", trained.staging)
    assert result.code == 1
    assert len(json.loads(result.out)["steps"]) == 12
    assert result.error.startswith(f"lowdiff: {out} could not be written: ")


def test_what_is_refused_leaves_no_trace(command: Command, tmp_path: Path) -> None:
    run = tmp_path / "no run"
    assert command("recover", run, "--out", tmp_path / "new/folder/x.pt").code == 1
    assert command("timeline", run, "--out", tmp_path / "new/x.png").code == 1
    assert not list(tmp_path.iterdir())
