"""Steps that are on their way from an accelerator when their commit returns: when they count, and what a kill takes.

Copies arrive late here by `testing.late_copies`; those of an accelerator differ in how long they take. A kill in this
process is `testing.kill`, after which nothing more of what was on its way is staged.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import lowdiff
from lowdiff import testing
from lowdiff.commit.images import Images
from lowdiff.errors import StorageError, UsageError
from lowdiff.persistence.format.values import same
from lowdiff.protect.log.queue import LogQueue
from tests.crash.lives import as_from_an_accelerator
from tests.unit.loops import Loop, fail_once, small_model, wait_until

#: Longer than all else in a step, by far.
SECONDS = 0.4
#: Steps that may be on their way.
MOST = 2


@pytest.fixture(autouse=True)
def _late() -> Iterator[None]:
    with ExitStack() as late:
        late.enter_context(as_from_an_accelerator(0))
        late.enter_context(testing.late_copies(least_seconds=SECONDS, most_seconds=SECONDS))
        yield


@pytest.fixture
def one_rank() -> Iterator[None]:
    """A process group of one: only behind an exchange can a gradient be changed unseen."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def attached(folder: Path, **settings: object) -> Loop:
    loop = Loop(folder, settings={"snapshot_every": 1000, **settings})
    loop.attach()
    return loop


def trained(loop: Loop, *numbers: int) -> None:
    for number in numbers:
        loop.step(number)
        loop.checkpointer.commit()


def recovered(folder: Path) -> int:
    return lowdiff.recover(folder / "run", staging=folder / "staging").step


def test_a_step_counts_once_it_is_staged_and_two_may_be_on_their_way(tmp_path: Path) -> None:
    loop = attached(tmp_path)
    trained(loop, 0, 1)
    stats = loop.checkpointer.stats()
    assert (stats["pending_steps"], stats["committed_step"]) == (MOST, 0)
    trained(loop, 2)
    stats = loop.checkpointer.stats()
    assert stats["committed_step"] == 3 - stats["pending_steps"] >= 1
    loop.die()
    assert recovered(tmp_path) == stats["committed_step"]


def test_of_large_gradients_one_step_at_a_time_is_on_its_way(tmp_path: Path) -> None:
    with testing.limits(late_gradient_bytes=1):
        loop = attached(tmp_path, compressor=None, strategy="gradients")
    for number in range(3):
        loop.step(number)
        # What this step's gradients took on the device is not there beside those of the one before.
        assert loop.checkpointer.stats()["pending_steps"] == 0
        loop.checkpointer.commit()
        assert loop.checkpointer.stats()["pending_steps"] == 1
    loop.checkpointer.close()
    assert recovered(tmp_path) == 3


def test_a_step_that_has_arrived_is_staged_without_another_call(tmp_path: Path) -> None:
    loop = attached(tmp_path)
    trained(loop, 0, 1)
    wait_until(lambda: loop.checkpointer.stats()["committed_step"] == 2)
    weights = loop.weights()
    loop.die()
    state = lowdiff.recover(tmp_path / "run", staging=tmp_path / "staging")
    assert state.step == 2
    assert same(dict(state.model_state_dict()), weights)


def test_a_commit_that_finds_no_thread_says_so_and_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = attached(tmp_path)
    loop.step(0)
    start = threading.Thread.start

    def refused(thread: threading.Thread) -> None:
        if thread.name == "lowdiff-staging":
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refused)
        with pytest.raises(StorageError, match="limit of processes"):
            loop.checkpointer.commit()
    loop.checkpointer.commit()
    trained(loop, 1, 2)
    loop.settle()
    loop.die()
    assert recovered(tmp_path) == 3


def test_what_a_kill_takes_is_made_again_to_the_same_bits(tmp_path: Path) -> None:
    whole = attached(tmp_path / "whole")
    trained(whole, *range(7))
    whole.checkpointer.close()
    killed = attached(tmp_path)
    trained(killed, *range(4))
    committed = killed.checkpointer.stats()["committed_step"]
    killed.die()
    again = Loop(tmp_path, settings={"snapshot_every": 1000})
    begun = again.attach()
    assert committed <= begun <= 4
    trained(again, *range(begun, 7))
    assert same(again.weights(), whole.weights())
    again.checkpointer.close()


