"""Whatever happens at whichever stop of a commit, training goes on, or ends by name, and nothing committed is lost."""

from __future__ import annotations

import os
import resource
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import lowdiff
from lowdiff import testing
from lowdiff.compressors import TopK
from lowdiff.errors import RunInUse, WriterFailed
from lowdiff.persistence.files.lease import Lease
from lowdiff.persistence.files.paths import RunFolder
from lowdiff.persistence.writer.handle import WriterProcess
from tests.crash.pool import Pool
from tests.crash.test_staging_removed import remove_tree
from tests.unit.loops import Loop, small_model, wait_until_lost

STRATEGIES: dict[str, dict[str, Any]] = {
    "log": {},
    "gradients": {"compressor": None, "strategy": "gradients"},
    "replica": {"compressor": None, "strategy": "replica"},
    "survivors": {"compressor": None, "strategy": "survivors"},
}
#: The stops of `Session._commit`, in its order.
STOPS = (
    "Session.keep_staging",
    "Session._agree",
    "Session._seal",
    "Staging.stage",
    "Session._advance",
    "Schedule.settle",
    "Staging.snapshot",
    "Meter.step_done",
    "Session._show",
)
#: A replica takes the regular snapshots itself.
PASSED = [
    (strategy, stop)
    for strategy in STRATEGIES
    for stop in STOPS
    if (strategy, stop) != ("replica", "Staging.snapshot")
]
#: A snapshot falls on it.
AT = 5
UNTIL = 12
PATIENCE_SECONDS = 20.0


@contextmanager
def at(stop: str, happens: Callable[[], None]) -> Iterator[list[str]]:
    """Have something happen where a function is entered for the first time; yields where it did."""
    seen: list[str] = []

    def called(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and not seen and frame.f_code.co_qualname == stop:
            seen.append(stop)
            happens()

    sys.setprofile(called)
    try:
        yield seen
    finally:
        sys.setprofile(None)


def begun(folder: Path, strategy: str) -> Loop:
    torch.manual_seed(0)
    loop = Loop(folder, settings=STRATEGIES[strategy])
    loop.attach()
    return loop


def step(loop: Loop, number: int) -> None:
    loop.step(number)
    loop.checkpointer.commit()


def weights_after(loop: Loop) -> list[torch.Tensor]:
    return [value.clone() for value in loop.model.state_dict().values()]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[list[torch.Tensor]]]:
    """The weights after every step of trainings that nothing happens to."""
    found = {}
    for strategy in STRATEGIES:
        loop = begun(tmp_path_factory.mktemp(strategy), strategy)
        found[strategy] = [weights_after(loop)]
        for number in range(UNTIL):
            step(loop, number)
            found[strategy].append(weights_after(loop))
        loop.checkpointer.close()
    return found


def writer_dies(loop: Loop) -> None:
    os.kill(loop.checkpointer.stats()["writer_pid"], signal.SIGKILL)


def staging_goes(loop: Loop) -> None:
    remove_tree(Path(loop.checkpointer.stats()["staging"]))


def disk_takes_nothing(loop: Loop) -> None:
    """For half a second no file of the writer's may grow."""
    pid = loop.checkpointer.stats()["writer_pid"]
    before = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, before[1]))
    threading.Timer(0.5, resource.prlimit, (pid, resource.RLIMIT_FSIZE, before)).start()


TROUBLES = {"writer": writer_dies, "staging": staging_goes, "disk": disk_takes_nothing}


@pytest.mark.cases(4)
@pytest.mark.parametrize("trouble", TROUBLES)
@pytest.mark.parametrize(("strategy", "stop"), PASSED)
def test_training_goes_on_and_every_step_of_it_comes_back(
    tmp_path: Path,
    expected: dict[str, list[list[torch.Tensor]]],
    strategy: str,
    stop: str,
    trouble: str,
) -> None:
    loop = begun(tmp_path, strategy)
    with testing.limits(process_check_seconds=0.02):
        for number in range(UNTIL):
            happens = TROUBLES[trouble] if number + 1 == AT else lambda _: None
            with at(stop, lambda happens=happens: happens(loop)) as seen:  # type: ignore[misc]
                step(loop, number)
            assert number + 1 != AT or seen
            same = zip(weights_after(loop), expected[strategy][number + 1], strict=True)
            assert all(torch.equal(own, other) for own, other in same)
        testing.wait_until(loop.checkpointer, lambda stats: not stats["writer_error"])
    loop.checkpointer.close()
    state = lowdiff.recover(tmp_path / "run", staging=tmp_path / "staging")
    assert state.step == UNTIL
    found = state.model_state_dict().values()
    assert all(map(torch.equal, found, expected[strategy][UNTIL]))


@pytest.mark.cases(1)
@pytest.mark.parametrize(("strategy", "stop"), PASSED)
def test_a_run_that_another_machine_took_ends_this_training_at_that_commit_or_the_next(
    tmp_path: Path, expected: dict[str, list[list[torch.Tensor]]], strategy: str, stop: str
) -> None:
    loop = begun(tmp_path, strategy)

    def is_taken() -> None:
        lease = Lease(RunFolder(tmp_path / "run").lease)
        # Of the same machine, so that it need not wait for the end of the other's lease.
        assert lease.acquire("process 8", timeout_seconds=PATIENCE_SECONDS)
        wait_until_lost(loop.checkpointer)

    for number in range(AT - 1):
        step(loop, number)
    with pytest.raises(RunInUse, match="process 8"):  # noqa: PT012 -- the one or the other
        with at(stop, is_taken):
            step(loop, AT - 1)
        step(loop, AT)
    loop.checkpointer.close()
    state = lowdiff.recover(tmp_path / "run", staging=tmp_path / "staging")
    assert state.step <= AT
    found = state.model_state_dict().values()
    assert all(map(torch.equal, found, expected[strategy][state.step]))


def with_trouble(rank: int, world_size: int, folder: str, settings: dict[str, Any]) -> int:
    """A pool's job: a writer is in trouble while commit 3 is sealed; in which commit that is raised."""
    torch.manual_seed(0)
    model = DistributedDataParallel(small_model())
    optimizer = torch.optim.AdamW(model.parameters())
    checkpointer = lowdiff.Checkpointer(
        f"{folder}/run", staging=f"{folder}/staging", on_error="raise", **settings
    )
    checkpointer.attach(model, optimizer)
    real = WriterProcess.read_status
    with pytest.MonkeyPatch.context() as patch:

        def begins() -> None:
            if rank == 0:
                patch.setattr(
                    WriterProcess, "read_status", lambda writer: real(writer).with_errors("no disk")
                )

        for number in range(1, 9):
            optimizer.zero_grad()
            model(torch.randn(4, 20)).square().mean().backward()
            optimizer.step()
            with at("Session._seal" if number == 3 else "", begins):
                try:
                    checkpointer.commit()
                except WriterFailed:
                    break
    testing.kill(checkpointer)
    return number


@pytest.mark.cases(1)
@pytest.mark.parametrize("settings", [{"compressor": TopK(0.1)}, {}], ids=["log", "replica"])
def test_trouble_is_raised_on_all_ranks_at_the_commit_after_it(
    tmp_path: Path, pool: Pool, settings: dict[str, Any]
) -> None:
    assert pool.run(with_trouble, 2, str(tmp_path), settings) == [4, 4]
