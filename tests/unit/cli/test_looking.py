"""``lowdiff inspect`` and ``lowdiff verify``, of folders and of stores."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lowdiff.persistence.files.paths import RunFolder
from lowdiff.persistence.format.values import same
from lowdiff.persistence.run.fences import read_fence, write_fence
from tests.unit.cli.commands import Command, command, copy, trained
from tests.unit.recovery.inspect.test_inspection import KEYS
from tests.unit.recovery.training import Trained, flip, train

__all__ = ["command", "copy", "trained"]  # fixtures


def test_inspect_prints_json_with_the_promised_keys(command: Command, trained: Trained) -> None:
    result = command("inspect", trained.run, "--json", "--staging", trained.staging)
    document = json.loads(result.out)
    assert result.code == 0
    assert list(document)[:4] == KEYS[:4]
    assert set(KEYS) <= set(document)
    assert set(document["differentials"]) >= {"first", "last", "count", "bytes"}
    assert document["recoverable"] == {"first": 0, "last": 12}


def test_inspect_prints_a_table(command: Command, trained: Trained) -> None:
    result = command("inspect", trained.run, "--staging", trained.staging)
    assert (result.code, result.err) == (0, "")
    rows = [" ".join(line.split()) for line in result.out.splitlines()]
    assert rows[0] == str(trained.run)
    assert "model 2,449 elements in 6 parameters" in rows
    assert "optimizer AdamW" in rows
    assert (
        "strategy log, topk(density=0.1, dense_below=64, value_bits=None, value_dtype=None, warmup=0)"
        in rows
    )
    assert f"ranks 1, 1 incarnation; cpu, torch {torch.__version__}" in rows
    assert "recoverable steps 0 to 12" in rows
    assert any(row.startswith("snapshots 0, 5, 10, 12 (") for row in rows)
    assert any(row.startswith("differentials 12, of steps 1 to 12 (") for row in rows)


@pytest.mark.cases(1)
@pytest.mark.parametrize("what", ["whole", "damaged", "died in attach"])
def test_inspect_and_verify_count_the_same_incarnations(
    command: Command, tmp_path: Path, what: str
) -> None:
    train(tmp_path, 4)
    run = train(tmp_path, 6)
    folder = RunFolder(run.run)
    if what == "damaged":
        flip(folder.fence(1, 0), 40)
    elif what == "died in attach":
        # Of another history, whose first snapshot never became durable.
        fence = read_fence(folder.fence(0, 0))
        write_fence(folder, replace(fence, incarnation=2, world_size=2))
    number = 3 if what == "died in attach" else 2
    shown = command("inspect", run.run, "--staging", run.staging)
    assert f", {number} incarnations;" in shown.out
    checked = command("verify", run.run, "--staging", run.staging)
    assert f"Checksums: {number} fences of {number} incarnations, " in checked.out


def test_inspect_says_what_is_damaged_and_what_is_left(command: Command, copy: Trained) -> None:
    flip(copy.segment(6), 30)  # its header; behind a good footer nothing is read
    rows = [
        " ".join(line.split())
        for line in command("inspect", copy.run, "--staging", copy.staging).out.splitlines()
    ]
    assert "recoverable steps 0 to 5, 10 to 12" in rows
    [damage] = [row for row in rows if row.startswith("damaged ")]
    assert str(copy.segment(6)) in damage


def test_a_staging_folder_that_is_not_there_is_named(command: Command, trained: Trained) -> None:
    result = command("inspect", trained.run, "--staging", "shm-of-before")
    assert result.code == 0
    assert (
        result.error == "lowdiff: --staging shm-of-before is no folder, so only disk is looked at"
    )
    # What is asked of a step with a snapshot of its own is nothing but that snapshot.
    planned = command("recover", trained.run, "--staging", trained.staging, "--plan")
    assert "replay       nothing: the snapshot is of that step" in planned.out


def test_verify_prints_what_it_checked(command: Command, trained: Trained) -> None:
    result = command("verify", trained.run, "--staging", trained.staging, "--workers", 2)
    assert (result.code, result.err) == (0, "")
    assert result.out.splitlines() == [
        "Checksums: 1 fence of 1 incarnation, 4 snapshot files, 3 segments, "
        + "0 staging files with 12 differentials",
        "Replayed 0 to 5: every bit as in snapshot 5",
        "Replayed 5 to 10: every bit as in snapshot 10",
        "Replayed 10 to 12: every bit as in snapshot 12",
        "The run is whole; recoverable steps: 0 to 12",
    ]


@pytest.mark.parametrize("what", ["snapshot", "segment", "missing segment"])
def test_verify_exits_with_1_and_names_the_first_difference(
    command: Command, copy: Trained, what: str
) -> None:
    path = copy.shard(10) if what == "snapshot" else copy.segment(6)
    if what == "missing segment":
        path.unlink()
    else:
        flip(path, 700)
    result = command("verify", copy.run, "--staging", copy.staging)
    failures = [line for line in result.out.splitlines() if line.startswith("FAILED: ")]
    assert (result.code, result.err) == (1, "")
    assert str(path) in failures[0]
    assert "The run is whole" not in result.out
    assert f"{len(failures)} failure" in result.out.splitlines()[-1]


def test_verify_prints_notes(command: Command, copy: Trained) -> None:
    copy.shard(10).with_suffix(".json").unlink()
    result = command("verify", copy.run, "--staging", copy.staging)
    assert result.code == 0
    assert f"Note: {copy.shard(10).parent} is not complete" in result.out


def test_verify_prints_json(command: Command, copy: Trained) -> None:
    flip(copy.shard(10), 700)
    result = command("verify", copy.run, "--json", "--staging", copy.staging)
    document = json.loads(result.out)
    assert result.code == 1
    assert document["ok"] is False
    assert document["failures"][0]["path"] == str(copy.shard(10))
    assert document["replays"][0] == {"first": 0, "last": 5, "compared": True}


def test_a_store_is_given_by_its_url(command: Command, trained: Trained, tmp_path: Path) -> None:
    url = f"file://{trained.run}"  # a store holds the very names that a run folder does
    result = command("inspect", url, "--json", "--staging", trained.staging)
    assert json.loads(result.out)["recoverable"] == {"first": 0, "last": 12}
    result = command("verify", url, "--staging", trained.staging)
    assert (result.code, result.err) == (0, "")
    assert result.out.endswith("The run is whole; recoverable steps: 0 to 12\n")
    out = tmp_path / "x.pt"
    result = command("recover", url, "--out", out, "--step", 7, "--staging", trained.staging)
    assert result.out.startswith(f"{out}: step 7 of {url}, ")
    assert same(torch.load(out, weights_only=True)["model"], dict(trained.models[7]))


def test_a_store_without_a_run_is_named_in_one_line(command: Command, tmp_path: Path) -> None:
    result = command("verify", f"file://{tmp_path}")
    assert result.code == 1
    assert "is not a lowdiff run: it has no run.json" in result.error
    result = command("verify", "nfs://server/run")
    assert result.code == 2
    assert "begins with one of s3://" in result.error
