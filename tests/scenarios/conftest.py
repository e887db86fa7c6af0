from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.scenarios.pool import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    made = Pool(3)
    yield made
    made.close()
