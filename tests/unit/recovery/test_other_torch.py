"""Another version of PyTorch replays what it can, and gives no step up that the first one still has."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import lowdiff
from lowdiff.errors import DamagedFile, ReplayMismatch
from lowdiff.persistence.files.paths import RunFolder
from lowdiff.persistence.run.fences import read_fence, write_fence
from lowdiff.recovery.inspect.inspection import inspect
from tests.unit.recovery.test_state_checksums import (
    COMPARED,
    LAST,
    WRITTEN,
    live,
    one_weight,
    recover,
)

OTHER = "2.6.0+cpu"


def made_with(folder: Path, version: str, incarnation: int = 0) -> None:
    """Let the fence of a run say that another version of torch trained it."""
    run = RunFolder(folder / "run")
    path = run.fence(incarnation, 0)
    fence = read_fence(path)
    path.unlink()
    write_fence(run, replace(fence, environment=replace(fence.environment, torch_version=version)))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose step 12 this process does not give, as if its torch rounded otherwise."""
    folder = tmp_path_factory.mktemp("trained")
    live(folder, LAST, WRITTEN)
    made_with(folder, OTHER)
    return folder


def files(run: Path) -> set[str]:
    folders = ("incarnations", "segments", "snapshots")
    return {str(p.relative_to(run)) for name in folders for p in (run / name).rglob("*.*")}


def messages(caplog: pytest.LogCaptureFixture, code: str) -> list[str]:
    return [r.getMessage() for r in caplog.records if getattr(r, "code", "") == code]


def test_where_bits_part_both_versions_are_named_and_the_way_out(trained: Path) -> None:
    for step in (None, WRITTEN, LAST):
        with pytest.raises(ReplayMismatch) as caught:
            recover(trained, step)
        text = str(caught.value)
        assert caught.value.step == COMPARED + 1
        assert f"torch {OTHER} made the step, this is torch {torch.__version__}" in text
        assert f"Start the training once with torch {OTHER}" in text
        assert f"attach(..., step={COMPARED})" in text
        assert "not noticed" not in text


def test_attach_stops_and_voids_nothing(trained: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(trained, tmp_path / "copy"))
    before = files(folder / "run")
    loop = one_weight(folder)
    with pytest.raises(ReplayMismatch, match="No step is given up"):
        loop.attach()
    assert before <= files(folder / "run")
    assert inspect(folder / "run", folder / "staging").incarnations == 1
    made_with(folder, torch.__version__)  # the version to start with once
    loop = one_weight(folder, on_error="warn")
    assert loop.attach() == COMPARED
    loop.checkpointer.close()


def test_steps_are_given_up_on_purpose(trained: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(trained, tmp_path / "copy"))
    loop = one_weight(folder)
    assert loop.attach(step=COMPARED) == COMPARED
    loop.checkpointer.close()
    assert recover(folder).step == COMPARED


def test_both_versions_are_said_once_where_the_bits_agree(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    live(tmp_path, LAST, 0)
    recover(tmp_path)
    assert not messages(caplog, "LD617")  # the same version
    made_with(tmp_path, OTHER)
    recover(tmp_path, 0)
    assert not messages(caplog, "LD617")  # nothing was replayed
    assert recover(tmp_path).step == LAST
    (said,) = messages(caplog, "LD617")
    assert f"steps 1 to {LAST} were made with torch {OTHER}" in said
    assert f"replayed with torch {torch.__version__}" in said
    caplog.clear()
    loop = one_weight(tmp_path)
    assert loop.attach() == LAST
    assert len(messages(caplog, "LD617")) == 1
    loop.checkpointer.close()


def test_what_a_replica_left_in_memory_is_not_given_up_either(tmp_path: Path) -> None:
    live(tmp_path, WRITTEN, WRITTEN, compressor=None)
    made_with(tmp_path, OTHER)
    with pytest.raises(ReplayMismatch, match=r"No step .* with torch 2\.6\.0\+cpu, .*step="):
        one_weight(tmp_path, compressor=None).attach()


@pytest.mark.cases(3)
@pytest.mark.parametrize(
    "version",
    [
        "2.6.0",
        "v2.12.0-rc1",
        "2.9.0+PTX__x",
        "2.13.0+cpu",
        "2.9.0a0+git1a2b3c4",
        "2.6.0a0+df5bbc09d1.nv24.12",
        "2.16.0.dev20261101",
    ],
)
def test_versions_of_every_kind_of_build_are_versions(tmp_path: Path, version: str) -> None:
    live(tmp_path, 1, 0)
    made_with(tmp_path, version)
    assert recover(tmp_path).step == 1


@pytest.mark.cases(3)
@pytest.mark.parametrize("version", ["", "newest", "2.13.0\n", "2" * 200, "2.6 or so"])
def test_a_fence_whose_version_is_none_is_damaged(tmp_path: Path, version: str) -> None:
    live(tmp_path, 1, 0)
    made_with(tmp_path, version)
    with pytest.raises(DamagedFile, match=r"rank-0000\.json .*is no version"):
        read_fence(RunFolder(tmp_path / "run").fence(0, 0))
    with pytest.raises(lowdiff.LowDiffError):
        recover(tmp_path)
