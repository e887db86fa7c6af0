"""Strategy gradients: every step since the older of two images comes back from memory, bit for bit."""

from __future__ import annotations

import logging
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lowdiff import testing
from lowdiff.commit.images import Images
from lowdiff.commit.pending import Reach
from lowdiff.commit.session import Session
from lowdiff.compressors import TopK
from lowdiff.errors import ConfigError, StorageError
from lowdiff.model.binding import Attached
from lowdiff.persistence.files.paths import StagingFolder
from lowdiff.persistence.format import image
from lowdiff.persistence.format.framing import RecordKind
from lowdiff.persistence.staging.budget import Room
from lowdiff.persistence.staging.chunks import Chunks
from lowdiff.persistence.staging.log import staged_records
from lowdiff.recovery import recover
from lowdiff.recovery.inspect.inspection import inspect
from lowdiff.recovery.sources.folders import kept_marks
from tests.crash.lives import as_from_an_accelerator
from tests.unit.loops import Loop, fail_once

Weights = dict[int, dict[str, torch.Tensor]]


class Killed(BaseException):
    """The process was killed here."""


@pytest.fixture
def six_steps() -> Iterator[None]:
    """The least memory: gradients of six steps, of the small model one a chunk."""
    with testing.limits(staging_chunk_bytes=64, kept_intervals=0, record_rest_bytes=0):
        yield


def loop_in(folder: Path, **settings: Any) -> Loop:
    kept = {"compressor": None, "strategy": "gradients", "snapshot_every": 1000}
    return Loop(folder, settings=kept | settings)


def go_on(loop: Loop, weights: Weights, until: int) -> None:
    """Make steps, and note the weights of each."""
    for number in range(max(weights), until):
        loop.step(number)
        loop.checkpointer.commit()
        weights[number + 1] = loop.weights()


def trained(loop: Loop, until: int) -> Weights:
    """Attach and train; returns the weights of every step."""
    weights = {loop.attach(): loop.weights()}
    go_on(loop, weights, until)
    return weights


def assert_recovered(loop: Loop, weights: Weights, step: int | None = None) -> int:
    """A step, or the newest, comes back; returns it."""
    state = recover(loop.folder / "run", step, staging=loop.folder / "staging")
    found = state.model_state_dict()
    for name, value in weights[state.step].items():
        assert torch.equal(found[name], value), (state.step, name)
    return state.step


def stage_of(loop: Loop) -> StagingFolder:
    return max(StagingFolder.all(loop.folder / "staging"), key=lambda stage: stage.incarnation)


def flip(path: Path, place: float) -> None:
    """Change a bit."""
    content = bytearray(path.read_bytes())
    content[int(place * len(content))] ^= 4
    path.write_bytes(content)


def test_a_kill_costs_no_step_and_every_step_since_the_older_image_comes_back(
    tmp_path: Path, six_steps: None
) -> None:
    loop = loop_in(tmp_path)
    weights = trained(loop, 40)
    stats = loop.checkpointer.stats()
    loop.die()
    kept = stats["kept_steps"]
    assert 2 <= kept <= 6
    assert stats["ring_fill"] == kept / 6
    assert stats["durable_snapshot"] == 0
    assert stats["snapshots"] > 10  # which stayed in memory
    assert assert_recovered(loop, weights) == 40
    for step in range(40 - kept, 41):
        assert assert_recovered(loop, weights, step) == step
    found = inspect(loop.folder / "run", staging=loop.folder / "staging")
    assert [(r.first, r.last) for r in found.recoverable_ranges] == [(0, 0), (40 - kept, 40)]


def test_a_run_goes_on_from_memory_with_the_bits_of_one_that_nobody_killed(
    tmp_path: Path, six_steps: None
) -> None:
    whole = loop_in(tmp_path / "whole")
    expected = trained(whole, 25)
    whole.checkpointer.close()
    for number in (9, 16):
        loop = loop_in(tmp_path)
        trained(loop, number)
        loop.die()
    loop = loop_in(tmp_path)
    weights = trained(loop, 25)
    assert min(weights) == 16
    for name, value in expected[25].items():
        assert torch.equal(weights[25][name], value)
    loop.checkpointer.close()
    assert not list(StagingFolder.all(tmp_path / "staging"))
    assert recover(tmp_path / "run").step == 25


