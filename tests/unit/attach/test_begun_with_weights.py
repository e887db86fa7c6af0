"""A run that begins with weights alone: whoever makes the same call again resumes what it began."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import lowdiff
from lowdiff.compressors import TopK
from lowdiff.errors import ConfigError, NotARun, StepNotFound
from lowdiff.persistence.files.paths import RunFolder
from lowdiff.persistence.format.document import copy_of
from lowdiff.persistence.format.values import same
from lowdiff.persistence.run.fences import read_fence
from lowdiff.types import Origin
from tests.crash.pool import Pool
from tests.crash.trainings import batch, wrapped
from tests.unit.loops import Loop, small_model

_LEFT = "LD318"


def train(loop: Loop, until: int) -> None:
    for number in loop.checkpointer.steps(until):
        loop.step(number)


def begun(loop: Loop, until: int, **options: Any) -> int:
    """Attach and train; returns where it resumed."""
    resumed = loop.attach(**options)
    train(loop, until)
    return resumed


def origin(run: Path, incarnation: int) -> Origin | None:
    return read_fence(RunFolder(run).fence(incarnation, 0)).origin


def test_the_same_call_resumes_what_it_began(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    old = Loop(tmp_path)
    old.run(4)
    tuned = Loop(tmp_path)
    assert begun(tuned, 3, restore="model") == 0
    assert "the 4 step(s) that this run had made are void" in caplog.text
    expected = tuned.weights()
    tuned.die()
    caplog.clear()
    again = Loop(tmp_path)
    assert again.attach(restore="model") == 3
    assert same(again.weights(), expected)
    assert again.optimizer.state
    again.checkpointer.close()
    assert _LEFT not in caplog.text
    run_id = read_fence(RunFolder(tmp_path / "run").fence(0, 0)).run_id
    assert origin(tmp_path / "run", 1) == Origin(run_id, 0, 4)
    assert origin(tmp_path / "run", 2) is None


def test_before_its_first_step_it_has_the_weights_that_it_took(tmp_path: Path) -> None:
    Loop(tmp_path).run(4)
    tuned = Loop(tmp_path)
    tuned.attach(restore="model")
    expected = tuned.weights()
    tuned.die()
    again = Loop(tmp_path)
    assert again.attach(restore="model") == 0
    assert same(again.weights(), expected)
    again.checkpointer.close()


def test_a_call_that_found_nothing_to_take_resumes_as_well(tmp_path: Path) -> None:
    tuned = Loop(tmp_path)
    assert begun(tuned, 3, restore="model") == 0
    tuned.die()
    assert origin(tmp_path / "run", 0) == Origin()
    assert Loop(tmp_path).run(3, restore="model") == 3


def test_weights_are_taken_again_by_another_optimizer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Loop(tmp_path).run(4)
    Loop(tmp_path).run(3, restore="model")
    other = Loop(tmp_path, make=lambda p: torch.optim.Adagrad(p, lr=0.1))
    caplog.clear()
    assert other.attach(restore="model") == 0
    other.checkpointer.close()
    assert "the 3 step(s) that this run had made are void" in caplog.text


def test_a_step_starts_anew_on_purpose_every_time(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = Loop(tmp_path)
    begun(first, 2)
    expected = first.weights()
    train(first, 5)
    first.checkpointer.close()
    assert Loop(tmp_path).run(3, restore="model", step=2) == 0
    second = Loop(tmp_path)
    assert second.attach(restore="model", step=3) == 0
    assert not same(second.weights(), expected)
    second.checkpointer.close()
    assert [r.step for r in caplog.records if r.getMessage().startswith(_LEFT)] == [5, 3]  # type: ignore[attr-defined]


def test_going_back_says_how_many_steps_it_gives_up(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Loop(tmp_path).run(5)
    assert Loop(tmp_path).run(5, step=2) == 2
    assert "the 3 step(s) after it, up to 5, are void" in caplog.text
    caplog.clear()
    Loop(tmp_path).run(5, restore="none")
    assert "the 5 step(s) that this run had made are void" in caplog.text


def test_nothing_is_said_where_nothing_is_given_up(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Loop(tmp_path).run(3, restore="none")
    Loop(tmp_path).run(5, step=3)
    Loop(tmp_path).run(7)
    Loop(tmp_path / "other").run(2, restore_from=tmp_path / "run")
    assert _LEFT not in caplog.text


def test_weights_of_another_run_are_taken_once(tmp_path: Path) -> None:
    old = Loop(tmp_path / "old")
    old.run(4)
    tuned = Loop(tmp_path)
    assert tuned.attach(restore_from=tmp_path / "old/run") == 0
    assert same(tuned.weights(), old.weights())
    assert not tuned.optimizer.state
    train(tuned, 3)
    expected = tuned.weights()
    tuned.die()
    again = Loop(tmp_path)
    assert again.attach(restore_from=tmp_path / "old/run") == 3
    assert same(again.weights(), expected)
    again.checkpointer.close()
    assert lowdiff.recover(tmp_path / "old/run").step == 4
    run_id = read_fence(RunFolder(tmp_path / "old/run").fence(0, 0)).run_id
    assert origin(tmp_path / "run", 0) == Origin(run_id, 0, 4)


def test_a_step_of_another_run_is_taken_and_then_resumed(tmp_path: Path) -> None:
    old = Loop(tmp_path / "old")
    begun(old, 2)
    expected = old.weights()
    train(old, 4)
    old.checkpointer.close()
    tuned = Loop(tmp_path)
    assert tuned.attach(restore_from=tmp_path / "old/run", step=2) == 0
    assert same(tuned.weights(), expected)
    train(tuned, 3)
    tuned.checkpointer.close()
    assert Loop(tmp_path).run(3, restore_from=tmp_path / "old/run", step=2) == 3


def test_what_cannot_give_weights_is_refused(tmp_path: Path) -> None:
    Loop(tmp_path / "old").run(2)
    folder = tmp_path / "old/run"
    with pytest.raises(NotARun, match="no such folder"):
        Loop(tmp_path).attach(restore_from=tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="is this run itself"):
        Loop(tmp_path / "old").attach(restore_from=folder)
    with pytest.raises(ConfigError, match=r"--as-run FOLDER"):
        Loop(tmp_path).attach(restore_from="s3://bucket/run")
    with pytest.raises(ConfigError, match="has no use for restore_from"):
        Loop(tmp_path).attach(restore="none", restore_from=folder)
    with pytest.raises(StepNotFound, match="step 7"):
        Loop(tmp_path).attach(restore_from=folder, step=7)
    assert Loop(tmp_path).run(1, restore_from=folder) == 0  # what was refused left no history


def tune(
    rank: int, world_size: int, folder: str, until: int
) -> tuple[int, dict[str, torch.Tensor]]:
    """Train from another run's weights."""
    ddp = wrapped(small_model())
    optimizer = torch.optim.Adam(ddp.parameters(), lr=0.1)
    checkpointer = lowdiff.Checkpointer(
        f"{folder}/run-{rank}", staging=f"{folder}/staging-{rank}", compressor=TopK(0.1)
    )
    began = checkpointer.attach(ddp, optimizer, restore_from=f"{folder}/old/run")
    taken = {name: value.clone() for name, value in ddp.module.state_dict().items()}
    for step in checkpointer.steps(until):
        optimizer.zero_grad()
        ddp(batch(step, rank, 6, 20)).square().mean().backward()
        optimizer.step()
    checkpointer.close()
    return began, taken


