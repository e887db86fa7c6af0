"""``lowdiff gc``, as a user types it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lowdiff.persistence.files.locks import FileLock
from lowdiff.persistence.files.paths import RunFolder
from lowdiff.persistence.format.document import copy_of
from lowdiff.persistence.format.image import check_shard
from lowdiff.persistence.retention.collect import retention_locked
from lowdiff.persistence.run.fences import read_run_id
from lowdiff.persistence.run.journal import Pin, write_pin, write_policy
from lowdiff.types import Retention
from tests.mounts import remount, tmpfs_or_skip
from tests.unit.cli.commands import Command, Result, command, copy, trained
from tests.unit.recovery.training import Trained, flip, train

__all__ = ["command", "copy", "trained"]  # fixtures


def snapshots(copy: Trained) -> list[int]:
    return [step for _, step, _ in RunFolder(copy.run).snapshots()]


def test_it_says_what_goes_and_what_stays(command: Command, copy: Trained) -> None:
    result = command("gc", copy.run, "--keep-snapshots", "1", "--every-steps", "5", "--dry-run")
    assert (result.code, result.err) == (0, "")
    lines = result.out.splitlines()
    assert lines[0].startswith("Would remove snapshots/i000000-s0000000000 (")
    assert lines[0].endswith("): older than what is kept")
    assert lines[3:6] == [
        "Kept step 5: every 5 steps",
        "Kept step 10: every 5 steps",
        "Kept step 12 to the newest: the newest snapshots",
    ]
    assert lines[6].startswith("Would remove ")
    assert " in 3 items; " in lines[6]
    assert snapshots(copy) == [0, 5, 10, 12]
    result = command("gc", copy.run, "--keep-snapshots", "1", "--every-steps", "5")
    assert result.out == "\n".join(lines).replace("Would remove", "Removed") + "\n"
    assert snapshots(copy) == [5, 10, 12]
    assert command("verify", copy.run, "--staging", copy.staging).code == 0


def test_what_would_go_is_said_of_a_folder_that_cannot_be_written(
    command: Command, trained: Trained, tmp_path: Path
) -> None:
    with tmpfs_or_skip(tmp_path / "disk", 64) as disk:
        shutil.copytree(trained.run, disk / "run", ignore=shutil.ignore_patterns("*.lock"))
        remount(disk, "ro")
        result = command("gc", disk / "run", "--keep-snapshots", 1, "--dry-run")
        assert result.code == 0, result.err
        assert "Would remove snapshots/" in result.out
        result = command("gc", disk / "run", "--keep-snapshots", 1)
        assert result.code == 1
        assert "Read-only file system" in result.err


def test_a_full_disk_is_freed(command: Command, trained: Trained, tmp_path: Path) -> None:
    with tmpfs_or_skip(tmp_path / "disk", 8) as disk:
        shutil.copytree(trained.run, disk / "run")
        (disk / "filler").write_bytes(bytes(shutil.disk_usage(disk).free))
        result = command("gc", disk / "run", "--keep-snapshots", 1)
        assert result.code == 0, result.err
        assert [step for _, step, _ in RunFolder(disk / "run").snapshots()] == [12]
        assert command("verify", disk / "run", "--staging", tmp_path / "none").code == 0


def test_it_keeps_what_the_trainer_was_told_to_keep(command: Command, copy: Trained) -> None:
    result = command("gc", copy.run)
    assert result.code == 2
    assert "keeps every step; say what to keep" in result.error
    folder = RunFolder(copy.run)
    write_policy(folder, read_run_id(folder), Retention(2))
    result = command("gc", copy.run, "--json")
    document = json.loads(result.out)
    assert document["policy"]["snapshots"] == 2
    assert len(document["removed"]) == 4
    assert document["bytes_removed"] == sum(entry["bytes"] for entry in document["removed"]) > 0
    window = {"first": 10, "last": None, "reason": "the newest snapshots"}
    assert document["kept"] == [window]
    assert snapshots(copy) == [10, 12]


def test_a_limit_of_bytes_keeps_as_many_snapshots_as_fit(command: Command, copy: Trained) -> None:
    everything = json.loads(command("gc", copy.run, "--total-bytes", 10**9, "--json").out)
    assert everything["removed"] == []
    limit = everything["bytes_kept"] - 1
    assert command("gc", copy.run, "--total-bytes", limit).code == 0
    assert snapshots(copy) == [5, 10, 12]
    result = command("gc", copy.run, "--total-bytes", "1")
    assert "That is more than 1 byte: the newest snapshot" in result.out
    assert snapshots(copy) == [12]


def test_a_pin_is_shown_obeyed_and_removed(command: Command, copy: Trained) -> None:
    folder = RunFolder(copy.run)
    run_id = read_run_id(folder)
    write_pin(folder, run_id, Pin("best", 7, 0))
    write_pin(folder, run_id, Pin("lost", 7, 3))
    shown = command("inspect", copy.run, "--staging", copy.staging)
    assert "best: step 7, lost: step 7 (void)" in shown.out
    result = command("gc", copy.run, "--keep-snapshots", "1")
    assert "Kept step 5 to 7: pinned: best" in result.out
    assert "Pin lost keeps nothing: the run went back before step 7; --unpin lost" in result.out
    assert snapshots(copy) == [5, 12]
    for more in ([], ["--dry-run"]):
        result = command("gc", copy.run, "--unpin", "best", "--unpin", "bset", *more)
        assert result.code == 2
        assert "has no pin 'bset'; there are: best, lost" in result.error
    for options, left in ((["--dry-run"], [5, 12]), ([], [12])):
        arguments = ["--keep-snapshots", "1", "--unpin", "best", "--unpin", "lost", *options]
        assert command("gc", copy.run, *arguments).code == 0
        assert snapshots(copy) == left
    assert list(folder.pins()) == []


def test_only_snapshots_whose_checksums_hold_count(command: Command, copy: Trained) -> None:
    flip(copy.shard(10), 700)
    assert command("gc", copy.run, "--keep-snapshots", "2").code == 0
    assert snapshots(copy) == [5, 10, 12]
    assert command("recover", copy.run, "--out", copy.run / "x.pt", "--step", "11").code == 0


def at_first_checksum(monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
    """Have something happen when the first shard is about to be read."""
    acts = [act]

    def check(*arguments: Any) -> Path:
        if acts:
            acts.pop()()
        return check_shard(*arguments)

    monkeypatch.setattr("lowdiff.persistence.retention.collect.check_shard", check)


@pytest.mark.parametrize("options", [[], ["--dry-run"]], ids=str)
def test_the_run_is_free_while_checksums_are_read(
    command: Command, copy: Trained, monkeypatch: pytest.MonkeyPatch, options: list[str]
) -> None:
    """They take minutes; an attach or a pin must not wait for them."""
    num_checks = 0

    def check(*arguments: Any) -> Path:
        nonlocal num_checks
        num_checks += 1
        with retention_locked(RunFolder(copy.run), timeout_seconds=0.0):
            return check_shard(*arguments)

    monkeypatch.setattr("lowdiff.persistence.retention.collect.check_shard", check)
    assert command("gc", copy.run, "--keep-snapshots", "1", *options).code == 0
    assert num_checks == 4
    assert snapshots(copy) == ([0, 5, 10, 12] if options else [12])


@pytest.mark.parametrize("is_damaged", [False, True])
def test_a_snapshot_that_comes_while_checksums_are_read_stays_and_lets_none_go(
    command: Command,
    copy: Trained,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    is_damaged: bool,
) -> None:
    run = Trained(copy.run.rename(tmp_path / "run"), tmp_path / "staging")

    def go_on() -> None:
        train(tmp_path, 15)
        if is_damaged:
            flip(run.shard(15, incarnation=1), 700)

    at_first_checksum(monkeypatch, go_on)
    assert command("gc", run.run, "--keep-snapshots", "1").code == 0
    assert snapshots(run) == [12, 15]
    assert command("recover", run.run, "--step", "14", "--out", tmp_path / "x.pt").code == 0
    assert command("gc", run.run, "--keep-snapshots", "1").code == 0
    assert snapshots(run) == ([12, 15] if is_damaged else [15])


def test_a_pin_on_an_old_snapshot_that_comes_while_checksums_are_read_is_obeyed(
    command: Command, copy: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when what a dead life had staged is made durable."""
    folder = RunFolder(copy.run)
    late, outside = copy.shard(5).parent, copy.run.parent / "late"
    late.rename(outside)
    shutil.rmtree(copy.shard(0).parent)

    def come() -> None:
        outside.rename(late)
        write_pin(folder, read_run_id(folder), Pin("best", 7, 0))

    at_first_checksum(monkeypatch, come)
    result = command("gc", copy.run, "--keep-snapshots", "1")
    assert "Kept step 5 to 7: pinned: best" in result.out
    assert snapshots(copy) == [5, 12]
    recovered = command("recover", copy.run, "--step", "7", "--out", copy.run.parent / "x.pt")
    assert recovered.code == 0


