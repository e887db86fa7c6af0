"""Retention while training: pins, kept steps, and who may remove what when."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import lowdiff
from lowdiff import testing
from lowdiff.attach.resume import load_start
from lowdiff.errors import ConfigError, RunInUse, StepNotFound, UsageError
from lowdiff.persistence.files.paths import RunFolder
from lowdiff.persistence.format.values import same
from lowdiff.persistence.retention.collect import collect, retention_locked
from lowdiff.persistence.run.fences import read_run_id
from lowdiff.persistence.run.journal import Pin, read_journal, read_pins
from lowdiff.recovery.inspect.verify import verify
from lowdiff.types import Retention
from tests.unit.loops import Loop


def trained(loop: Loop, until: int) -> None:
    for number in loop.checkpointer.steps(until):
        loop.step(number)


def recovered(loop: Loop, step: int | None = None) -> lowdiff.RecoveredState:
    return lowdiff.recover(loop.folder / "run", step, staging=loop.folder / "staging")


def pins(loop: Loop) -> list[Pin]:
    folder = RunFolder(loop.folder / "run")
    return read_pins(folder, read_run_id(folder))


def test_a_pinned_step_outlives_retention(tmp_path: Path) -> None:
    loop = Loop(tmp_path, settings={"retention": 1})
    loop.attach()
    trained(loop, 7)
    assert loop.checkpointer.keep(7, label="best") == 7
    expected = loop.weights()
    trained(loop, 31)
    loop.checkpointer.close()
    assert pins(loop) == [Pin("best", 7, 0)]
    state = recovered(loop, 7)
    assert same(dict(state.model_state_dict()), expected)
    with pytest.raises(StepNotFound, match="retention removed the differential of step 11"):
        recovered(loop, 12)
    with pytest.raises(StepNotFound, match="recoverable steps: 5 to 10, 31"):
        recovered(loop, 4)
    report = verify(tmp_path / "run", tmp_path / "staging")
    assert report.ok
    assert [(r.first, r.last, r.compared) for r in report.replays] == [(5, 10, False)]


def test_every_kth_step_gets_a_snapshot_that_stays_alone(tmp_path: Path) -> None:
    policy = lowdiff.Retention(snapshots=1, every_steps=8)
    loop = Loop(tmp_path, settings={"retention": policy})
    assert loop.run(27) == 0
    folder = RunFolder(tmp_path / "run")
    assert [step for _, step, _ in folder.snapshots()] == [8, 16, 24, 27]
    assert [recovered(loop, step).step for step in (8, 16, 24)] == [8, 16, 24]
    assert [first for _, _, first, _ in folder.segments()] == [26]
    assert verify(tmp_path / "run", tmp_path / "staging").ok
    assert read_journal(folder, read_run_id(folder)).policy == policy


def test_without_a_step_the_newest_committed_one_is_pinned(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    loop.attach()
    for number in loop.checkpointer.steps(3):
        loop.step(number)
        assert loop.checkpointer.keep(label="newest") == number
    loop.step(3)
    loop.checkpointer.commit()
    assert loop.checkpointer.keep(4) == 4  # also the one that was just committed
    loop.checkpointer.close()
    assert pins(loop) == [Pin("newest", 2, 0), Pin("step-4", 4, 0)]


def test_a_step_that_is_not_there_is_named(tmp_path: Path) -> None:
    loop = Loop(tmp_path, settings={"retention": 1})
    with pytest.raises(UsageError):
        loop.checkpointer.keep()
    loop.attach()
    trained(loop, 12)
    loop.checkpointer.keep(11, label="best")
    testing.wait_until(
        loop.checkpointer, lambda stats: stats["durable_snapshot"] == stats["snapshot_step"]
    )
    folder = RunFolder(tmp_path / "run")
    collect(folder, read_run_id(folder), Retention(1))
    with pytest.raises(StepNotFound, match=r"step 3 of .* recoverable steps: 10"):
        loop.checkpointer.keep(3, label="best")
    with pytest.raises(StepNotFound, match=r"step 13 .* it is not committed yet.* 10 to 12"):
        loop.checkpointer.keep(13, label="best")
    for label in ("", "a/b", ".hidden", "-x", "x" * 101, "a b"):
        with pytest.raises(ConfigError, match="a label is"):
            loop.checkpointer.keep(11, label=label)
    with pytest.raises(ConfigError, match="count from 0"):
        loop.checkpointer.keep(-1)
    assert pins(loop) == [Pin("best", 11, 0)]
    loop.checkpointer.close()


def test_pins_of_an_earlier_life_carry_its_number(tmp_path: Path) -> None:
    Loop(tmp_path).run(6)
    loop = Loop(tmp_path)
    assert loop.attach(step=4) == 4
    trained(loop, 7)
    for step in (0, 4, 5):
        loop.checkpointer.keep(step)
    loop.checkpointer.close()
    assert [(pin.step, pin.incarnation) for pin in pins(loop)] == [(0, 0), (4, 0), (5, 1)]


def test_a_pin_is_a_checked_document(tmp_path: Path) -> None:
    loop = Loop(tmp_path, settings={"retention": 1})
    loop.attach()
    trained(loop, 4)
    loop.checkpointer.keep(3)
    path = tmp_path / "run" / "pins" / "step-3.json"
    assert {"format", "crc32c", "run_id"} < json.loads(path.read_text()).keys()
    path.write_text(path.read_text().replace('"step": 3', '"step": 2'))
    trained(loop, 21)
    loop.checkpointer.close()
    # It is not known what must stay, so nothing goes.
    assert [step for _, step, _ in RunFolder(tmp_path / "run").snapshots()] == [
        0,
        5,
        10,
        15,
        20,
        21,
    ]
    (failure,) = verify(tmp_path / "run", tmp_path / "staging").failures
    assert failure.path == str(path)


def test_nothing_is_removed_between_recovering_a_step_and_the_fence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Loop(tmp_path).run(20)
    folder = RunFolder(tmp_path / "run")
    run_id, tried = read_run_id(folder), list[bool]()

    def load(*arguments: Any) -> Any:
        with (
            pytest.raises(RunInUse),
            retention_locked(folder, timeout_seconds=0.0),
        ):
            pass
        tried.append(True)
        return load_start(*arguments)

    monkeypatch.setattr("lowdiff.attach.open.load_start", load)
    loop = Loop(tmp_path)
    assert loop.attach(step=7) == 7
    assert tried
    collect(folder, run_id, Retention(1))  # the lock is free again; 7 is needed now
    trained(loop, 8)
    loop.die()
    assert recovered(loop).step == 8


def test_a_run_whose_retention_changes_says_so(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    for setting, policy in ((3, Retention(3)), (None, None), (Retention(2, 7), Retention(2, 7))):
        loop = Loop(tmp_path, settings={"retention": setting})
        loop.attach()
        assert read_journal(folder, read_run_id(folder)).policy == policy
        loop.checkpointer.close()


def test_without_a_log_only_a_step_with_a_snapshot_is_kept(tmp_path: Path) -> None:
    loop = Loop(tmp_path, settings={"compressor": None, "retention": 1})
    loop.attach()
    trained(loop, 5)
    testing.wait_until(loop.checkpointer, lambda stats: stats["durable_snapshot"] == 5)
    assert loop.checkpointer.keep(5, label="best") == 5
    trained(loop, 6)
    with pytest.raises(
        StepNotFound,
        match=r"cannot be pinned: without a compressor .* steps: [0-9, ]+$",
    ):
        loop.checkpointer.keep(6)
    trained(loop, 12)
    loop.checkpointer.close()
    assert pins(loop) == [Pin("best", 5, 0)]
    assert recovered(loop, 5).step == 5


def test_verify_names_a_pinned_step_that_is_lost(tmp_path: Path) -> None:
    loop = Loop(tmp_path, settings={"retention": 1})
    loop.attach()
    trained(loop, 7)
    loop.checkpointer.keep(7, label="best")
    trained(loop, 22)
    loop.checkpointer.close()
    assert verify(tmp_path / "run", tmp_path / "staging").ok
    (lost,) = (tmp_path / "run/snapshots").glob("*-s0000000005")
    shutil.rmtree(lost)
    found = verify(tmp_path / "run", tmp_path / "staging").failures
    assert "step 7, pinned as best, cannot be recovered any more" in [one.message for one in found]
