from __future__ import annotations

import logging
import os
import re
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

from benches import ending
from lowdiff import testing
from lowdiff.persistence.files import detached_process as detached
from lowdiff.persistence.files.detached_process import DetachedProcess
from tests.background import fork_processes
from tests.crash.lives import as_from_an_accelerator
from tests.crash.pool import Pool

# Before anything loads a kernel: without a device they are interpreted.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
# How long an example takes says how busy the machine is, and nothing about lowdiff.
for profile, examples in (("quick", 20), ("thorough", 150)):
    settings.register_profile(
        profile,
        max_examples=examples,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
settings.load_profile("quick")
#: Of a file whose tests are all slow.
_ALL_SLOW = re.compile(r"^pytestmark = .*pytest\.mark\.slow\b", re.MULTILINE)


def pytest_configure(config: pytest.Config) -> None:
    """Let no process of a test outlive this one, however it ends.

    ``nohup make test &`` ignores SIGINT and SIGHUP, and so would every process that a test starts. A handler that does
    nothing ignores as well, and ends with ``exec``. A process that only starts workers leaves them as they are.
    """
    ending.leave_nothing()
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
            signal.signal(signal.SIGHUP, lambda *_: None)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not even import a file whose tests are all slow, where none of these runs."""
    chosen = config.option.markexpr.split(" and ")
    is_left_out = "not slow" in chosen and collection_path.suffix == ".py"
    if is_left_out and _ALL_SLOW.search(collection_path.read_text(encoding="utf-8")):
        return True
    return None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Divide the cases of a test: ``cases(n)`` leaves all but the first n to `make test-all`.

    Of the slow ones ``turns(k)`` leaves all but every k-th to `make soak`; those of an engine take turns by themselves,
    other ones than those of the other engine.
    """
    quick: Counter[str] = Counter()
    slow: Counter[tuple[str, str]] = Counter()
    for item in items:
        name = item.nodeid.partition("[")[0]
        if (marker := item.get_closest_marker("cases")) and not item.get_closest_marker("slow"):
            quick[name] += 1
            if quick[name] > marker.args[0]:
                item.add_marker(pytest.mark.slow)
        is_slow = item.get_closest_marker("slow") and not item.get_closest_marker("campaign")
        if (marker := item.get_closest_marker("turns")) and is_slow:
            assert isinstance(item, pytest.Function)
            turn = name, str(item.callspec.params.get("engine"))
            if (slow[turn] + turn[1].startswith("late")) % marker.args[0]:
                item.add_marker(pytest.mark.campaign)
            slow[turn] += 1


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


@pytest.fixture(params=["host", pytest.param("late", marks=pytest.mark.slow)])
def engine(request: pytest.FixtureRequest, pool: Pool) -> Iterator[str]:
    """How what a step leaves reaches staging in all that the pool runs: at once, or late as from an accelerator."""
    engine: str = request.param
    with pool.within(as_from_an_accelerator) if engine == "late" else nullcontext():
        yield engine


@pytest.fixture(autouse=True)
def _no_test_silences_the_next() -> Iterator[None]:
    """The soak's and the peers' commands, which tests run in this process, are quiet ones."""
    logger = logging.getLogger("lowdiff")
    before = logger.level
    yield
    logger.setLevel(before)
