from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.scenarios.pool import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Three processes that run one life of a training after another."""
    made = Pool(3)
    yield made
    made.close()
