"""A run folder that is copied or moved, on a machine with staging memory of its earlier life."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest
import torch

import lowdiff
from lowdiff import testing
from lowdiff.errors import RunInUse
from lowdiff.persistence.format.values import same
from tests.unit.loops import Loop

#: Large enough for the newest steps to be in staging memory alone.
STAGED = {"batch_size": 1000, "snapshot_every": 1000}


class CopiedLoop(Loop):
    """The loop of a copy: another run folder, the same staging memory."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.checkpointer = lowdiff.Checkpointer(
            self.folder / "copy",
            staging=self.folder / "staging",
            compressor=lowdiff.compressors.TopK(0.1),
            retention=None,
            **self.settings,
        )


def trained(loop: Loop, until: int) -> dict[str, torch.Tensor]:
    """Train without closing; the weights at the end."""
    loop.attach()
    for number in loop.checkpointer.steps(until):
        loop.step(number)
    return loop.weights()


def killed(loop: Loop, until: int) -> dict[str, torch.Tensor]:
    """Train and die before anything but the base is durable; the weights at the end."""
    weights = trained(loop, until)
    loop.die()
    return weights


def test_a_copy_leaves_the_originals_staging_memory_alone(tmp_path: Path) -> None:
    expected = killed(Loop(tmp_path, settings=STAGED), 6)
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    copy = CopiedLoop(tmp_path, settings=STAGED)
    assert copy.attach() == 0  # of what is on disk
    for number in copy.checkpointer.steps(2):
        copy.step(number)
    copy.checkpointer.close()
    original = Loop(tmp_path, settings=STAGED)
    assert original.attach() == 6
    assert same(original.weights(), expected)
    original.checkpointer.close()
    assert lowdiff.recover(tmp_path / "copy", staging=tmp_path / "staging").step == 2


def test_a_copy_trains_beside_the_live_original(tmp_path: Path) -> None:
    killed(Loop(tmp_path, settings=STAGED), 1)
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    original = Loop(tmp_path, settings=STAGED)
    trained(original, 3)
    copy = CopiedLoop(tmp_path, settings=STAGED)
    trained(copy, 2)  # both are the run's second life: their memory has different names
    folders = {path.name for path in (tmp_path / "staging").glob("*/i*")}
    assert folders >= {"i000001-r0000", "i000002-r0000"}
    for loop in (original, copy):
        loop.checkpointer.close()
    assert lowdiff.recover(tmp_path / "run", staging=tmp_path / "staging").step == 3
    assert lowdiff.recover(tmp_path / "copy", staging=tmp_path / "staging").step == 2


def test_a_run_that_is_copied_with_its_staging_finds_it(tmp_path: Path) -> None:
    expected = killed(Loop(tmp_path, settings=STAGED), 6)
    shutil.copytree(tmp_path, elsewhere := tmp_path.with_name("elsewhere"))
    for folder in (elsewhere, tmp_path):
        loop = Loop(folder, settings=STAGED)
        assert loop.attach() == 6
        assert same(loop.weights(), expected)
        loop.checkpointer.close()


def test_a_moved_run_finds_its_staging_memory(tmp_path: Path) -> None:
    expected = killed(Loop(tmp_path, settings=STAGED), 6)
    shutil.copytree(
        tmp_path / "run", tmp_path / "copy"
    )  # another inode, as after a move to another disk
    shutil.rmtree(tmp_path / "run")
    moved = CopiedLoop(tmp_path, settings=STAGED)
    assert moved.attach() == 6
    assert same(moved.weights(), expected)
    moved.checkpointer.close()


def test_two_copies_that_take_one_name_at_once_do_not_share_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed(Loop(tmp_path, settings=STAGED), 2)
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    first = Loop(tmp_path, settings=STAGED)
    first.attach()
    monkeypatch.setattr(
        "lowdiff.attach.found.next_incarnation",
        lambda folder, *_: max(folder.incarnations()) + 1,
    )
    with pytest.raises(RunInUse, match="a copy of the run folder"):
        CopiedLoop(tmp_path, settings=STAGED).attach()
    first.checkpointer.close()


def test_a_run_that_was_moved_does_not_wait_for_the_writer_of_the_old_place(
    tmp_path: Path,
) -> None:
    settings = {"staging": tmp_path / "staging", "batch_size": 1000, "snapshot_every": 1000}
    loop = Loop(tmp_path / "a", settings=settings)
    loop.attach()
    for step in range(5):
        loop.step(step)
        loop.checkpointer.commit()
    (tmp_path / "a").rename(tmp_path / "b")
    testing.kill(loop.checkpointer, processes=False)  # its writer finds nothing to write to
    began = time.monotonic()
    again = Loop(tmp_path / "b", settings=settings)
    assert again.attach() == 5
    assert time.monotonic() - began < 25, "not as long as a writer waits for a lost folder"
    assert same(again.weights(), loop.weights())
    again.checkpointer.close()
    assert not (tmp_path / "a").exists()