def ends(loop: Loop) -> None:
    for number in loop.checkpointer.steps(4):
        loop.step(number)


def pins(loop: Loop) -> None:
    trained(loop, *range(4))
    assert loop.checkpointer.keep(4) == 4


def closes(loop: Loop) -> None:
    trained(loop, *range(4))
    loop.checkpointer.close()


def fails(loop: Loop) -> None:
    trained(loop, *range(4))
    with suppress(KeyError), loop.checkpointer:
        raise KeyError


def detaches(loop: Loop) -> None:
    trained(loop, *range(4))
    loop.checkpointer.detach()


def is_attached_again(loop: Loop) -> None:
    trained(loop, *range(4))
    again = Loop(loop.folder, settings={"snapshot_every": 1000})
    assert again.attach() == 4
    again.die()


def is_interrupted(loop: Loop) -> None:
    with suppress(KeyboardInterrupt), loop.checkpointer:
        for number in loop.checkpointer.steps(10):
            if number == 4:
                raise KeyboardInterrupt
            loop.step(number)


def takes_a_snapshot(loop: Loop) -> None:
    trained(loop, *range(4))
    testing.parts_of(loop.checkpointer).session.snapshot(required=True)


@pytest.mark.parametrize(
    "act",
    [
        *(ends, pins, closes, fails, detaches, is_attached_again, is_interrupted),
        takes_a_snapshot,
    ],
    ids=lambda act: act.__name__,
)
def test_whoever_relies_on_a_step_waits_for_it(tmp_path: Path, act: Callable[[Loop], None]) -> None:
    """Killed right behind it, all four steps are there."""
    loop = attached(tmp_path)
    act(loop)
    with suppress(lowdiff.LowDiffError):  # some have let go of it
        loop.die()
    assert recovered(tmp_path) == 4


def breaks(loop: Loop) -> None:
    for number in loop.checkpointer.steps(10):
        if number == 4:
            break
        loop.step(number)


def is_preempted(loop: Loop) -> None:
    trained(loop, 0, 1, 2)
    os.kill(os.getpid(), signal.SIGUSR1)
    wait_until(lambda: loop.checkpointer.stats()["preempted"])
    trained(loop, 3)


@pytest.mark.parametrize("act", [breaks, is_preempted], ids=lambda act: act.__name__)
def test_a_loop_that_is_left_needs_no_call_for_its_last_steps(
    tmp_path: Path, act: Callable[[Loop], None]
) -> None:
    loop = attached(tmp_path)
    act(loop)
    wait_until(lambda: loop.checkpointer.stats()["pending_steps"] == 0)
    loop.die()
    assert recovered(tmp_path) == 4


def test_a_commit_that_is_refused_loses_no_step_before_it(tmp_path: Path) -> None:
    loop = attached(tmp_path)
    trained(loop, 0, 1)
    loop.step(2)
    weight = loop.model.get_parameter("0.weight")
    loop.model.get_submodule("0").weight = torch.nn.Parameter(weight.detach())
    with pytest.raises(UsageError, match="is not the parameter"):
        loop.checkpointer.close()
    assert recovered(tmp_path) == 2


def in_ddp(folder: Path) -> Loop:
    loop = Loop(folder, DistributedDataParallel(small_model()), settings={"snapshot_every": 1000})
    loop.attach()
    return loop


def of_module(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name.removeprefix("module."): value for name, value in weights.items()}


def changes_gradients(loop: Loop) -> None:
    """Change gradients in a way that no clip has, behind what the hook saw."""
    step = loop.optimizer.step

    def changed() -> None:
        for group in loop.optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad.add_(0.01)
        step()

    loop.optimizer.step = changed  # type: ignore[method-assign, assignment]


