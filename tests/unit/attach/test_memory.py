"""Staging that does not fit is refused before anything begins."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import lowdiff
from lowdiff.compressors import TopK
from lowdiff.errors import ConfigError
from lowdiff.persistence.format.values import same
from lowdiff.protect.gradients.strategy import GradientsStrategy
from lowdiff.protect.memory import Demand, Need
from tests.mounts import tmpfs_or_skip
from tests.unit.loops import Loop


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
    with pytest.raises(ConfigError, match=r"staging needs .* MiB at .*memory.* 6\.0 MiB are free"):
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
    for module in ("settings", "attach.discover"):
        monkeypatch.setattr(f"lowdiff.{module}.shared_staging_root", lambda: tmp_path / "usual")
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


@pytest.mark.parametrize("is_default", [True, False])
def test_another_folder_than_that_of_the_newest_incarnation_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_default: bool
) -> None:
    for module in ("settings", "attach.discover"):
        monkeypatch.setattr(f"lowdiff.{module}.shared_staging_root", lambda: tmp_path / "usual")
    first, other = tmp_path / "first", None if is_default else tmp_path / "other"
    loop = loop_with(tmp_path, first, 10)
    loop.attach()
    for number in loop.checkpointer.steps(3):
        loop.step(number)
    loop.die()
    with pytest.raises(ConfigError, match=rf"leave them behind; attach with staging={first} once"):
        loop_with(tmp_path, other, 10).attach()
    again = loop_with(tmp_path, first, 10)
    assert again.attach() == 3
    again.die()
    shutil.rmtree(first)
    after = loop_with(tmp_path, other, 10)
    assert after.attach() == 3
    after.checkpointer.close()


@pytest.mark.parametrize("strategy", ["log", "gradients", "replica", "survivors"])
def test_a_model_without_an_element_is_trained(tmp_path: Path, strategy: str) -> None:
    empty = torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(0))])
    compressor = TopK(0.5) if strategy == "log" else None
    loop = Loop(tmp_path, empty, settings={"strategy": strategy, "compressor": compressor})
    loop.attach()
    for _ in loop.checkpointer.steps(3):
        empty[0].sum().backward()
        loop.optimizer.step()
    loop.checkpointer.close()
    assert lowdiff.recover(tmp_path / "run").step == 3


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.AdamW(p, amsgrad=True),
        lambda p: torch.optim.RMSprop(p, centered=True, momentum=0.9),
        lambda p: torch.optim.SGD(p, lr=0.1),
    ],
    ids=["amsgrad", "centered", "plain"],
)
def test_images_take_no_more_than_was_planned(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    make: Callable[[Any], torch.optim.Optimizer],
) -> None:
    needs: list[Need] = []
    need = GradientsStrategy.need

    def noted(strategy: GradientsStrategy, demand: Demand) -> Need:
        needs.append(need(strategy, demand))
        return needs[-1]

    monkeypatch.setattr(GradientsStrategy, "need", noted)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(20, 20_000), torch.nn.Linear(20_000, 3))
    loop = Loop(tmp_path, model, make, {"strategy": "gradients", "compressor": None})
    loop.attach()
    for number in loop.checkpointer.steps(12):
        loop.step(number)
    images = [path.stat().st_size for path in (tmp_path / "staging").glob("*/*/copy-[01]")]
    loop.checkpointer.close()
    assert len(images) == 2
    assert sum(images) <= 1.01 * needs[-1].staging.snapshot_bytes