def test_damage_that_hides_what_must_stay_stops_it(command: Command, copy: Trained) -> None:
    fence = RunFolder(copy.run).fence(0, 0)
    for path in (fence, copy_of(fence)):
        flip(path, 40)
    result = command("gc", copy.run, "--keep-snapshots", "1")
    assert result.code == 1
    assert "is damaged" in result.error
    assert snapshots(copy) == [0, 5, 10, 12]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "say which run"),
        (["run", "--force"], "--force goes with --staging"),
        (["run", "--staging", "--every-steps", "3"], "--staging goes with"),
        (["run", "--staging", "--unpin", "x"], "--staging goes with"),
        (["--staging", "--yes"], "--yes needs a run or --all-runs"),
        (["run", "--staging", "--all-runs"], "either a run or --all-runs"),
        (["run", "--yes"], "--yes goes with --staging"),
        (["--all-runs"], "--all-runs goes with --staging"),
        (["run", "--staging-folder", "x"], "--staging-folder goes with --staging"),
    ],
    ids=str,
)
def test_options_that_do_not_go_together_are_refused(
    command: Command, arguments: list[str], message: str
) -> None:
    result = command("gc", *arguments)
    assert result.code == 2
    assert message in result.error


def test_bad_values_and_folders_are_refused(command: Command, copy: Trained) -> None:
    assert command("gc", copy.run, "--keep-snapshots", "0").code == 2
    assert command("gc", copy.run, "--unpin", "../run").code == 2
    assert command("gc", copy.run.parent, "--keep-snapshots", "1").code == 1


