"""Processes that outlive their trainer: their handles are dropped as a matter of course."""

from __future__ import annotations

import gc
import os
import signal
import warnings
from pathlib import Path

import pytest

from lowdiff.persistence.files.detached_process import start_detached
from tests.unit.persistence.writers import settings_in

pytestmark = pytest.mark.new_processes


def test_to_drop_the_handle_of_one_that_runs_warns_of_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        unraisable: list[object] = []
        monkeypatch.setattr("sys.unraisablehook", unraisable.append)
        process = start_detached("http.server", settings_in(tmp_path), tmp_path / "log")
        pid = process.pid
        os.kill(pid, signal.SIGSTOP)  # whatever it is, it does not end by itself
        assert process.stdin is not None
        process.stdin.close()
        del process
        gc.collect()
        os.kill(pid, 0)  # it goes on
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        assert not unraisable


def test_nor_does_one_that_could_not_be_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unraisable: list[object] = []
    monkeypatch.setattr("sys.unraisablehook", unraisable.append)
    monkeypatch.setattr("sys.executable", str(tmp_path / "none"))
    with pytest.raises(FileNotFoundError):
        start_detached("http.server", settings_in(tmp_path), tmp_path / "log")
    gc.collect()
    assert not unraisable