def test_images_become_durable_at_the_interval_and_at_the_end(
    tmp_path: Path, six_steps: None
) -> None:
    loop = loop_in(tmp_path, snapshot_every=5)
    weights = trained(loop, 12)  # of step 12 there is an image that stays in memory
    assert loop.checkpointer.stats()["snapshot_step"] == 12
    testing.wait_until(loop.checkpointer, lambda stats: stats["durable_snapshot"] == 10)
    loop.checkpointer.close()
    assert assert_recovered(loop, weights) == 12
    assert assert_recovered(loop, weights, 5) == 5


def test_with_little_to_keep_steps_lie_between_snapshots_that_are_durable(tmp_path: Path) -> None:
    loop = loop_in(tmp_path, snapshot_every=5)
    weights = trained(loop, 23)
    assert loop.checkpointer.stats()["kept_steps"] == 23 - 15
    loop.die()
    assert assert_recovered(loop, weights) == 23
    assert assert_recovered(loop, weights, 16) == 16


def test_a_kill_in_the_middle_of_an_image_costs_nothing(
    tmp_path: Path, six_steps: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = loop_in(tmp_path)
    weights = trained(loop, 9)

    def torn(view: memoryview, parts: list[memoryview], num_threads: int) -> tuple[int, int]:
        view[:200], view[200:] = b"".join(parts)[:200], bytes(view.nbytes - 200)
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(image, "copy_in_parallel", torn)
        with pytest.raises(Killed):
            go_on(loop, weights, 20)
    weights[max(weights) + 1] = loop.weights()  # which was staged before its image
    loop.die()
    assert assert_recovered(loop, weights) == max(weights)


@pytest.mark.parametrize("place", [0.3, 0.9])
@pytest.mark.parametrize("is_newer", [False, True])
def test_a_damaged_image_costs_no_step(
    tmp_path: Path, six_steps: None, place: float, is_newer: bool
) -> None:
    loop = loop_in(tmp_path)
    weights = trained(loop, 21)
    loop.die()
    stage = stage_of(loop)
    steps = {mark.step: slot for slot, mark in kept_marks(stage)}
    assert sorted(steps) == [18, 20]
    flip(stage.kept(steps[20 if is_newer else 18]), place)
    assert assert_recovered(loop, weights) == 21


def test_a_damaged_slot_of_the_ring_ends_recovery_before_it(
    tmp_path: Path, six_steps: None
) -> None:
    loop = loop_in(tmp_path)
    weights = trained(loop, 21)
    snapshot = loop.checkpointer.stats()["snapshot_step"]
    assert snapshot == 20
    loop.die()
    stage = stage_of(loop)
    flip(stage.chunks()[-1][1], 0.5)  # of step 21
    assert assert_recovered(loop, weights) == 20
    assert assert_recovered(loop, weights, 19) == 19


def test_steps_that_are_larger_than_was_planned_cost_older_ones_and_then_snapshots(
    tmp_path: Path, six_steps: None, caplog: pytest.LogCaptureFixture
) -> None:
    loop = loop_in(tmp_path)
    weights = {loop.attach(): loop.weights()}
    loop.checkpointer.state["large"] = large = torch.zeros(20_000)
    with caplog.at_level(logging.WARNING, "lowdiff"):
        for number in range(12):
            large += 1.0
            go_on(loop, weights, number + 1)
    assert "LD121" in caplog.text
    loop.die()
    assert assert_recovered(loop, weights) == 12


class Full:
    """Memory that somebody else has filled: no chunk of the log can be made, and no image written."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.is_full = False
        reuse, write = Chunks.begin, Images.write

        def begin(chunks: Chunks, *given: Any, **options: Any) -> bool:
            return not self.is_full and reuse(chunks, *given, **options)

        def written(images: Images, tensors: Any) -> tuple[int, int]:
            if self.is_full:
                raise StorageError("no memory is left")
            return write(images, tensors)

        patch.setattr(Chunks, "begin", begin)
        patch.setattr(Images, "write", written)


def without_memory(
    folder: Path, patch: pytest.MonkeyPatch, **settings: Any
) -> tuple[Full, Loop, Weights]:
    """Train four steps; then there is no more memory."""
    memory, loop = Full(patch), loop_in(folder, **settings)
    weights = trained(loop, 4)
    memory.is_full = True
    return memory, loop, weights


def test_training_waits_while_neither_a_step_nor_an_image_finds_memory(
    tmp_path: Path, six_steps: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, loop, weights = without_memory(tmp_path, monkeypatch)

    def free() -> None:
        memory.is_full = False

    timer = threading.Timer(0.5, free)
    timer.start()
    go_on(loop, weights, 6)
    assert not memory.is_full
    timer.join()
    go_on(loop, weights, 8)
    stats = loop.checkpointer.stats()
    assert (stats["committed_step"], stats["waiting_seconds"] > 0.2) == (8, True)
    loop.die()
    assert assert_recovered(loop, weights) == 8


def test_a_run_that_goes_on_without_memory_is_whole_soon_after_there_is_some(
    tmp_path: Path, six_steps: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, loop, weights = without_memory(tmp_path, monkeypatch, backpressure="degrade")
    go_on(loop, weights, 12)
    stats = loop.checkpointer.stats()
    # The chunk that is being written may take a step more.
    assert stats["committed_step"] <= 5
    assert stats["kept_steps"] <= 5
    memory.is_full = False
    for until in range(13, 60):
        go_on(loop, weights, until)
        if loop.checkpointer.stats()["committed_step"] == until:
            break
        time.sleep(0.02)
    go_on(loop, weights, until + 20)
    stats = loop.checkpointer.stats()
    assert stats["committed_step"] == until + 20
    loop.die()
    assert assert_recovered(loop, weights) == until + 20


def test_a_step_without_room_that_is_staged_again_has_none_again(
    tmp_path: Path, six_steps: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, loop, weights = without_memory(tmp_path, monkeypatch, backpressure="degrade")
    loop.step(4)

    def broken_off(*given: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Reach, "staged", broken_off)
        with pytest.raises(KeyboardInterrupt):
            loop.checkpointer.commit()
    loop.checkpointer.commit()
    assert loop.checkpointer.stats()["committed_step"] == 4
    loop.die()
    assert assert_recovered(loop, weights) == 4


@pytest.mark.parametrize("name", ["copy-0.saved", "copy-1"])
def test_an_image_that_somebody_removes_is_noticed(
    tmp_path: Path, six_steps: None, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    loop = loop_in(tmp_path)
    weights = trained(loop, 8)
    (stage_of(loop).root / name).unlink()
    go_on(loop, weights, 12)
    assert "LD101" in caplog.text
    loop.die()
    assert assert_recovered(loop, weights) == 12


def test_items_that_change_in_each_step_are_planned_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loop = loop_in(tmp_path, snapshot_every=100)
    large = torch.zeros(50_000)
    loop.model.register_buffer("large", large)
    weights = {loop.attach(): loop.weights()}
    for number in range(60):
        large += 1.0
        go_on(loop, weights, number + 1)
    stats = loop.checkpointer.stats()
    assert stats["kept_steps"] == 60
    assert stats["ring_fill"] < 0.3
    assert "LD121" not in caplog.text


def test_a_commit_that_is_made_again_stages_its_step_once(
    tmp_path: Path, six_steps: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = loop_in(tmp_path)
    weights = trained(loop, 3)
    loop.step(3)
    with monkeypatch.context() as patch:
        fail_once(patch, Session, "_advance", KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            loop.checkpointer.commit()
        loop.checkpointer.commit()
    weights[4] = loop.weights()
    _, records = zip(*staged_records(stage_of(loop)), strict=True)
    steps = [r.header.step for r in records if r.header.kind is RecordKind.DIFFERENTIAL]
    assert steps.count(4) == 1
    go_on(loop, weights, 5)
    loop.die()
    assert assert_recovered(loop, weights) == 5


def test_what_else_writes_costs_a_snapshot_and_loses_nothing(
    tmp_path: Path, six_steps: None
) -> None:
    loop = loop_in(tmp_path)
    weights = trained(loop, 7)
    loop.optimizer.state_dict()["state"][0]["exp_avg"].mul_(2.0)
    go_on(loop, weights, 8)
    assert loop.checkpointer.stats()["durable_snapshot"] == 8
    go_on(loop, weights, 9)
    loop.die()
    assert assert_recovered(loop, weights) == 9


def test_staging_that_vanishes_is_made_anew(tmp_path: Path, six_steps: None) -> None:
    loop = loop_in(tmp_path)
    weights = trained(loop, 9)
    shutil.rmtree(stage_of(loop).root)
    go_on(loop, weights, 15)
    testing.wait_until(loop.checkpointer, lambda stats: stats["durable_snapshot"] >= 10)
    loop.die()
    assert assert_recovered(loop, weights) == 15


def test_a_disk_that_does_not_answer_costs_no_step_in_memory(
    tmp_path: Path, six_steps: None
) -> None:
    loop = loop_in(tmp_path, snapshot_every=5, backpressure="degrade")
    weights = {loop.attach(): loop.weights()}
    aside = tmp_path / "aside"
    (tmp_path / "run/run.json").rename(aside)
    go_on(loop, weights, 40)
    stats = loop.checkpointer.stats()
    assert stats["durable_snapshot"] == 0
    assert stats["kept_steps"] >= 2
    aside.rename(tmp_path / "run/run.json")
    testing.wait_until(loop.checkpointer, lambda stats: not stats["writer_error"])
    go_on(loop, weights, 52)
    testing.wait_until(loop.checkpointer, lambda stats: stats["durable_snapshot"] >= 40)
    loop.die()
    assert assert_recovered(loop, weights) == 52


def test_training_waits_for_a_slow_disk_once_memory_is_full(
    tmp_path: Path, six_steps: None
) -> None:
    loop = loop_in(tmp_path, snapshot_every=5)
    weights = {loop.attach(): loop.weights()}
    aside = tmp_path / "aside"
    (tmp_path / "run/run.json").rename(aside)
    back = threading.Timer(1.5, lambda: aside.rename(tmp_path / "run/run.json"))
    back.start()
    go_on(loop, weights, 40)
    back.join()
    assert loop.checkpointer.stats()["waiting_seconds"] > 0.5
    assert loop.checkpointer.stats()["unprotected_steps"] == 0
    loop.die()
    assert assert_recovered(loop, weights) == 40


@pytest.mark.parametrize("name", ["replica", "survivors", "log"])
def test_a_run_may_change_its_strategy(tmp_path: Path, name: str) -> None:
    other: dict[str, Any] = {"strategy": name, "compressor": TopK(0.1) if name == "log" else None}
    for number, settings in enumerate(({}, other, {})):
        loop = loop_in(tmp_path, **settings)
        weights = trained(loop, 4 * number + 5)
        assert min(weights) in ((0, 5, 9)[number], 5)
        if name == "survivors" and number == 1:
            loop.checkpointer.close()
        else:
            loop.die()
    assert assert_recovered(loop, weights) == 13


def test_every_step_of_a_body_comes_back_together(tmp_path: Path, six_steps: None) -> None:
    with testing.limits(most_body_steps=4, least_body_steps=4):
        loop = loop_in(tmp_path, optimizer_steps="any")
        weights = {loop.attach(): loop.weights()}
        for number in range(9):
            for part in range(number % 4 + 1):
                loop.step(10 * number + part)
            loop.checkpointer.commit()
            weights[number + 1] = loop.weights()
        loop.die()
    assert assert_recovered(loop, weights) == 9
    assert assert_recovered(loop, weights, 8) == 8


def test_too_little_memory_is_refused_with_the_ways_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = loop_in(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr("lowdiff.attach.memory.room_at", lambda root: Room(root, 2 << 20, None))
        with pytest.raises(ConfigError, match=r"staging needs .*docker: --shm-size"):
            loop.attach()


def test_a_compressor_does_not_go_with_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="leaves gradients as they are; give no compressor"):
        loop_in(tmp_path, compressor=TopK(0.1))


@pytest.fixture
def on_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The model says that it lies on an accelerator, and all that leaves it comes late."""
    monkeypatch.setattr(Attached, "is_on_host", False)
    with as_from_an_accelerator(1):
        yield


def test_on_an_accelerator_it_is_what_a_run_without_a_compressor_takes(
    tmp_path: Path, on_an_accelerator: None
) -> None:
    loop = loop_in(tmp_path, strategy=None)
    weights = trained(loop, 9)
    loop.settle()
    assert loop.checkpointer.stats()["kept_steps"] == 9
    loop.die()
    assert assert_recovered(loop, weights) == 9


def test_on_an_accelerator_with_little_memory_survivors_are_taken_and_said(
    tmp_path: Path,
    on_an_accelerator: None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    loop = loop_in(tmp_path, strategy=None)
    rooms = iter([2 << 20, 1 << 30])
    monkeypatch.setattr("lowdiff.attach.memory.room_at", lambda root: Room(root, next(rooms), None))
    with caplog.at_level(logging.WARNING, "lowdiff"):
        trained(loop, 3)
    assert "LD324: staging needs" in caplog.text
    assert "kept_steps" not in loop.checkpointer.stats()
    loop.checkpointer.close()


def test_a_strategy_that_was_chosen_is_not_changed(
    tmp_path: Path, on_an_accelerator: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = loop_in(tmp_path)
    monkeypatch.setattr("lowdiff.attach.memory.room_at", lambda root: Room(root, 2 << 20, None))
    with pytest.raises(ConfigError, match="staging needs"):
        loop.attach()
