"""A run of every format version, and of other PyTorches: read bit for bit, an older format is an error by name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import lowdiff
from lowdiff.compressors import TopK
from lowdiff.errors import OtherFormat
from lowdiff.persistence.format.segment_file import SegmentFile
from lowdiff.recovery.inspect.inspection import inspect
from lowdiff.recovery.inspect.verify import verify
from tests.golden.make import STEPS, sha256

HERE = Path(__file__).parent
STATES = json.loads((HERE / "v4" / "states.json").read_text())


# Beside the one of the format's first day: those of other versions of PyTorch, with checksums of optimizer state.
@pytest.fixture(params=["v4", "torch-2.10", "torch-2.15"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return Path(shutil.copytree(HERE / request.param / "run", tmp_path / "run"))


@pytest.mark.parametrize("step", range(STEPS + 1))
def test_every_step_has_the_bits_that_were_trained(run: Path, tmp_path: Path, step: int) -> None:
    found = lowdiff.recover(run, step, staging=tmp_path / "staging")
    average = found.stateful["average"]
    state = sha256(found.model_state_dict(), found.optimizer_state_dict(), average)
    assert state == STATES[str(step)]


def test_every_check_holds(run: Path, tmp_path: Path) -> None:
    report = verify(run, tmp_path / "staging")
    assert report.ok, report.failures
    assert report.recoverable == ((0, STEPS),)
    assert report.snapshots == (0, 5, 6)


def test_its_segments_are_sealed(run: Path) -> None:
    segments = sorted((run / "segments" / "rank-0000").glob("*.seg"))
    footers = [SegmentFile(path).footer for path in segments]
    assert [(len(f.offsets), list(f.rebases)) for f in footers if f] == [(5, [5]), (1, [])]
    assert [SegmentFile(path).damage() for path in segments] == [None, None]


def test_training_goes_on_from_it(run: Path, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4, bias=False))
    average = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
    with checkpointer(run, tmp_path) as opened:
        assert opened.attach(model, optimizer, average=average) == STEPS
        state = sha256(model.state_dict(), optimizer.state_dict(), average.state_dict())
    assert state == STATES[str(STEPS)]


def checkpointer(run: Path, root: Path) -> lowdiff.Checkpointer:
    compressor = TopK(0.25, dense_below=8)
    return lowdiff.Checkpointer(run, staging=root / "staging", compressor=compressor)


def attach(run: Path) -> None:
    model = nn.Linear(6, 8)
    with checkpointer(run, run.parent) as opened:
        opened.attach(model, torch.optim.SGD(model.parameters(), lr=0.5))


@pytest.mark.parametrize("version", [1, 2, 3])
@pytest.mark.parametrize("act", [lowdiff.recover, inspect, verify, attach])
def test_a_run_of_an_earlier_version_is_an_error_by_name_and_stays_as_it_is(
    tmp_path: Path, act: Callable[[Path], object], version: int
) -> None:
    run = Path(shutil.copytree(HERE / f"v{version}" / "run", tmp_path / "run"))
    before = contents(run)
    with pytest.raises(
        OtherFormat, match=rf"has format version {version}, .*version 4 only"
    ) as caught:
        act(run)
    assert caught.value.found == version
    assert "recover with the lowdiff that wrote it" in str(caught.value)
    after = contents(run)
    assert {name: after[name] for name in before} == before
    assert all(name.startswith("locks/") for name in after.keys() - before.keys())


def contents(run: Path) -> dict[str, bytes]:
    files = (path for path in run.rglob("*") if path.is_file())
    return {path.relative_to(run).as_posix(): path.read_bytes() for path in files}
