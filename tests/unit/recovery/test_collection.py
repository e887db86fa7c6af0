"""Collections of real runs: interrupted after every deletion, and beside readers."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from crc32c import crc32c

import lowdiff
from lowdiff.errors import StepNotFound
from lowdiff.persistence.files.paths import RunFolder
from lowdiff.persistence.format.document import write_json
from lowdiff.persistence.format.image import Manifest
from lowdiff.persistence.format.values import same
from lowdiff.persistence.retention.collect import collect
from lowdiff.persistence.run.catalog import Catalog, add_segments, scan
from lowdiff.persistence.run.fences import read_run_id
from lowdiff.persistence.run.journal import Pin, write_pin
from lowdiff.recovery.damage import judge
from lowdiff.recovery.inspect import verify as verify_module
from lowdiff.recovery.inspect.verify import verify
from lowdiff.types import Retention
from tests.unit.recovery.training import Trained, part_sums, train
from tests.unlinked import by_os

POLICY = Retention(snapshots=1, every_steps=9)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Snapshots at 0, 3, 6 ... 15 and 16; step 4 is pinned, step 9 kept for ever."""
    made = train(tmp_path_factory.mktemp("collection"), 16, snapshot_every=3)
    folder = RunFolder(made.run)
    write_pin(folder, read_run_id(folder), Pin("best", 4, 0))
    return made


@pytest.fixture
def copy(trained: Trained, tmp_path: Path) -> Trained:
    return trained.copied(tmp_path)


class Killed(BaseException):
    """SIGKILL, as far as files are concerned."""


@contextmanager
def killed_after(operations: int) -> Iterator[list[Any]]:
    """Whoever deletes the next file or folder after so many is killed."""
    done: list[Any] = []

    def counted(real: Callable[..., None]) -> Callable[..., None]:
        def operation(*arguments: Any, **options: Any) -> None:
            if len(done) == operations:
                raise Killed
            done.append(arguments)
            real(*arguments, **options)

        return operation

    with pytest.MonkeyPatch.context() as patch:
        by_os(patch)
        patch.setattr(os, "unlink", counted(os.unlink))
        patch.setattr(os, "rmdir", counted(os.rmdir))
        yield done


