from __future__ import annotations

import logging
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
from hypothesis import HealthCheck, settings

from lowdiff import testing
from lowdiff.persistence.files import detached_process as detached
from lowdiff.persistence.files.detached_process import DetachedProcess
from tests.background import fork_processes
from tests.crash.pool import Pool

# How long an example takes says how busy the machine is, and nothing about lowdiff.
settings.register_profile(
    "whatever the machine", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("whatever the machine")

# `nohup make test &` starts with both ignored, which every process that a test starts would inherit.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture(scope="session", autouse=True)
def _forked_processes() -> None:
    """Fork writers and replicas, which saves most of what a test of a small training costs."""
    fork_processes()


@pytest.fixture(autouse=True)
def _new_processes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Start them as a user's training does in tests whose subject is the process."""
    if request.node.get_closest_marker("new_processes"):
        monkeypatch.setattr(detached, "DetachedProcess", DetachedProcess)


@pytest.fixture
def limits() -> Iterator[Callable[..., None]]:
    """Set internal limits until the test ends, as `lowdiff.testing.limits` does."""
    with ExitStack() as until_the_end:
        yield lambda **values: until_the_end.enter_context(testing.limits(**values))


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Three processes that run one life of a training after another."""
    made = Pool(3)
    yield made
    made.close()


@pytest.fixture(autouse=True)
def _no_test_silences_the_next() -> Iterator[None]:
    """The soak's and the peers' commands, which tests run in this process, are quiet ones."""
    logger = logging.getLogger("lowdiff")
    before = logger.level
    yield
    logger.setLevel(before)
