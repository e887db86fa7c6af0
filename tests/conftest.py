from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import settings

from tests.scenarios.pool import Pool

# How long an example takes says nothing where others use the machine as well.
settings.register_profile("lowdiff", deadline=None)
settings.load_profile("lowdiff")


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Three processes that run one life of a training after another."""
    made = Pool(3)
    yield made
    made.close()