@contextmanager
def full_disk(folder: RunFolder, num_snapshots: int) -> Iterator[None]:
    """One with room for so many snapshots, and for nothing that retention writes down beside more."""

    def write(*arguments: Any) -> None:
        if len(list(folder.snapshots())) > num_snapshots:
            raise OSError(errno.ENOSPC, "No space left on device")
        write_json(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lowdiff.persistence.run.journal.write_json", write)
        yield


def collected(run: Path, policy: Retention = POLICY) -> None:
    folder = RunFolder(run)
    collect(folder, read_run_id(folder), policy)


class Later:
    """What a run has after a step, out of sight until that comes."""

    def __init__(self, trained: Trained, step: int) -> None:
        folder = RunFolder(trained.run)
        found = [(last, path) for _, last, path in folder.snapshots()]
        found += [(first, path) for _, _, first, path in folder.segments()]
        self._hidden = [(when, path) for when, path in found if when > step]
        for _, path in self._hidden:
            path.rename(path.with_name("later-" + path.name))

    def comes(self, step: int) -> None:
        """Up to a step, all is there."""
        for when, path in self._hidden:
            if when <= step and not path.exists():
                path.with_name("later-" + path.name).rename(path)


@pytest.mark.slow
@pytest.mark.parametrize("room", [1000, 3], ids=["room for all", "room once all that go are gone"])
def test_killed_after_any_deletion_all_that_is_kept_is_exact_and_nothing_looks_lost(
    trained: Trained, tmp_path: Path, room: int
) -> None:
    for operations in range(1000):
        (tmp_path / str(operations)).mkdir()
        copy = trained.copied(tmp_path / str(operations))
        with full_disk(RunFolder(copy.run), room), killed_after(operations) as done:
            try:
                collected(copy.run)
            except Killed:
                finished = False
            else:
                finished = True
        report = verify(copy.run, copy.staging)
        assert report.failures == (), operations
        assert report.recoverable[-1][1] == 16
        for step in (4, 9, 16):
            state = lowdiff.recover(copy.run, step, staging=copy.staging)
            assert same(dict(state.model_state_dict()), dict(trained.models[step]))
        if finished:
            break
    assert len(done) > 15
    assert [step for _, step, _ in RunFolder(copy.run).snapshots()] == [3, 9, 16]
    with pytest.raises(StepNotFound, match="recoverable steps: 3 to 6, 9, 16"):
        lowdiff.recover(copy.run, 8, staging=copy.staging)


def test_a_step_that_retention_did_not_remove_is_still_missed(copy: Trained) -> None:
    collected(copy.run)
    copy.segment(4).unlink()  # of the pinned step
    assert verify(copy.run, copy.staging).recoverable == ((3, 3), (9, 9), (16, 16))
    assert not verify(copy.run, copy.staging).ok


def test_without_its_notes_what_is_kept_is_still_exact(copy: Trained) -> None:
    collected(copy.run)
    notes = RunFolder(copy.run).retention_file
    notes.write_bytes(notes.read_bytes()[:-20])
    assert str(notes) in [f.path for f in verify(copy.run, copy.staging).failures]
    state = lowdiff.recover(copy.run, 4, staging=copy.staging)
    assert same(dict(state.model_state_dict()), dict(copy.models[4]))
    notes.unlink()
    assert verify(copy.run, copy.staging).failures  # what was removed passes for lost
    assert lowdiff.recover(copy.run, staging=copy.staging).step == 16


@pytest.mark.parametrize(
    "policy",
    [POLICY, Retention(snapshots=1, every_steps=3)],
    ids=["snapshots go", "only differentials go"],
)
def test_what_goes_while_a_run_is_verified_is_a_note(
    copy: Trained, policy: Retention, monkeypatch: pytest.MonkeyPatch
) -> None:
    def late(folder: RunFolder, catalog: Any, *, check_all: bool) -> Any:
        found = judge(folder, catalog, check_all=check_all)
        collected(copy.run, policy)
        return found

    monkeypatch.setattr(verify_module, "judge", late)
    report = verify(copy.run, copy.staging)
    assert report.failures == ()
    assert any(
        "were not verified: a part of them was removed" in note.message for note in report.notes
    )


def test_differentials_that_go_before_they_are_listed_are_not_lost(
    copy: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    def late(*arguments: Any, **options: Any) -> None:
        collected(copy.run)
        add_segments(*arguments, **options)

    monkeypatch.setattr("lowdiff.persistence.run.catalog.add_segments", late)
    report = verify(copy.run, copy.staging)
    assert report.failures == ()
    assert report.recoverable == ((3, 6), (9, 9), (16, 16))


def test_retention_may_overtake_two_looks(copy: Trained, monkeypatch: pytest.MonkeyPatch) -> None:
    later = Later(copy, 6)
    looks = []

    def beside_a_live_run(*arguments: Any, **options: Any) -> None:
        looks.append(arguments)
        if len(looks) == 2:
            later.comes(16)
            collected(copy.run, Retention(snapshots=1))
        add_segments(*arguments, **options)
        if len(looks) == 1:
            later.comes(9)

    monkeypatch.setattr("lowdiff.persistence.run.catalog.add_segments", beside_a_live_run)
    report = verify(copy.run, copy.staging)
    assert report.failures == ()
    assert report.recoverable == ((3, 6), (16, 16))
    assert len(looks) == 2


def test_a_snapshot_that_was_completed_meanwhile_is_no_note(
    copy: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    later = Later(copy, 6)

    def late(folder: RunFolder, catalog: Any, *, check_all: bool) -> Any:
        later.comes(16)
        return judge(folder, catalog, check_all=check_all)

    monkeypatch.setattr(verify_module, "judge", late)
    report = verify(copy.run, copy.staging)
    assert (report.failures, report.notes) == ((), ())
    assert report.recoverable == ((0, 6),)


def test_a_snapshot_in_the_place_of_another_is_a_note(
    copy: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    def late(folder: RunFolder, catalog: Any, *, check_all: bool) -> Any:
        shard = copy.shard(6)
        data = shard.read_bytes()[:-8] + bytes(8)
        shard.write_bytes(data)
        manifest, parts = shard.with_suffix(".json"), tuple(part_sums(data))
        other = replace(Manifest.read(manifest), checksum=crc32c(data), parts=parts)
        write_json(manifest, other.document())
        return judge(folder, catalog, check_all=check_all)

    monkeypatch.setattr(verify_module, "judge", late)
    report = verify(copy.run, copy.staging)
    assert report.failures == ()
    found = [note.message.partition(":")[0] for note in report.notes]
    assert found == ["steps 3 to 6 were not verified", "steps 6 to 9 were not verified"]


def test_a_newest_snapshot_that_goes_is_a_failure(
    copy: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    def late(folder: RunFolder, catalog: Any, *, check_all: bool) -> Any:
        found = judge(folder, catalog, check_all=check_all)
        shutil.rmtree(copy.shard(16).parent)
        return found

    monkeypatch.setattr(verify_module, "judge", late)
    (failure,) = verify(copy.run, copy.staging).failures
    assert failure.path == str(copy.shard(16).parent)
    assert "was removed, and no later snapshot is there" in failure.message


def test_a_reader_whose_snapshot_goes_looks_again(
    copy: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    scans: list[Catalog] = []

    def late(*arguments: Any, **options: Any) -> Any:
        catalog = scan(*arguments, **options)
        if not scans:
            collected(copy.run)
        scans.append(catalog)
        return catalog

    monkeypatch.setattr("lowdiff.recovery.engine.scan", late)
    with pytest.raises(StepNotFound, match=r"step 7 .* retention removed"):
        lowdiff.recover(copy.run, 7, staging=copy.staging)
    assert len(scans) == 2