@pytest.mark.slow
def test_staging_memory_is_listed_and_cleared_of_one_run_or_of_all(
    command: Command, tmp_path: Path
) -> None:
    staging = tmp_path / "memory"
    crashed = train(tmp_path / "crashed", 6, end="crash", staging=staging)
    killed = train(tmp_path / "killed", 6, end="kill", batch_size=1000, staging=staging)

    def clear(*arguments: object) -> Result:
        return command("gc", *map(str, arguments), "--staging", "--staging-folder", staging)

    stages = sorted(staging.glob("*/i*"))
    (lost,) = (s for s in stages if read_run_id(RunFolder(killed.run)) == s.parent.name)
    for arguments in ([], [crashed.run], ["--all-runs"], ["--dry-run", "--yes", "--all-runs"]):
        listed = clear(*arguments)
        assert listed.code == 0, listed.err
        assert "Would remove 1 folder of" in listed.out
        assert (f"Kept {lost} (" in listed.out) == (arguments != [crashed.run])
        assert sorted(staging.glob("*/i*")) == stages
    assert "to remove it, say `--yes`" in clear().out
    assert "are here only; the next attach goes on from them" in clear(killed.run).out
    assert "Would remove 0 folders" in clear(killed.run).out

    assert "Removed 0 folders" in clear(killed.run, "--yes").out
    assert sorted(staging.glob("*/i*")) == stages, "another run's memory is left alone"
    assert "Removed 1 folder of" in clear("--all-runs", "--yes").out
    assert list(staging.glob("*/i*")) == [lost]
    lock = FileLock(lost / "trainer.lock")
    assert lock.acquire("process 7")
    document = json.loads(clear(killed.run, "--force", "--yes", "--json").out)
    assert [f["reason"] for f in document["folders"]] == ["in use by process 7"]
    lock.release()
    assert "Would remove 1 folder" in clear(killed.run, "--force").out
    assert lost.exists()
    assert clear(killed.run, "--force", "--yes").code == 0
    assert not lost.exists()
    assert train(tmp_path / "crashed", 8).models[8]  # goes on from what is durable


def test_memory_of_a_deleted_run_is_found_by_the_runs_path(
    command: Command, tmp_path: Path
) -> None:
    killed = train(tmp_path, 6, end="kill")
    shutil.rmtree(killed.run)
    line = ["gc", killed.run, "--staging", "--staging-folder", killed.staging, "--force", "--yes"]
    assert "Removed 1 folder" in command(*line).out
    assert not any(killed.staging.iterdir())
    result = command(*line)
    assert result.code == 1, "nothing is left that says that there was a run"
    assert str(killed.run) in result.error
