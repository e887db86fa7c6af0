"""A fence that is lost costs what its incarnation made, and nothing else."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

import lowdiff
from lowdiff.errors import DamagedFile
from lowdiff.persistence.files.paths import RunFolder
from lowdiff.persistence.retention.collect import collect
from lowdiff.persistence.run.fences import read_run_id
from tests.unit.loops import Loop


def test_the_number_of_an_incarnation_whose_fence_is_lost_is_not_used_again(tmp_path: Path) -> None:
    """Files with this number are there still: they passed for those of the new incarnation."""
    Loop(tmp_path).run(4)
    lost = Loop(tmp_path)
    lost.run(10)
    shutil.rmtree(tmp_path / "run/incarnations/i000001")

    other = Loop(tmp_path)
    assert other.attach() == 4
    for number in other.checkpointer.steps(7):
        other.step(100 + number)
    expected = other.weights()
    other.die()

    again = Loop(tmp_path)
    assert again.attach() == 7
    assert all(torch.equal(again.weights()[name], value) for name, value in expected.items())
    again.checkpointer.close()
    assert not (tmp_path / "run/incarnations/i000001").exists()


@pytest.mark.slow
def test_while_a_fence_in_the_middle_is_missing_nothing_is_removed(tmp_path: Path) -> None:
    settings = {"retention": lowdiff.Retention(snapshots=1)}
    first = Loop(tmp_path, settings=settings)
    first.attach()
    for number in first.checkpointer.steps(7):
        first.step(number)
    first.checkpointer.keep(7, label="best")
    first.checkpointer.close()
    for until in (8, 9):
        Loop(tmp_path, settings=settings).run(until)
    fence = tmp_path / "run/incarnations/i000001/rank-0000.json"
    content = fence.read_bytes()
    fence.unlink()

    folder = RunFolder(tmp_path / "run")
    with pytest.raises(DamagedFile, match="it is missing, and incarnation 2 goes on from it"):
        collect(folder, read_run_id(folder), lowdiff.Retention(snapshots=1))
    Loop(tmp_path, settings=settings).run(20)
    fence.write_bytes(content)
    assert lowdiff.recover(tmp_path / "run", 7, staging=tmp_path / "staging").step == 7
