"""The command line, as a user types it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import lowdiff
from lowdiff.cli.app import main
from lowdiff.demo import report as demo_report
from lowdiff.errors import UsageError
from tests.unit.cli.commands import Command, Result, command

__all__ = ["command"]  # fixtures

ROOT = Path(__file__).parents[3]


def test_the_version_is_the_packages(command: Command) -> None:
    assert command("--version") == Result(0, f"lowdiff {lowdiff.__version__}\n", "")


def test_help_lists_the_commands(command: Command) -> None:
    result = command("--help")
    assert result.code == 0
    for name in ("demo", "inspect", "verify", "recover"):
        assert f"│ {name} " in result.out


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("demo", ["--out", "--steps", "--workers", "--seed"]),
        ("inspect", ["RUN", "--json", "--staging"]),
        ("verify", ["RUN", "--json", "--staging", "--workers"]),
        ("recover", ["RUN", "--step", "--out", "--force", "--staging", "--workers"]),
    ],
)
def test_help_teaches_by_examples(command: Command, name: str, options: list[str]) -> None:
    result = command(name, "--help")
    assert result.code == 0
    assert f"Examples: lowdiff {name}" in " ".join(result.out.split())
    for option in options:
        assert option in result.out
    assert result.out == command(name, "-h").out


def test_help_loads_nothing_that_takes_long() -> None:
    code = "import sys, lowdiff.cli.app; print({'torch', 'numpy', 'rich.live'} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True
    )
    assert done.stdout == "set()\n"


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["fly"],
        ["inspect"],
        ["inspect", "run", "--jsn"],
        ["recover", "run"],
        ["recover", "run", "--out", "x.pt", "--step", "-1"],
        ["recover", "run", "--out", "x.pt", "--step", "ten"],
        ["verify", "run", "--workers", "0"],
    ],
    ids=" ".join,
)
def test_bad_usage_exits_with_2(command: Command, arguments: list[str]) -> None:
    result = command(*arguments)
    assert result.code == 2
    assert "Usage: lowdiff" in result.out + result.err or "give one of --out" in result.error


@pytest.mark.parametrize("name", ["inspect", "verify", "recover"])
def test_a_folder_that_is_no_run_is_named_in_one_line(
    command: Command, tmp_path: Path, name: str
) -> None:
    out = ["--out", tmp_path / "x.pt"] if name == "recover" else []
    result = command(name, tmp_path, *out)
    assert (result.code, result.out) == (1, "")
    assert result.error.startswith(f"lowdiff: {tmp_path} is not a lowdiff run")


def test_an_error_of_the_system_is_one_line_too(command: Command) -> None:
    result = command("inspect", "x" * 5000)
    assert result.code == 1
    assert result.error.startswith("lowdiff: ")


def test_demo_hands_its_options_over_and_its_verdict_back(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[object] = []

    def run(output: Path, **options: object) -> int:
        seen.extend([output, options])
        return 1

    monkeypatch.setattr(demo_report, "main", run)
    assert command("demo", "--out", "d", "--steps", 20, "--workers", 3, "--seed", 5).code == 1
    assert seen == [Path("d"), {"steps": 20, "world_size": 3, "seed": 5}]
    command("demo")
    assert seen[2:] == [Path("demo-output"), {"steps": 60, "world_size": 2, "seed": None}]


def test_demo_refuses_settings_that_cannot_work(command: Command, tmp_path: Path) -> None:
    result = command("demo", "--out", tmp_path / "d", "--steps", 1)
    assert result.code == 2
    assert "at least 10 steps" in result.error


def test_our_own_mistakes_keep_their_traceback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def run(*_: object, **__: object) -> int:
        raise ZeroDivisionError

    monkeypatch.setattr(demo_report, "main", run)
    monkeypatch.setattr(sys, "argv", ["lowdiff", "demo"])
    with pytest.raises(ZeroDivisionError):
        main()


def test_every_error_of_lowdiff_is_one_line(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*_: object, **__: object) -> int:
        raise UsageError("called too early")

    monkeypatch.setattr(demo_report, "main", run)
    assert command("demo") == Result(1, "", "lowdiff: called too early\n")
