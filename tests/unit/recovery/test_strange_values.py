"""Values that pass their checksums and make no sense end in a named error."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import lowdiff
from lowdiff.errors import DamagedFile
from lowdiff.persistence.files.paths import RunFolder
from lowdiff.persistence.run.fences import read_fence, write_fence
from lowdiff.types import Fence, Layout
from tests.unit.recovery.training import Trained, train


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return train(tmp_path_factory.mktemp("strange"), until=3)


def rewrite(run: Trained, fence: Fence) -> None:
    folder = RunFolder(run.run)
    folder.fence(0, 0).unlink()
    write_fence(folder, fence)


def test_a_name_that_stands_for_nothing(trained: Trained, tmp_path: Path) -> None:
    copy = trained.copied(tmp_path)
    fence = read_fence(RunFolder(copy.run).fence(0, 0))
    name = next(iter(fence.names))
    rewrite(copy, replace(fence, names={**fence.names, name: "../.."}))
    state = lowdiff.recover(copy.run, staging=copy.staging)
    with pytest.raises(DamagedFile, match=r"it refers to \.\./\.\., which is not there"):
        state.model_state_dict()


def test_strides_that_lead_out_of_a_tensor(trained: Trained, tmp_path: Path) -> None:
    copy = trained.copied(tmp_path)
    fence = read_fence(RunFolder(copy.run).fence(0, 0))
    parameters = [
        replace(p, strides=(20, 1 << 31)) if len(p.shape) == 2 else p
        for p in fence.layout.parameters
    ]
    rewrite(copy, replace(fence, layout=Layout(tuple(parameters))))
    with pytest.raises(DamagedFile):
        lowdiff.recover(copy.run, staging=copy.staging)
