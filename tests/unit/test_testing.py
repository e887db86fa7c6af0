"""``lowdiff.testing``: a Checkpointer's end by SIGKILL in a process that goes on."""

from __future__ import annotations

import os
import re
import signal
import threading
from contextlib import suppress
from importlib import import_module
from pathlib import Path

import pytest

import lowdiff
from lowdiff import testing
from lowdiff.compressors import TopK
from lowdiff.errors import ConfigError, UsageError
from lowdiff.limits import PLACES
from lowdiff.persistence.format.values import same
from tests.processes import Script, is_alive
from tests.unit.loops import Loop, wait_until

STEPS = 8


def trained(folder: Path) -> Loop:
    """A run of `STEPS` steps, of which a batch is not full, and one more that is not committed."""
    loop = Loop(folder, settings={"batch_size": 4, "snapshot_every": 3})
    loop.attach()
    for number in range(STEPS):
        loop.step(number)
        loop.checkpointer.commit()
    testing.wait_until(loop.checkpointer, lambda stats: stats["durable_snapshot"] == 6)
    loop.step(STEPS)
    return loop


def killed(folder: str, kind: str) -> None:
    """A trainer that trains like `trained`, and then is killed with its writer, or alone."""
    loop = trained(Path(folder))
    if kind == "with its writer":
        os.kill(loop.checkpointer.stats()["writer_pid"], signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def files(folder: Path) -> set[str]:
    """Names of all files, but for the run id in the path of staging, and where segments begin.

    A writer that looks late finds more steps than a batch, and cuts its segments elsewhere.
    """
    names = {path.relative_to(folder) for path in folder.rglob("*") if path.is_file()}
    paths = {"/".join(p for p in name.parts if len(p) != 32) for name in names}
    return {re.sub(r"-s\d+\.seg$", ".seg", path) for path in paths}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["with its writer", "alone"])
def test_it_leaves_what_a_real_kill_leaves(tmp_path: Path, kind: str) -> None:
    real, ours = tmp_path / "real", tmp_path / "ours"
    dead = Script(killed, real, kind, output=tmp_path / "output.txt")
    assert dead.wait() == -signal.SIGKILL, dead.printed()
    loop = trained(ours)
    writer = loop.checkpointer.stats()["writer_pid"]
    testing.kill(loop.checkpointer, processes=kind == "with its writer")
    if kind == "alone":
        wait_until(lambda: not is_alive(writer))
        wait_until(lambda: lowdiff.recover(real / "run").step == STEPS)
        assert lowdiff.recover(ours / "run").step == STEPS
    assert not is_alive(writer)
    assert files(ours) == files(real)
    assert [Loop(folder).run(STEPS) for folder in (ours, real)] == [STEPS, STEPS]
    # The real one was trained by another process, whose kernels may round otherwise.
    whole = Loop(tmp_path / "whole")
    whole.run(STEPS)
    recovered = lowdiff.recover(ours / "run", STEPS)
    assert same(dict(recovered.model_state_dict()), whole.weights())


def test_nothing_is_flushed_and_nothing_of_it_is_left(tmp_path: Path) -> None:
    handler, before = signal.getsignal(signal.SIGTERM), set(threading.enumerate())
    loop = Loop(tmp_path, settings={"batch_size": 64})
    loop.attach()
    for number in range(3):
        loop.step(number)
        loop.checkpointer.commit()
    stats = loop.checkpointer.stats()
    assert stats["durable_step"] == 0
    testing.kill(loop.checkpointer)
    assert not is_alive(stats["writer_pid"])
    assert lowdiff.recover(tmp_path / "run").step == 0
    assert lowdiff.recover(tmp_path / "run", staging=tmp_path / "staging").step == 3
    left = set(threading.enumerate()) - before
    assert not [thread for thread in left if thread.name.startswith("lowdiff")]
    assert signal.getsignal(signal.SIGTERM) is handler
    loop.step(3)  # of a training without a checkpointer
    with pytest.raises(UsageError):
        loop.checkpointer.commit()
    assert loop.attach() == 3
    loop.checkpointer.close()


def test_a_replica_dies_too_and_its_memory_is_found(tmp_path: Path) -> None:
    loop = Loop(tmp_path, settings={"compressor": None})
    loop.attach()
    for number in range(3):
        loop.step(number)
        loop.checkpointer.commit()
    weights = loop.weights()
    stats = testing.wait_until(loop.checkpointer, lambda stats: stats["replica_step"] == 3)
    testing.kill(loop.checkpointer)
    assert not is_alive(stats["replica_pid"])
    again = Loop(tmp_path, settings={"compressor": None})
    assert again.attach() == 3
    assert same(again.weights(), weights)
    again.checkpointer.close()


def test_waiting_starts_a_dead_writer_again_and_has_an_end(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    loop.attach()
    os.kill(loop.checkpointer.stats()["writer_pid"], signal.SIGKILL)
    stats = testing.wait_until(loop.checkpointer, lambda stats: stats["writer_restarts"] == 1)
    assert is_alive(stats["writer_pid"])
    with pytest.raises(TimeoutError, match="'writer_restarts': 1"):
        testing.wait_until(loop.checkpointer, lambda _: False, seconds=0.01)
    loop.checkpointer.close()


def test_waiting_starts_a_replica_that_no_step_has_started(tmp_path: Path) -> None:
    loop = Loop(tmp_path, settings={"compressor": None})
    loop.attach()
    assert testing.wait_until(loop.checkpointer, lambda stats: stats["replica_step"] == 0)
    loop.checkpointer.close()


def test_what_is_not_attached_cannot_be_killed(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    with pytest.raises(UsageError):
        testing.kill(loop.checkpointer)
    with pytest.raises(UsageError):
        testing.wait_until(loop.checkpointer, lambda _: True)


@pytest.mark.parametrize("name", PLACES)
def test_each_limit_is_a_number_in_its_place_and_comes_back(name: str) -> None:
    module_name, _, constant = PLACES[name].rpartition(".")
    module = import_module(module_name)
    before = getattr(module, constant)
    assert isinstance(before, int | float)
    with suppress(ZeroDivisionError), testing.limits(**{name: -1}):
        assert getattr(module, constant) == -1
        raise ZeroDivisionError
    assert getattr(module, constant) == before


def test_an_unknown_limit_or_setting_is_an_error_that_lists_the_known_ones(tmp_path: Path) -> None:
    with (
        pytest.raises(ConfigError, match=r"drain_hours; there are abandon_seconds, .*retry_second"),
        testing.limits(drain_seconds=1.0, drain_hours=1.0),
    ):
        pass
    checkpointer = lowdiff.Checkpointer(tmp_path / "run", compressor=TopK(0.1))
    with pytest.raises(ConfigError, match=r"lock_hours; there are run, compressor, .*lock_seconds"):
        testing.adjust(checkpointer, lock_hours=1.0)


def test_parts_and_residual_are_those_of_an_attached_checkpointer(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    for part in (testing.parts_of, testing.residual_of):
        with pytest.raises(UsageError, match="call attach"):
            part(loop.checkpointer)
    loop.attach()
    loop.step(0)
    loop.checkpointer.commit()
    assert testing.parts_of(loop.checkpointer).session.step == 1
    residual = testing.residual_of(loop.checkpointer)
    names = {name for name, _ in loop.model.named_parameters()}
    assert residual.keys() <= names
    assert any(values.any() for values in residual.values())
    loop.checkpointer.close()
