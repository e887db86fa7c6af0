"""A full snapshot that is removed or damaged in memory before it is durable costs another one, and no standstill."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lowdiff import testing
from lowdiff.persistence.files.paths import StagingFolder
from lowdiff.persistence.format.values import same
from lowdiff.persistence.staging.status import ReplicaStatus, read_status
from lowdiff.persistence.writer.images import is_free
from tests.unit.loops import PATIENCE_SECONDS, Loop, wait_until

_STRATEGIES: dict[str, dict[str, Any]] = {
    "log": {},
    "replica": {"compressor": None},
    "survivors": {"compressor": None, "strategy": "survivors"},
}


def flip(image: Path) -> None:
    """Change one byte, behind the header."""
    with image.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last ^ 1]))


def with_stopped_writer(folder: Path, **settings: Any) -> tuple[Loop, StagingFolder]:
    """A loop that has just committed a step with a full snapshot, which its writer does not see yet."""
    loop = Loop(folder, settings={"batch_size": 64, **settings})
    loop.attach()
    for number in range(5):
        if number == 4:
            os.kill(loop.checkpointer.stats()["writer_pid"], signal.SIGSTOP)
        loop.step(number)
        loop.checkpointer.commit()
    return loop, testing.parts_of(loop.checkpointer).staging.folder


@pytest.mark.slow
@pytest.mark.parametrize("damage", [Path.unlink, flip])
@pytest.mark.parametrize("on_error", ["warn", "raise"])
@pytest.mark.parametrize("strategy", _STRATEGIES)
def test_training_goes_on_with_another_one(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    strategy: str,
    on_error: str,
    damage: Callable[[Path], None],
) -> None:
    settings = {**_STRATEGIES[strategy], "on_error": on_error}
    loop, folder = with_stopped_writer(tmp_path, **settings)
    replica_pid = loop.checkpointer.stats().get("replica_pid")
    if strategy == "replica":
        wait_until(lambda: read_status(folder.replica_status, ReplicaStatus).image is not None)
        damage(folder.replica_image)
    else:
        damage(folder.snapshot)
    os.kill(loop.checkpointer.stats()["writer_pid"], signal.SIGCONT)
    number, deadline = 5, time.monotonic() + PATIENCE_SECONDS
    while loop.checkpointer.stats()["durable_snapshot"] < 10:
        assert time.monotonic() < deadline
        loop.step(number)
        loop.checkpointer.commit()
        number += 1
        time.sleep(0.02)
    assert caplog.text.count("removed or damaged") == 1
    # The replica has the state itself, and goes on.
    assert loop.checkpointer.stats().get("replica_pid") == replica_pid
    loop.die()
    resumed = Loop(tmp_path, settings=_STRATEGIES[strategy])
    begun = resumed.attach()
    assert begun >= 10
    if strategy != "survivors":  # a single rank that dies has none, and goes back
        assert begun == number
        assert same(resumed.weights(), loop.weights())
    resumed.checkpointer.close()


def test_a_writer_whose_trainer_died_gives_it_up_and_ends(tmp_path: Path) -> None:
    loop, folder = with_stopped_writer(tmp_path)
    writer_pid = loop.checkpointer.stats()["writer_pid"]
    folder.snapshot.unlink()
    testing.kill(loop.checkpointer, processes=False)
    os.kill(writer_pid, signal.SIGCONT)
    wait_until(lambda: is_free(folder.writer_lock))
    resumed = Loop(tmp_path)
    assert resumed.attach() == 5  # of which the log has every step
    assert same(resumed.weights(), loop.weights())
    resumed.checkpointer.close()
