"""``lowdiff`` commands in this process, and a run to try them on."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from lowdiff.cli.app import main
from tests.unit.recovery.training import Trained, train


@dataclass(frozen=True)
class Result:
    """What a command left behind."""

    code: int
    out: str
    err: str

    @property
    def error(self) -> str:
        """The one line on stderr."""
        assert self.err.count("\n") == 1
        assert "Traceback" not in self.err
        return self.err.strip()


Command = Callable[..., Result]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Command:
    """Runs ``lowdiff ARGUMENTS`` in this process."""

    def run(*arguments: str | Path) -> Result:
        monkeypatch.setattr(sys, "argv", ["lowdiff", *map(str, arguments)])
        monkeypatch.setenv("COLUMNS", "200")
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        captured = capfd.readouterr()
        assert isinstance(ended.value.code, int)
        return Result(ended.value.code, captured.out, captured.err)

    return run


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Snapshots at 0, 5, 10 and 12; every step is kept."""
    return train(tmp_path_factory.mktemp("cli"), 12)


@pytest.fixture
def copy(trained: Trained, tmp_path: Path) -> Trained:
    return trained.copied(tmp_path)