@pytest.mark.usefixtures("one_rank")
def test_a_step_that_turns_out_not_to_replay_counts_once_a_snapshot_holds_it(
    tmp_path: Path,
) -> None:
    loop = in_ddp(tmp_path)
    trained(loop, 0, 1)
    changes_gradients(loop)
    trained(loop, 2)
    wait_until(lambda: loop.checkpointer.stats()["pending_steps"] == 0)
    assert loop.checkpointer.stats()["committed_step"] == 2
    trained(loop, 3)
    assert loop.checkpointer.stats()["snapshot_step"] == 4
    trained(loop, *range(4, 9))
    committed, weights = loop.checkpointer.stats()["committed_step"], loop.weights()
    wait_until(lambda: loop.checkpointer.stats()["pending_steps"] == 0)
    assert committed >= 5
    loop.die()
    state = lowdiff.recover(tmp_path / "run", staging=tmp_path / "staging")
    assert state.step == 9
    assert same(dict(state.model_state_dict()), of_module(weights))


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("act", [ends, closes, pins], ids=lambda act: act.__name__)
def test_the_last_step_comes_back_though_it_does_not_replay(
    tmp_path: Path, act: Callable[[Loop], None]
) -> None:
    loop = in_ddp(tmp_path)
    changes_gradients(loop)
    act(loop)
    weights = loop.weights()
    with suppress(lowdiff.LowDiffError):
        loop.die()
    state = lowdiff.recover(tmp_path / "run", staging=tmp_path / "staging")
    assert state.step == 4
    assert same(dict(state.model_state_dict()), of_module(weights))


@pytest.mark.usefixtures("one_rank")
def test_a_kill_before_that_snapshot_goes_back_to_what_was_committed(tmp_path: Path) -> None:
    loop = in_ddp(tmp_path)
    trained(loop, 0, 1)
    changes_gradients(loop)
    trained(loop, 2)
    wait_until(lambda: loop.checkpointer.stats()["pending_steps"] == 0)
    committed = loop.checkpointer.stats()["committed_step"]
    loop.die()
    assert recovered(tmp_path) == committed == 2


def test_what_staging_meets_is_raised_by_a_later_commit_and_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = attached(tmp_path)
    tried = fail_once(monkeypatch, LogQueue, "stage", StorageError("no memory"))
    trained(loop, 0)
    wait_until(lambda: tried)
    loop.step(1)
    with pytest.raises(StorageError, match="no memory"):
        loop.checkpointer.commit()
    loop.checkpointer.commit()
    weights = loop.weights()
    loop.checkpointer.close()
    state = lowdiff.recover(tmp_path / "run", staging=tmp_path / "staging")
    assert state.step == 2
    assert same(dict(state.model_state_dict()), weights)


@pytest.mark.parametrize("strategy", ["log", "survivors"])
def test_a_snapshot_holds_its_step_though_training_went_on(tmp_path: Path, strategy: str) -> None:
    """It counts once it is written."""
    compressor = {} if strategy == "log" else {"compressor": None}
    loop = attached(tmp_path, strategy=strategy, snapshot_every=2, **compressor)
    trained(loop, 0, 1)
    weights = loop.weights()
    assert loop.checkpointer.stats()["snapshot_step"] == 0
    trained(loop, 2)
    wait_until(lambda: loop.checkpointer.stats()["snapshot_step"] == 2)
    testing.wait_until(loop.checkpointer, lambda stats: stats["durable_step"] >= 2)
    loop.die()
    state = lowdiff.recover(tmp_path / "run", step=2)
    assert same(dict(state.model_state_dict()), weights)


def test_a_snapshot_that_is_not_here_when_its_process_ends_is_none(tmp_path: Path) -> None:
    loop = attached(tmp_path, strategy="survivors", snapshot_every=2, compressor=None)
    first = loop.weights()
    trained(loop, 0, 1)
    loop.die()
    state = lowdiff.recover(tmp_path / "run", staging=tmp_path / "staging")
    assert state.step == 0
    assert same(dict(state.model_state_dict()), first)


def test_a_snapshot_that_finds_no_memory_is_owed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    loop = attached(tmp_path, strategy="survivors", snapshot_every=2, compressor=None)
    tried = fail_once(monkeypatch, Images, "write", StorageError("no memory"))
    trained(loop, 0, 1)
    wait_until(lambda: tried)
    trained(loop, 2, 3)
    assert "no full snapshot now: no memory" in caplog.text
    wait_until(lambda: loop.checkpointer.stats()["snapshot_step"] >= 3)
    loop.checkpointer.close()
    assert recovered(tmp_path) == 4


