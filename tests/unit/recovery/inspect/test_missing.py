"""What `inspect` says of a run whose trainer died, trains, went back or was damaged: what is missing, and why."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from crc32c import crc32c

import lowdiff
from lowdiff.compressors import TopK
from lowdiff.persistence.files import locks
from lowdiff.persistence.files.paths import RunFolder
from lowdiff.recovery.inspect.inspection import StepRange, inspect
from lowdiff.recovery.inspect.missing import MissingSteps
from tests.processes import Script
from tests.unit.cli.commands import Command, command
from tests.unit.recovery.training import flip, train

__all__ = ["command"]

#: A screen: rows of a terminal.
SCREEN = 24
STEPS = 7


def die(folder: str, strategy: str) -> None:
    """Train, and end as `kill -9` ends a process and its writer: all in staging, nothing but the base on disk."""
    root = Path(folder)
    compressor = TopK(0.5) if strategy == "log" else None
    settings: dict[str, Any] = {"compressor": compressor, "snapshot_every": 100, "batch_size": 100}
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    checkpointer = lowdiff.Checkpointer(root / "run", staging=root / "staging", **settings)
    checkpointer.attach(model, optimizer)
    for step in checkpointer.steps(100):
        if step == STEPS:
            os.kill(checkpointer.stats()["writer_pid"], signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        model(torch.ones(2, 4)).square().sum().backward()
        optimizer.step()


def killed(folder: Path, strategy: str) -> Path:
    process = Script(die, folder, strategy, output=folder / "printed.txt")
    assert process.wait() == -signal.SIGKILL, process.printed()
    return folder / "run"


@pytest.mark.parametrize("strategy", ["log", "replica"])
def test_steps_that_went_with_staging_memory_are_named_and_staging_gives_them_back(
    tmp_path: Path, strategy: str
) -> None:
    run = killed(tmp_path, strategy)
    kept = inspect(run, tmp_path / "staging")
    assert kept.recoverable is not None
    assert (kept.recoverable.last, kept.missing, kept.trainer) == (STEPS, (), "")
    elsewhere = inspect(run, tmp_path / "elsewhere")
    assert elsewhere.staging_elsewhere == str(tmp_path / "staging")
    [missing] = elsewhere.missing
    assert missing.first == 1
    assert missing.why.startswith(f"if any, in staging memory alone: {tmp_path / 'staging'} on the")
    (tmp_path / "staging").rename(tmp_path / "moved")  # its writer or replica may still use it
    (tmp_path / "staging").mkdir()
    gone = inspect(run, tmp_path / "staging")
    assert gone.staging_elsewhere == ""
    [missing] = gone.missing
    assert missing.why.endswith("has not that of all ranks")


def test_how_far_it_had_come_is_told_where_the_lease_tells_it(tmp_path: Path) -> None:
    run = killed(tmp_path, "log")
    lease = RunFolder(run).lease
    token, machine, beats, holder, *_ = lease.read_text().rstrip().split("\t")
    lease.write_text(f"{token}\t{machine}\t{beats}\t{holder}\t0 5")
    [missing] = inspect(run, tmp_path / "elsewhere").missing
    assert (missing.first, missing.last) == (1, 5)


def test_a_run_that_trains_says_who_trains_it_and_misses_nothing(tmp_path: Path) -> None:
    seen = []

    def look(step: int, _: torch.nn.Module) -> None:
        seen.append(inspect(tmp_path / "run", tmp_path / "elsewhere"))

    train(tmp_path, 2, inside=look)
    assert {found.trainer.partition(" on ")[0] for found in seen} == {f"process {os.getpid()}"}
    assert seen[-1].missing == ()
    closed = inspect(tmp_path / "run", tmp_path / "elsewhere")
    assert (closed.trainer, closed.missing, closed.staging_elsewhere) == ("", (), "")


def test_what_retention_removed_is_said_so(tmp_path: Path) -> None:
    trained = train(tmp_path, 17, retention=1)
    found = inspect(trained.run, trained.staging)
    assert found.recoverable is not None
    expected = MissingSteps(0, found.recoverable.first - 1, "removed by retention")
    assert found.missing == (expected,)


def test_so_is_what_an_incarnation_made_that_retention_removed(tmp_path: Path) -> None:
    train(tmp_path, 8, retention=1)
    trained = train(tmp_path, 27, retention=1)
    found = inspect(trained.run, trained.staging)
    assert found.recoverable is not None
    gone = [s for m in found.missing if m.last is not None for s in range(m.first, m.last + 1)]
    assert gone == list(range(found.recoverable.first))
    assert {m.why for m in found.missing} <= {
        "removed by retention",
        "of incarnations of which retention, or damage, left nothing",
    }


def test_staging_memory_of_another_folder_with_that_id_is_said_to_be_so(tmp_path: Path) -> None:
    run = killed(tmp_path, "log")
    copy = shutil.copytree(run, tmp_path / "copy")
    [missing] = inspect(copy, tmp_path / "staging").missing
    assert f"is of {run.resolve()}, which has the same id" in missing.why


@pytest.mark.parametrize("is_small", [True, False])
def test_a_small_run_is_read_whole_and_promises_no_damaged_step(
    tmp_path: Path, is_small: bool, limits: Callable[..., None]
) -> None:
    limits(small_run_bytes=1 << 20 if is_small else 0)
    trained = train(tmp_path, 12, retention=None)
    flip(trained.segment(6), 700)
    found = inspect(trained.run, trained.staging)
    assert found.is_read == is_small
    assert found.damaged == is_small
    assert (found.recoverable == StepRange(10, 12)) == is_small


def test_steps_between_the_snapshots_of_a_replica_are_not_kept(tmp_path: Path) -> None:
    trained = train(tmp_path, 12, compressor=None, retention=None)
    found = inspect(trained.run, trained.staging)
    why = "strategy replica keeps steps between snapshots in memory alone"
    assert [m.why for m in found.missing] == [why] * len(found.missing)
    assert found.missing[-1].last == 11
    gone = {s for m in found.missing if m.last is not None for s in range(m.first, m.last + 1)}
    there = {s for r in found.recoverable_ranges for s in range(r.first, r.last + 1)}
    assert gone.isdisjoint(there)
    assert gone | there == set(range(13))


def test_a_run_that_went_back_names_what_it_made_void(tmp_path: Path) -> None:
    train(tmp_path, 8)
    model = train.__globals__["Model"]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    memory = train.__globals__["Memory"]()
    checkpointer = lowdiff.Checkpointer(
        tmp_path / "run",
        compressor=TopK(0.1, dense_below=64),
        staging=tmp_path / "staging",
        retention=None,
    )
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 6, 6])
    assert checkpointer.attach(model, optimizer, step=6, memory=memory, scheduler=scheduler) == 6
    checkpointer.close()
    found = inspect(tmp_path / "run", tmp_path / "staging")
    assert found.missing == (MissingSteps(7, 8, "void, since incarnation 1 went on from step 6"),)


def test_a_lock_that_may_not_be_read_leaves_it_to_the_lease(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Any, *_: Any) -> int:
        raise PermissionError(13, "Permission denied", str(path))

    seen = []

    def look(step: int, _: torch.nn.Module) -> None:
        with monkeypatch.context() as patched:
            patched.setattr(os, "open", refuse)
            seen.append(locks.is_locked(RunFolder(tmp_path / "run").lock(0)))

    train(tmp_path, 1, inside=look)
    assert seen == [None]


def test_a_gap_names_what_is_missing_and_the_damaged_file(tmp_path: Path) -> None:
    trained = train(tmp_path, 12, retention=None)
    flip(trained.segment(6), 30)
    found = inspect(trained.run, trained.staging)
    assert found.missing == (
        MissingSteps(6, 9, "the differential of step 6 is missing for rank 0"),
    )
    assert [str(trained.segment(6)) in damage for damage in found.damage] == [True]


def newer(tmp_path: Path) -> Path:
    run = train(tmp_path, 2).run
    for path in run.rglob("*.json"):
        document = {**json.loads(path.read_text()), "format": 99}
        del document["crc32c"]
        plain = json.dumps(document, sort_keys=True, separators=(",", ":")).encode()
        path.write_text(json.dumps({**document, "crc32c": crc32c(plain)}))
    return run


def empty(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


def never_begun(tmp_path: Path) -> Path:
    run = train(tmp_path, 2).run
    for path in run.iterdir():
        if path.name != "run.json":
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    return run


def damaged(tmp_path: Path) -> Path:
    trained = train(tmp_path, 30, batch_size=1, retention=None)
    for path in [*trained.run.rglob("*.seg"), *trained.run.rglob("rank-*.json")]:
        flip(path, 30)
    return trained.run


def without_staging(tmp_path: Path) -> Path:
    run = killed(tmp_path, "log")
    (tmp_path / "staging").rename(tmp_path / "moved")
    return run


@pytest.mark.parametrize(
    ("make", "code", "said"),
    [
        (lambda folder: folder / "nowhere", 1, "no such folder"),
        (empty, 1, "it has no run.json"),
        (newer, 1, "has format version 99, this lowdiff reads version 4 only"),
        (never_begun, 0, "start the training script"),
        (damaged, 0, "more"),
        (without_staging, 0, "are there more steps?"),
    ],
    ids=["no folder", "empty", "newer", "never begun", "damaged", "without staging"],
)
def test_a_strangers_run_is_one_screen_that_ends_with_what_to_do(
    command: Command, tmp_path: Path, make: Any, code: int, said: str
) -> None:
    result = command("inspect", make(tmp_path))
    assert result.code == code
    assert said in result.out + result.err
    assert len((result.out + result.err).splitlines()) <= SCREEN
    assert "Traceback" not in result.err
    if code == 0:
        assert "# " in result.out.splitlines()[-1], "it ends with commands"


def test_the_commands_that_it_shows_work(
    command: Command, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    run = killed(tmp_path, "log")
    shown = command("inspect", run, "--staging", "staging").out.splitlines()
    lines = [line.partition("  #")[0].split() for line in shown if line.startswith("  lowdiff ")]
    assert [words[1] for words in lines] == ["recover", "recover", "timeline"]
    for words in lines:
        assert command(*words[1:]).code == 0, words


def test_the_document_is_json(tmp_path: Path) -> None:
    document = json.loads(json.dumps(inspect(killed(tmp_path, "log"), tmp_path).document()))
    assert document["missing"][0]["first"] == 1
    assert document["strategy"] == "log"
