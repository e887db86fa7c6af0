"""Runs that several files of tests look at, or copy and damage."""

from __future__ import annotations

import pytest

from tests.unit.recovery.training import Trained, train


@pytest.fixture(scope="session")
def closed(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Twelve steps, snapshots 0, 5, 10 and 12, nothing in staging."""
    return train(tmp_path_factory.mktemp("closed"), 12)


@pytest.fixture(scope="session")
def crashed(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Nine steps, snapshots 0 and 5; all records are both in segments and in staging."""
    return train(tmp_path_factory.mktemp("crashed"), 9, end="crash")
