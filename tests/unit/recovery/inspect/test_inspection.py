from __future__ import annotations

import json
from pathlib import Path

import pytest

from lowdiff.errors import NotARun
from lowdiff.persistence.files.paths import RunFolder
from lowdiff.persistence.run.fences import create_run
from lowdiff.recovery.inspect.inspection import StepRange, inspect
from tests.unit.recovery.training import Trained, flip, train, two_optimizers
from tests.unit.recovery.verified import records_of

KEYS = [
    "run_id",
    "world_size",
    "parameters",
    "elements",
    "snapshots",
    "differentials",
    "recoverable",
    "bytes_per_step",
    "compressor",
    "optimizer",
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return train(tmp_path_factory.mktemp("inspect"), 12)


def test_a_run_is_described_in_plain_json(trained: Trained) -> None:
    document = json.loads(json.dumps(inspect(trained.run, trained.staging).document()))
    assert set(KEYS) <= set(document)
    assert len(document["run_id"]) == 32
    assert document["world_size"] == document["incarnations"] == 1
    assert document["parameters"] == 6
    assert document["elements"] == 24 * 48 + 48 + 2 * 48 + 48 * 24 + 1
    assert document["snapshots"] == [0, 5, 10, 12]
    assert document["recoverable"] == {"first": 0, "last": 12}
    assert document["compressor"] == {
        "name": "topk",
        "settings": {
            "density": 0.1,
            "dense_below": 64,
            "value_bits": None,
            "value_dtype": None,
            "warmup": 0,
        },
    }
    assert document["optimizer"] == "torch.optim.adamw.AdamW"
    assert document["damaged"] == 0


def test_bytes_are_those_of_the_files(trained: Trained) -> None:
    found = inspect(trained.run, trained.staging)
    segments = [records_of(p)[-1].end for p in trained.run.rglob("*.seg")]  # without footers
    stored = found.differentials
    assert stored is not None
    assert (stored.first, stored.last, stored.count, stored.staged) == (1, 12, 12, 0)
    assert stored.bytes == sum(segments) - 64 * len(segments)
    assert found.bytes_per_step == stored.bytes / 12
    shards = [p.stat().st_size for p in trained.run.rglob("*.safetensors")]
    assert found.snapshot_bytes == sum(shards)


def test_several_optimizers_are_all_named(tmp_path: Path) -> None:
    trained = train(tmp_path, 2, build=two_optimizers)
    assert inspect(trained.run, trained.staging).optimizer == (
        "torch.optim.sgd.SGD",
        "torch.optim.adam.Adam",
    )


def test_steps_that_are_only_in_staging_count_as_well(tmp_path: Path) -> None:
    trained = train(tmp_path, 8, end="kill", batch_size=100, snapshot_every=100)
    found = inspect(trained.run, trained.staging)
    assert found.differentials is not None
    assert (found.differentials.count, found.differentials.staged) == (8, 8)
    assert found.recoverable == StepRange(0, 8)
    without = inspect(trained.run, tmp_path / "elsewhere")
    assert without.recoverable == StepRange(0, 0)
    assert without.differentials is None
    assert without.bytes_per_step is None


def test_a_resumed_run_is_one_history(tmp_path: Path) -> None:
    train(tmp_path, 4, end="crash")
    trained = train(tmp_path, 7)
    found = inspect(trained.run, trained.staging)
    assert found.incarnations == 2
    assert found.snapshots == (0, 5, 7)
    assert found.differentials is not None
    assert found.differentials.count == 7
    assert found.recoverable_ranges == (StepRange(0, 7),)


def test_a_gap_splits_what_can_be_recovered(trained: Trained, tmp_path: Path) -> None:
    copy = trained.copied(tmp_path)
    copy.segment(6).unlink()
    found = inspect(copy.run, copy.staging)
    assert found.recoverable_ranges == (StepRange(0, 5), StepRange(10, 12))
    assert found.recoverable == StepRange(10, 12)
    assert found.differentials is not None
    assert (found.differentials.first, found.differentials.last) == (1, 12)
    assert found.differentials.count == 7


def test_damaged_files_are_counted(trained: Trained, tmp_path: Path) -> None:
    copy = trained.copied(tmp_path)
    flip(copy.segment(6), 30)  # its header; what a footer is behind is not read
    flip(copy.shard(5).with_suffix(".json"), 30)
    assert inspect(copy.run, copy.staging).damaged == 2


def test_a_run_that_never_began_is_empty(tmp_path: Path) -> None:
    create_run(RunFolder(tmp_path / "run"), "ab" * 16)
    found = inspect(tmp_path / "run", tmp_path)
    assert found.run_id == "ab" * 16
    assert (found.world_size, found.parameters, found.elements) == (0, 0, 0)
    assert (found.snapshots, found.differentials, found.recoverable) == ((), None, None)
    assert (found.compressor, found.optimizer, found.bytes_per_step) == (None, None, None)
    json.dumps(found.document())


@pytest.mark.parametrize("make", [True, False], ids=["other folder", "no folder"])
def test_a_folder_that_is_no_run_is_named(tmp_path: Path, make: bool) -> None:
    if make:
        (tmp_path / "run").mkdir()
    with pytest.raises(NotARun, match=f"{tmp_path / 'run'} is not a lowdiff run"):
        inspect(tmp_path / "run", tmp_path)
