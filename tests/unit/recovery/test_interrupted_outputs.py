"""What recovery writes is whole or not there: SIGKILL while it is written, and a full disk."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed.checkpoint as dcp

import lowdiff
from lowdiff.errors import StorageError
from lowdiff.persistence.format.values import same
from lowdiff.recovery.inspect.branch import start_run
from lowdiff.recovery.inspect.export import export
from lowdiff.recovery.state import RecoveredState
from tests.mounts import tmpfs_or_skip
from tests.unit.recovery.training import Trained, train

STEPS = 6
#: Ends in a process of its own, which waits in the middle of the first large file until it is killed.
_SCRIPT = """
import sys, time
from pathlib import Path
import lowdiff
from lowdiff.recovery.inspect import branch, export

run, staging, target, way, marker = sys.argv[1:]
state = lowdiff.recover(run, staging=staging)

def stop(*_, **__):
    Path(marker).touch()
    time.sleep(600)

if way == "run":
    branch.write_json = stop  # the shard is written, its manifest is not
    branch.start_run(state, target)
else:
    import torch.distributed.checkpoint.filesystem as filesystem
    filesystem.FileSystemWriter.finish = stop  # the tensors are written, the index is not
    export.export(state, target)
"""


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


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize("way", WAYS)
def test_killed_in_the_middle_it_leaves_no_name_and_does_not_hinder_the_next(
    trained: Trained, tmp_path: Path, way: str
) -> None:
    target, marker = tmp_path / "out", tmp_path / "marker"
    arguments = [str(p) for p in (trained.run, trained.staging, target, way, marker)]
    process = subprocess.Popen([sys.executable, "-c", _SCRIPT, *arguments])
    try:
        while not marker.exists():
            assert process.poll() is None
            time.sleep(0.02)
    finally:
        process.send_signal(signal.SIGKILL)
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
