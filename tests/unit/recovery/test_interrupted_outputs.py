"""What recovery writes is whole or not there: SIGKILL while it is written, and a full disk."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import filesystem

import lowdiff
from lowdiff.errors import StorageError
from lowdiff.persistence.format.values import same
from lowdiff.recovery.inspect import branch
from lowdiff.recovery.inspect.branch import start_run
from lowdiff.recovery.inspect.export import export
from lowdiff.recovery.state import RecoveredState
from tests.mounts import tmpfs_or_skip
from tests.processes import Script
from tests.unit.recovery.training import Trained, train

STEPS = 6


def stuck(run: str, staging: str, target: str, way: str, marker: str) -> None:
    """Write an output, and wait in the middle of its first large file until it is killed."""
    state = lowdiff.recover(run, staging=staging)

    def stop(*_: object, **__: object) -> None:
        Path(marker).touch()
        time.sleep(600)

    if way == "run":
        vars(branch)["write_json"] = stop  # the shard is written, its manifest is not
        start_run(state, target)
    else:  # the tensors are written, the index is not
        filesystem.FileSystemWriter.finish = stop  # type: ignore[method-assign]
        export(state, Path(target))


def checked_run(folder: Path, trained: Trained) -> None:
    state = lowdiff.recover(folder, staging=folder.with_name("none"))
    assert same(dict(state.model_state_dict()), dict(trained.models[STEPS]))


def checked_folder(folder: Path, trained: Trained) -> None:
    content = {"step": 0}
    dcp.load(content, checkpoint_id=folder, no_dist=True)
    assert content["step"] == STEPS


WAYS: dict[
    str, tuple[Callable[[RecoveredState, Path], object], Callable[[Path, Trained], None]]
] = {
    "run": (start_run, checked_run),
    "folder": (export, checked_folder),
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return train(tmp_path_factory.mktemp("interrupted"), STEPS, end="crash")


@pytest.mark.cases(1)
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize("way", WAYS)
def test_killed_in_the_middle_it_leaves_no_name_and_does_not_hinder_the_next(
    trained: Trained, tmp_path: Path, way: str
) -> None:
    target, marker = tmp_path / "out", tmp_path / "marker"
    words = [trained.run, trained.staging, target, way, marker]
    process = Script(stuck, *words, output=tmp_path / "output.txt")
    try:
        while not marker.exists():
            assert process.poll() is None, process.printed()
            time.sleep(0.02)
    finally:
        process.kill()
        process.wait()
    assert not target.exists()
    assert [p.name for p in tmp_path.glob("out.*.partial")], "it was killed too early"
    write, check = WAYS[way]
    write(lowdiff.recover(trained.run, staging=trained.staging), target)
    check(target, trained)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize("way", WAYS)
def test_a_full_disk_is_named_and_nothing_is_left(
    trained: Trained, tmp_path: Path, way: str
) -> None:
    write, check = WAYS[way]
    state = lowdiff.recover(trained.run, staging=trained.staging)
    with tmpfs_or_skip(tmp_path / "disk", 1) as disk:
        filler = disk / "filler"
        filler.write_bytes(bytes((1 << 20) - (24 << 10)))
        with pytest.raises(StorageError, match="out could not be written"):
            write(state, disk / "out")
        assert [p.name for p in disk.iterdir()] == ["filler"]
        filler.unlink()
        write(state, disk / "out")
        check(disk / "out", trained)
