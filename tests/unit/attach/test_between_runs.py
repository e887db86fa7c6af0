"""What users change between runs is accepted, said, and recoverable afterwards."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import lowdiff
from lowdiff import testing
from lowdiff.compressors import TopK
from lowdiff.errors import ConfigError, StepNotFound, StorageError, UsageError
from lowdiff.persistence.files.lease import Lease
from lowdiff.persistence.files.locks import FileLock
from lowdiff.persistence.files.paths import RunFolder
from lowdiff.persistence.format.values import same
from lowdiff.recovery.compare import differences
from lowdiff.recovery.inspect.verify import verify
from tests.crash.lives import Kill, assert_identical, history
from tests.crash.pool import Pool
from tests.crash.trainings import TRAININGS
from tests.unit.loops import Loop, small_model, wait_until_lost


def test_another_density_starts_with_a_snapshot_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Loop(tmp_path).run(7)
    other = Loop(tmp_path, settings={"compressor": TopK(0.5), "snapshot_every": 1000})
    with caplog.at_level(logging.INFO):
        assert other.attach() == 7
    assert "compressor {'name': 'topk', 'settings': {'density': 0.5" in caplog.text
    assert (tmp_path / "run/snapshots/i000001-s0000000007/rank-0000.json").exists()
    for number in other.checkpointer.steps(12):
        other.step(number)
    expected = other.weights()
    other.die()
    recovered = lowdiff.recover(tmp_path / "run", staging=tmp_path / "staging")
    assert recovered.step == 12
    assert same(dict(recovered.model_state_dict()), expected)


def test_another_scheduler_starts_afresh(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = Loop(tmp_path)
    first.run(3, scheduler=torch.optim.lr_scheduler.StepLR(first.optimizer, 2))
    second = Loop(tmp_path)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(second.optimizer, 10)
    second.attach(scheduler=scheduler)
    assert "CosineAnnealingLR instead of torch.optim.lr_scheduler.StepLR" in caplog.text
    assert not hasattr(scheduler, "step_size")
    second.checkpointer.close()


@pytest.mark.slow
def test_another_world_size_continues_from_the_same_state(pool: Pool, tmp_path: Path) -> None:
    build, settings = TRAININGS["cnn_sgd"], {"retention": None}
    for resumed, world_size in ((0, 2), (5, 3), (10, 1), (15, 2)):
        lived = history(
            pool, build, tmp_path, world_size=world_size, until=resumed + 5, settings=settings
        )
        assert [life.resumed for life in lived.lives[-1]] == [resumed] * world_size
        found = lowdiff.recover(tmp_path / "run", staging=tmp_path / "staging")
        assert (found.step, len(found.items)) == (resumed + 5, world_size)
    report = verify(tmp_path / "run", tmp_path / "staging")
    assert report.ok, report.failures
    assert {5, 10, 15, 20} <= {replay.last for replay in report.replays if replay.compared}


@pytest.mark.slow
def test_a_rank_that_joins_keeps_its_own_random_stream_and_resumes_bit_for_bit(
    pool: Pool, tmp_path: Path
) -> None:
    build = TRAININGS["gpt_adamw"]  # dropout draws from each rank's generator
    settings = {"retention": None}
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    history(pool, build, whole, world_size=2, until=8, settings=settings)
    shutil.copytree(whole, killed)
    longer: dict[str, Any] = {"world_size": 3, "until": 14, "settings": settings}
    uninterrupted = history(pool, build, whole, **longer)
    kills = [Kill(9), Kill(11, staged_by=frozenset(range(3))), Kill(13, staged_by=frozenset({2}))]
    interrupted = history(pool, build, killed, kills=kills, **longer)
    assert interrupted.resumed == [8, 11, 12]
    assert_identical(interrupted, uninterrupted)
    streams = [end["rng/torch"] for end in uninterrupted.ends()]
    assert streams[0] == streams[1]  # this script seeds all ranks alike
    assert streams[2] != streams[0]  # but the third began six steps later
    for folder in (whole, killed):
        report = verify(folder / "run", folder / "staging")
        assert not report.failures
    # Without the snapshot that the new world began with, replay crosses the change.
    stored = lowdiff.recover(whole / "run", 13)
    shutil.rmtree(whole / "run/snapshots/i000001-s0000000008")
    crossed = lowdiff.recover(whole / "run", 13)
    assert (stored.base_step, crossed.base_step) == (8, 8)
    assert crossed.fence.world_size == 3
    # Generators that never moved are in no record: they are as the script seeds them.
    assert list(differences(stored, crossed)) == [
        "rank 2: item rng/numpy (only on one side)",
        "rank 2: item rng/python (only on one side)",
    ]


def test_an_older_step_can_be_gone_back_to_and_later_ones_are_void(tmp_path: Path) -> None:
    Loop(tmp_path).run(12)
    expected = lowdiff.recover(tmp_path / "run", 6).model_state_dict()
    again = Loop(tmp_path)
    assert again.attach(step=6) == 6
    assert same(again.weights(), dict(expected))
    for number in again.checkpointer.steps(9):
        again.step(number + 500)  # other data: another history
    wanted = again.weights()
    again.checkpointer.close()
    newest = lowdiff.recover(tmp_path / "run")
    assert newest.step == 9
    assert same(dict(newest.model_state_dict()), wanted)
    with pytest.raises(StepNotFound, match="0 to 9"):
        lowdiff.recover(tmp_path / "run", 12)


def test_only_the_weights_can_be_taken(tmp_path: Path) -> None:
    first = Loop(tmp_path)
    first.run(4)
    second = Loop(tmp_path)
    assert second.attach(restore="model") == 0
    assert same(second.weights(), first.weights())
    assert not second.optimizer.state
    second.checkpointer.close()


def test_the_history_can_be_left_behind(tmp_path: Path) -> None:
    Loop(tmp_path).run(4)
    second = Loop(tmp_path)
    fresh = second.weights()
    assert second.attach(restore="none") == 0
    assert same(second.weights(), fresh)
    second.checkpointer.close()
    assert lowdiff.recover(tmp_path / "run").step == 0
    with pytest.raises(ConfigError, match="restore is one of"):
        Loop(tmp_path).attach(restore="some")


@pytest.mark.slow
def test_compiling_the_model_or_not_changes_no_names(tmp_path: Path) -> None:
    first = Loop(tmp_path)
    first.run(4)
    compiled = torch.compile(small_model(), backend="eager")
    assert isinstance(compiled, torch.nn.Module)
    second = Loop(tmp_path, model=compiled)
    assert second.run(8) == 4
    third = Loop(tmp_path)
    assert third.run(8) == 8
    assert same(
        third.weights(), {k.removeprefix("_orig_mod."): v for k, v in second.weights().items()}
    )


def test_a_loop_that_breaks_keeps_its_finished_step(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    loop.attach()
    for number in loop.checkpointer.steps(10):
        loop.step(number)
        if number == 3:
            break
    loop.checkpointer.close()
    assert lowdiff.recover(tmp_path / "run").step == 4


def test_an_exception_commits_nothing_and_resumes_before_it(tmp_path: Path) -> None:
    loop = Loop(tmp_path)

    def train() -> None:
        with loop.checkpointer:
            loop.attach()
            for number in loop.checkpointer.steps(10):
                loop.step(number)
                if number == 3:
                    raise RuntimeError("out of luck")

    with pytest.raises(RuntimeError, match="out of luck"):
        train()
    assert Loop(tmp_path).run(4) == 3


def test_two_steps_in_one_body_are_an_error(tmp_path: Path) -> None:
    loop = Loop(tmp_path)

    def train() -> None:
        with loop.checkpointer:
            loop.attach()
            for number in loop.checkpointer.steps(10):
                loop.step(number)
                loop.step(number)

    with pytest.raises(UsageError, match="stepped twice between commits of step 1"):
        train()


def test_a_second_trainer_waits_for_the_first_and_names_it(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    testing.adjust(loop.checkpointer, lock_seconds=0.1)
    folder = RunFolder(tmp_path / "run")
    folder.lock(0).parent.mkdir(parents=True)
    lock = FileLock(folder.lock(0))
    lock.acquire("process 7 on this machine (rank 0)")
    with pytest.raises(lowdiff.errors.RunInUse, match=r"in use by process 7 on .* \(rank 0\)"):
        loop.attach()
    lock.release()
    elsewhere = Lease(folder.lease, machine="another")
    assert elsewhere.acquire("process 8 on another machine (rank 0)", timeout_seconds=0.0)
    with pytest.raises(lowdiff.errors.RunInUse, match=r"in use by process 8 on another machine"):
        loop.attach()
    elsewhere.release()
    assert loop.attach() == 0
    loop.checkpointer.close()
    after = Lease(folder.lease, machine="another")
    assert after.acquire("at once", timeout_seconds=5.0)  # less than it takes to expire
    after.release()


def test_a_trainer_that_slept_while_another_took_over_commits_no_more(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    loop.attach()
    steps = loop.checkpointer.steps(10)
    for _ in range(3):
        loop.step(next(steps))
    folder = RunFolder(tmp_path / "run")
    elsewhere = Lease(folder.lease)  # of this machine, so that the trainer's need not expire first
    assert elsewhere.acquire("process 8 on another machine", timeout_seconds=20.0)
    wait_until_lost(loop.checkpointer)
    with pytest.raises(lowdiff.errors.RunInUse, match="took over while this trainer was suspended"):
        next(steps)
    loop.checkpointer.close()
    assert elsewhere.holder() == "process 8 on another machine"
    elsewhere.release()
    assert lowdiff.recover(tmp_path / "run", staging=tmp_path / "staging").step == 2


def test_a_cell_run_again_takes_the_run_from_the_one_before(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = Loop(tmp_path)
    first.attach()
    steps = first.checkpointer.steps(10)
    for _ in range(4):
        first.step(next(steps))  # the fourth is interrupted before it is committed
    second = Loop(tmp_path)
    assert second.attach() == 3
    assert "is still attached in this process" in caplog.text
    with pytest.raises(lowdiff.errors.UsageError, match="closed inside its own loop"):
        next(steps)
    for number in second.checkpointer.steps(6):
        second.step(number)
    second.checkpointer.close()
    whole = Loop(tmp_path / "whole")
    whole.run(until=6)
    assert same(second.weights(), whole.weights())


def test_a_new_beginning_that_dies_in_attach_leaves_the_old_history(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Loop(tmp_path).run(4)
    stillborn = Loop(tmp_path)

    def dies(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("lowdiff.protect.log.queue.LogQueue.wait_for_snapshot", dies)
    with pytest.raises(KeyboardInterrupt):
        stillborn.attach(restore="none")
    monkeypatch.undo()
    # What its writer made durable all the same is what a death a moment earlier would not leave.
    for path in (tmp_path / "run/snapshots").glob("i000001-*"):
        shutil.rmtree(path)
    assert Loop(tmp_path).run(4) == 4


def test_frozen_parameters_inside_the_optimizer_keep_their_numbers(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    next(loop.model.parameters()).requires_grad_(False)
    loop.run(3)
    state = lowdiff.recover(tmp_path / "run").optimizer_state_dict()
    fresh = Loop(tmp_path)
    fresh.optimizer.load_state_dict(state)
    assert same(fresh.optimizer.state_dict()["state"], loop.optimizer.state_dict()["state"])


class Averaging(torch.nn.Module):
    """Assigns a new tensor to its buffer in every forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = small_model()
        self.register_buffer("average", torch.zeros(()))
        self.average: torch.Tensor

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.average = self.average * 0.9 + inputs.detach().mean()
        outputs: torch.Tensor = self.inner(inputs)
        return outputs


