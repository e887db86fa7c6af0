"""Common parts of the benches."""

from __future__ import annotations

import os

import pytest

from benches.harness import arguments


def test_processes_of_a_bench_keep_compiled_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    arguments("A bench.")
    assert "PYTHONDONTWRITEBYTECODE" not in os.environ