def test_a_snapshot_on_its_way_does_not_wait_for_a_step_that_nobody_stages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its error comes out, or it is tried again in time; training goes on."""
    fail_once(monkeypatch, LogQueue, "stage", StorageError("no memory"))
    loop = attached(tmp_path, snapshot_every=1)
    errors = 0
    for number in range(5):
        loop.step(number)
        for _ in range(2):
            try:
                loop.checkpointer.commit()
                break
            except StorageError:
                errors += 1
    assert errors <= 1
    weights = loop.weights()
    loop.checkpointer.close()
    state = lowdiff.recover(tmp_path / "run")
    assert state.step == 5
    assert same(dict(state.model_state_dict()), weights)


def test_snapshots_soon_after_staging_was_renewed_do_not_stop_training(tmp_path: Path) -> None:
    loop = attached(tmp_path, snapshot_every=4)
    trained(loop, 0, 1)
    testing.parts_of(loop.checkpointer).staging.folder.remove()
    trained(loop, *range(2, 8))
    loop.checkpointer.close()
    assert recovered(tmp_path) == 8


def test_who_leaves_while_storage_hangs_is_let_go(tmp_path: Path) -> None:
    """The thread that waits for storage holds no lock meanwhile."""
    loop = attached(tmp_path, batch_size=1)
    trained(loop, 0)
    loop.settle()
    writer = loop.checkpointer.stats()["writer_pid"]
    os.kill(writer, signal.SIGSTOP)
    try:
        trained(loop, 1, 2)
        began = time.monotonic()
        with testing.limits(abandon_seconds=0.5), suppress(KeyError), loop.checkpointer:
            time.sleep(2 * SECONDS)  # by now it waits for step 1 to be durable
            raise KeyError
        assert time.monotonic() - began < 12
    finally:
        with suppress(ProcessLookupError):
            os.kill(writer, signal.SIGCONT)


def test_steps_on_their_way_when_staging_is_removed_cost_a_snapshot(tmp_path: Path) -> None:
    loop = attached(tmp_path)
    trained(loop, 0, 1)
    testing.parts_of(loop.checkpointer).staging.folder.remove()
    trained(loop, 2, 3)
    assert loop.checkpointer.stats()["snapshot_step"] >= 3
    weights = loop.weights()
    loop.checkpointer.close()
    state = lowdiff.recover(tmp_path / "run", staging=tmp_path / "staging")
    assert state.step == 4
    assert same(dict(state.model_state_dict()), weights)


def test_a_fork_stages_nothing_of_what_is_on_its_way(tmp_path: Path) -> None:
    loop = attached(tmp_path)
    trained(loop, 0, 1)
    child = os.fork()
    if child == 0:
        loop.checkpointer.close()
        os._exit(0)
    os.waitpid(child, 0)
    trained(loop, 2)
    loop.checkpointer.close()
    assert recovered(tmp_path) == 3


def test_a_copy_of_a_residual_that_is_not_here_yet_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed between the two, the step before counts, with its own."""
    killed = attached(tmp_path)
    trained(killed, 0, 1)
    wait_until(lambda: killed.checkpointer.stats()["pending_steps"] == 0)
    with monkeypatch.context() as patch:
        arrived: list[object] = []

        def comes_to_no_end(queue: LogQueue, handed: object) -> object:
            arrived.append(handed)
            raise StorageError("no memory")

        patch.setattr(LogQueue, "stage", comes_to_no_end)
        trained(killed, 2)
        wait_until(lambda: arrived)
        killed.die()
    whole = attached(tmp_path / "whole")
    trained(whole, *range(4))
    whole.checkpointer.close()
    again = Loop(tmp_path, settings={"snapshot_every": 1000})
    assert again.attach() == 2
    trained(again, 2, 3)
    assert same(again.weights(), whole.weights())
    again.checkpointer.close()
