"""Scripts of users, for a test module that names theirs as ``TRAINING``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.integrations.scripts import Scripts, scripts_of


@pytest.fixture(scope="module")
def scripts(request: pytest.FixtureRequest) -> Iterator[Scripts]:
    """The one that all tests of a module use."""
    with scripts_of(request.module.TRAINING) as made:
        yield made


@pytest.fixture(scope="module")
def whole(scripts: Scripts, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What each kind of script leaves that nobody kills, made once."""
    known: dict[str, list[Any]] = {}

    def find(name: str, ranks: int = 1) -> list[Any]:
        if name not in known:
            known[name] = scripts.finish(
                name, tmp_path_factory.mktemp("whole") / "run", ranks=ranks
            )
        return known[name]

    return find