def test_ranks_take_weights_of_a_run_of_one(pool: Pool, tmp_path: Path) -> None:
    old = Loop(tmp_path / "old")
    old.run(4)
    told = pool.run(tune, 2, str(tmp_path), 3)
    assert all(began == 0 and same(taken, old.weights()) for began, taken in told)
    assert [began for began, _ in pool.run(tune, 2, str(tmp_path), 5)] == [3, 3]


def test_a_second_stage_takes_the_weights_of_a_run_that_began_with_others(tmp_path: Path) -> None:
    Loop(tmp_path / "old").run(2)
    tuned = Loop(tmp_path)
    tuned.run(3, restore_from=tmp_path / "old/run")
    second = Loop(tmp_path)
    assert second.attach(restore="model") == 0
    assert same(second.weights(), tuned.weights())
    second.checkpointer.close()
    third = Loop(tmp_path)
    assert begun(third, 1, restore="model") == 0
    third.die()


def test_a_beginning_that_cannot_be_read_is_not_guessed(tmp_path: Path) -> None:
    Loop(tmp_path).run(2)
    Loop(tmp_path).run(4)
    fence = RunFolder(tmp_path / "run").fence(0, 0)
    for path in (fence, copy_of(fence)):
        path.write_bytes(b"")
    with pytest.raises(ConfigError, match="how this run began cannot be read"):
        Loop(tmp_path).attach(restore="model")
    assert Loop(tmp_path).run(5, restore="all") == 4