def test_a_buffer_that_is_assigned_anew_is_followed(tmp_path: Path) -> None:
    loop = Loop(tmp_path, model=Averaging())
    loop.attach()
    for number in loop.checkpointer.steps(4):
        loop.step(number)
    expected = loop.weights()
    loop.die()
    again = Loop(tmp_path, model=Averaging())
    assert again.attach() == 4
    assert same(again.weights(), expected)
    again.die()


def test_unfreezing_after_attach_is_refused(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    first = next(loop.model.parameters())
    first.requires_grad_(False)
    loop.attach()
    first.requires_grad_(True)
    with pytest.raises(UsageError, match="was frozen at attach and has a gradient now"):
        loop.step(0)
    loop.die()


def test_accumulating_over_commits_is_warned_about(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loop = Loop(tmp_path)
    loop.attach()
    loop.model(torch.randn(8, 20)).square().mean().backward()
    loop.checkpointer.commit()
    loop.model(torch.randn(8, 20)).square().mean().backward()
    loop.optimizer.step()  # with what the body before it left
    loop.checkpointer.commit()
    assert "run all backward passes of an optimizer step between two commits" in caplog.text
    loop.die()


def test_a_commit_that_failed_can_be_repeated_and_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = Loop(tmp_path)
    loop.attach()
    for number in range(3):
        loop.step(number)
        if number == 1:
            with monkeypatch.context() as patch:
                patch.setattr("lowdiff.protect.log.queue.LogQueue.stage", _out_of_space)
                with pytest.raises(StorageError, match="no space"):
                    loop.checkpointer.commit()
        loop.checkpointer.commit()
    expected = loop.weights()
    loop.die()
    again = Loop(tmp_path)
    assert again.attach() == 3
    assert same(again.weights(), expected)  # batch norm's buffers too
    again.die()


def _out_of_space(*_: object, **__: object) -> None:
    raise StorageError("no space")
