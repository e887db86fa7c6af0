"""Staging that does not fit is refused before anything begins, or moves to the run folder."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import lowdiff
from lowdiff import testing
from lowdiff.compressors import TopK
from lowdiff.errors import ConfigError, StorageError
from lowdiff.persistence.values import same
from tests.face.loops import Loop
from tests.mounts import tmpfs_or_skip
from tests.scenarios.pool import Pool
from tests.scenarios.trainings import wrapped


@pytest.fixture
def small_memory(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of 6 MiB."""
    with tmpfs_or_skip(tmp_path / "memory", 6) as folder:
        yield folder


def loop_with(folder: Path, staging: Path | None, width: int) -> Loop:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(20, width), torch.nn.Linear(width, 3))
    loop = Loop(folder, model)
    loop.checkpointer = lowdiff.Checkpointer(
        folder / "run", staging=staging, compressor=TopK(0.5), snapshot_every=1000, batch_size=2
    )
    return loop


def test_a_folder_without_room_is_refused_with_numbers_and_nothing_begins(
    small_memory: Path, tmp_path: Path
) -> None:
    with pytest.raises(StorageError, match=r"staging needs .* MiB at .*memory.* 6\.0 MiB are free"):
        loop_with(tmp_path, small_memory, 20_000).attach()
    assert not list((tmp_path / "run").glob("incarnations/*"))
    assert not list(small_memory.iterdir())
    again = loop_with(tmp_path, tmp_path / "elsewhere", 20_000)
    assert again.attach() == 0
    again.checkpointer.close()


def test_in_little_memory_the_log_is_shorter_and_training_goes_on(
    small_memory: Path, tmp_path: Path
) -> None:
    loop = loop_with(tmp_path, small_memory, 1000)
    loop.attach()
    for number in loop.checkpointer.steps(60):  # 9 MB of steps
        loop.step(number)
    assert loop.checkpointer.stats()["staged_bytes"] > 8_000_000
    expected = loop.weights()
    loop.die()
    recovered = lowdiff.recover(tmp_path / "run", staging=small_memory)
    assert recovered.step == 60
    assert same(dict(recovered.model_state_dict()), expected)


def test_the_default_folder_without_room_gives_way_to_the_run_folder(
    small_memory: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("lowdiff.persistence.paths.shared_staging_root", lambda: small_memory)
    loop = loop_with(tmp_path, None, 20_000)
    with caplog.at_level(logging.WARNING):
        loop.attach()
    assert f"staging in {tmp_path}/run/staging instead, which may be slower" in caplog.text
    for number in loop.checkpointer.steps(5):
        loop.step(number)
    expected = loop.weights()
    loop.die()
    recovered = lowdiff.recover(tmp_path / "run")  # looks there by itself
    assert recovered.step == 5
    assert same(dict(recovered.model_state_dict()), expected)
    again = loop_with(tmp_path, None, 20_000)
    assert again.attach() == 5
    assert same(again.weights(), expected)
    again.checkpointer.close()


def test_the_default_folder_serves_again_once_it_has_room_and_nothing_is_staged_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    usual, instead = tmp_path / "usual", tmp_path / "run" / "staging"
    monkeypatch.setattr("lowdiff.persistence.paths.shared_staging_root", lambda: usual)
    with tmpfs_or_skip(usual, 6), caplog.at_level(logging.WARNING):
        small = loop_with(tmp_path, None, 20_000)
        small.attach()
        next(small.checkpointer.steps(5))
        assert list(instead.glob("*/i000000-r0000"))
        small.die()
    caplog.clear()
    found = loop_with(tmp_path, None, 20_000)  # where the steps are, room elsewhere or not
    with caplog.at_level(logging.WARNING):
        found.attach()
    assert f"staging in {instead}, where the life before this one left steps" in caplog.text
    found.checkpointer.close()
    assert instead.is_dir()
    caplog.clear()
    closed = loop_with(tmp_path, None, 20_000)
    with caplog.at_level(logging.WARNING):
        closed.attach()
    assert not caplog.records
    assert list(usual.glob("*/i000002-r0000"))
    assert not list(instead.iterdir())
    closed.checkpointer.close()


def attach_beside(rank: int, world_size: int, folder: str, memory: str) -> str:
    """Where a rank with a run folder of its own stages; rank 0 is killed, rank 1 loses its machine."""
    model = wrapped(torch.nn.Sequential(torch.nn.Linear(20, 20_000), torch.nn.Linear(20_000, 3)))
    checkpointer = lowdiff.Checkpointer(f"{folder}/run-{rank}", compressor=TopK(0.5))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lowdiff.persistence.paths.shared_staging_root", lambda: Path(memory))
        checkpointer.attach(model, torch.optim.SGD(model.parameters(), 0.1))
    place = checkpointer.stats()["staging"]
    testing.kill(checkpointer)
    if rank == 1:
        shutil.rmtree(place)
    return str(place)


def test_a_machine_without_steps_finds_a_place_though_another_one_holds_some(
    small_memory: Path, tmp_path: Path, pool: Pool
) -> None:
    for _ in range(2):
        places = pool.run(attach_beside, 2, str(tmp_path), str(small_memory))
        assert [f"run-{rank}/staging" in place for rank, place in enumerate(places)] == [True] * 2


def test_what_a_kill_left_of_frozen_parameters_goes_at_the_next_attach(tmp_path: Path) -> None:
    left = tmp_path / "run" / "constants" / f"{'0' * 64}.safetensors.0123abcd.partial"
    left.parent.mkdir(parents=True)
    left.write_bytes(b"half of it")
    loop = loop_with(tmp_path, tmp_path / "staging", 10)
    loop.attach()
    loop.checkpointer.close()
    assert not left.exists()


def test_a_file_is_no_place_for_staging(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="file is no folder"):
        loop_with(tmp_path, tmp_path / "file", 10).attach()


def test_another_folder_than_the_one_that_holds_steps_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lowdiff.persistence.paths.shared_staging_root", lambda: tmp_path / "usual")
    loop = loop_with(tmp_path, None, 10)
    loop.attach()
    for number in loop.checkpointer.steps(3):
        loop.step(number)
    loop.die()
    with pytest.raises(ConfigError, match="would leave them behind; attach without staging= once"):
        loop_with(tmp_path, tmp_path / "other", 10).attach()
    again = loop_with(tmp_path, None, 10)
    assert again.attach() == 3
    again.checkpointer.close()
