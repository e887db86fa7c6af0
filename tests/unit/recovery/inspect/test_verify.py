from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from threading import Event, Thread, current_thread
from typing import Any

import pytest
from crc32c import crc32c
from torch import nn

from lowdiff.errors import NotARun
from lowdiff.persistence.files.mapped_file import read_view
from lowdiff.persistence.files.paths import RunFolder
from lowdiff.persistence.format.document import copy_of, write_json
from lowdiff.persistence.format.image import Manifest
from lowdiff.persistence.run.catalog import add_segments, complete_snapshots
from lowdiff.persistence.run.fences import read_fence, read_run_id, write_fence
from lowdiff.recovery import damage, recover
from lowdiff.recovery.inspect.verify import Replayed, VerifyReport, verify
from lowdiff.recovery.replay.replayer import ReplayOptions
from tests.crash.lives import history
from tests.crash.pool import Pool
from tests.crash.trainings import TRAININGS
from tests.unit.loops import PATIENCE_SECONDS, wait_until
from tests.unit.recovery.training import Trained, flip, part_sums, train
from tests.unit.recovery.verified import check, only_failure

# Whole runs


def test_a_whole_run_is_replayed_from_each_snapshot_to_the_next(closed: Trained) -> None:
    report = check(closed)
    assert report.ok
    assert not report.notes
    assert report.snapshots == (0, 5, 10, 12)
    assert report.replays == (
        Replayed(0, 5, compared=True),
        Replayed(5, 10, compared=True),
        Replayed(10, 12, compared=True),
    )
    assert report.recoverable == ((0, 12),)
    assert report.steps_replayed == 12
    counts = report.checked
    assert (counts.fences, counts.shards, counts.segments, counts.chunks) == (1, 4, 3, 0)
    assert counts.records == 12
    json.dumps(report.document())


def test_the_newest_step_is_reached_without_a_snapshot_of_it(crashed: Trained) -> None:
    report = check(crashed)
    assert report.ok
    assert report.replays[-1] == Replayed(5, 9, compared=False)
    assert report.checked.chunks == 1
    assert report.checked.records == 9


@pytest.mark.slow
def test_a_run_of_one_snapshot_is_loaded_at_least(tmp_path: Path) -> None:
    trained = train(tmp_path, 0)
    assert check(trained).replays == (Replayed(0, 0, compared=False),)
    flip(trained.shard(0), 1000)
    assert not check(trained).ok


def test_progress_counts_the_steps_of_all_replays(closed: Trained) -> None:
    seen: list[tuple[int, int]] = []
    verify(closed.run, closed.staging, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(5, 12), (10, 12), (12, 12)]


def test_small_blocks_and_many_workers_give_the_same_bits(closed: Trained) -> None:
    options = ReplayOptions(num_workers=3, block_elements=64)
    assert verify(closed.run, closed.staging, options=options).ok


def test_a_resumed_run_is_one_history(crashed: Trained, tmp_path: Path) -> None:
    shutil.copytree(crashed.run.parent, tmp_path / "again")
    report = check(train(tmp_path / "again", 12))
    assert report.ok
    assert report.replays[-2:] == (Replayed(5, 10, compared=True), Replayed(10, 12, compared=True))


def test_a_live_run_can_be_verified_while_it_trains(tmp_path: Path) -> None:
    reports: list[VerifyReport] = []
    steps: list[int] = []

    def look(step: int, _: nn.Module) -> None:
        if step == 8:
            reports.append(verify(tmp_path / "run", tmp_path / "staging"))
            steps.append(recover(tmp_path / "run", staging=tmp_path / "staging").step)

    train(tmp_path, 9, inside=look, retention=2)
    assert [report.failures for report in reports] == [()]
    assert steps == [8]


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("retention", "kept", "recoverable"), [(None, [0, 5, 10, 15], (0, 17)), (1, [15], (15, 15))]
)
def test_a_live_run_may_go_on_while_its_segments_are_read(
    tmp_path: Path, retention: int | None, kept: list[int], recoverable: tuple[int, int]
) -> None:
    listed, moved_on = Event(), Event()
    reports: list[VerifyReport] = []

    def slowly(*arguments: Any, **options: Any) -> None:
        add_segments(*arguments, **options)
        listed.set()
        moved_on.wait()

    def look() -> None:
        reports.append(verify(tmp_path / "run", tmp_path / "staging"))

    looking = Thread(target=look, daemon=True)

    def go_on(step: int, _: nn.Module) -> None:
        if step == 8:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("lowdiff.persistence.run.catalog.add_segments", slowly)
                looking.start()
                assert listed.wait(PATIENCE_SECONDS)
        if step == 17:
            folder = RunFolder(tmp_path / "run")
            run_id = read_run_id(folder)
            wait_until(lambda: [s.step for s in complete_snapshots(folder, run_id)] == kept)
            moved_on.set()
            looking.join(PATIENCE_SECONDS)

    try:
        train(tmp_path, 18, inside=go_on, retention=retention)
    finally:
        moved_on.set()
    (report,) = reports
    assert report.failures == ()
    assert report.recoverable == (recoverable,)


@pytest.mark.slow
def test_a_reader_that_is_overtaken_at_every_look_sees_no_loss(tmp_path: Path) -> None:
    """Twice as fast as it reads, a run has removed what the look before knew of."""
    folder = RunFolder(tmp_path / "run")
    looks: list[int] = []
    reports: list[VerifyReport] = []
    has_ended = Event()

    def newest() -> int:
        return max((s.step for s in complete_snapshots(folder, read_run_id(folder))), default=0)

    def overtaken(*arguments: Any, **options: Any) -> None:
        add_segments(*arguments, **options)
        if current_thread() is not looking:  # but attach's own
            return
        looks.append(newest())
        if len(looks) <= 5:
            wait_until(lambda: has_ended.is_set() or newest() >= looks[-1] + 15)

    looking = Thread(target=lambda: reports.append(verify(tmp_path / "run", "/nowhere")))

    def go_on(step: int, _: nn.Module) -> None:
        if step == 8:
            looking.start()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lowdiff.persistence.run.catalog.add_segments", overtaken)
        train(tmp_path, 120, inside=go_on, retention=2)
        has_ended.set()
        looking.join(PATIENCE_SECONDS)
    assert [report.failures for report in reports] == [()]
    assert len(looks) > 1


def test_a_segment_that_is_written_while_it_is_judged_is_not_damaged(
    crashed: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    newest = max(crashed.run.rglob("*.seg"))
    written = newest.read_bytes()
    newest.write_bytes(b"")  # as between the two system calls of its writer

    def meanwhile(path: Path) -> memoryview:
        if path == newest:
            newest.write_bytes(written)
        return read_view(path)

    monkeypatch.setattr(damage, "read_view", meanwhile)
    assert verify(crashed.run, "/nowhere").failures == ()


def test_a_folder_that_is_no_run_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(NotARun):
        verify(tmp_path, tmp_path)


# Snapshots


@pytest.mark.parametrize("offset", [0, 100, -1])
def test_a_flipped_bit_in_a_snapshot_names_the_file(
    closed: Trained, tmp_path: Path, offset: int
) -> None:
    copy = closed.copied(tmp_path)
    flip(copy.shard(5), offset)
    report = check(copy)
    assert "checksum" in only_failure(report, copy.shard(5))
    assert report.snapshots == (0, 10, 12)
    assert report.replays[0] == Replayed(0, 10, compared=True)


def test_a_missing_snapshot_file_is_named(closed: Trained, tmp_path: Path) -> None:
    copy = closed.copied(tmp_path)
    copy.shard(10).unlink()
    assert "missing" in only_failure(check(copy), copy.shard(10))


def test_a_damaged_manifest_is_named(closed: Trained, tmp_path: Path) -> None:
    copy = closed.copied(tmp_path)
    manifest = copy.shard(10).with_suffix(".json")
    flip(manifest, 50)
    only_failure(check(copy), manifest)


def test_a_snapshot_that_was_never_finished_is_a_note(closed: Trained, tmp_path: Path) -> None:
    copy = closed.copied(tmp_path)
    copy.shard(10).with_suffix(".json").unlink()
    report = check(copy)
    assert report.ok
    assert [str(copy.shard(10).parent) in note.message for note in report.notes] == [True]


@pytest.mark.parametrize(
    ("tensor", "named"),
    [
        ("model/last.weight", "parameter last.weight (1 elements; the first, 0: "),
        ("optimizer/0/scale/exp_avg", "optimizer 0, scale: exp_avg (1 elements"),
        ("buffer/norm.running_var", "rank 0: item buffer/norm.running_var"),
    ],
)
def test_other_bits_under_a_right_checksum_are_found_by_replay(
    closed: Trained, tmp_path: Path, tensor: str, named: str
) -> None:
    copy = closed.copied(tmp_path)
    path = copy.shard(10)
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    flip(path, start + json.loads(data[8:start])[tensor]["data_offsets"][0])
    manifest = Manifest.read(path.with_suffix(".json"))
    data = path.read_bytes()
    good = replace(manifest, checksum=crc32c(data), parts=tuple(part_sums(data)))
    write_json(path.with_suffix(".json"), good.document())
    message = only_failure(check(copy), path.parent)
    assert message.removeprefix(f"{path.parent}: ").startswith(
        f"snapshot 10 differs from the replay of snapshot 5: {named}"
    )


def test_a_parameter_changed_outside_the_optimizer_is_found(tmp_path: Path) -> None:
    def tamper(step: int, model: nn.Module) -> None:
        if step == 7:
            for parameter in model.parameters():
                parameter.data.mul_(1.5)

    report = check(train(tmp_path, 10, inside=tamper, watch="recovery"))
    assert report.failures[0].message.startswith("after step 8, ")
    assert report.replays == (Replayed(0, 5, compared=True),)


# Fences


@pytest.mark.slow
def test_a_damaged_fence_is_named(closed: Trained, tmp_path: Path) -> None:
    copy = closed.copied(tmp_path)
    path = RunFolder(copy.run).fence(0, 0)
    flip(path, 40)
    report = check(copy)
    assert "its copy serves" in only_failure(report, path)
    copy_of(path).unlink()
    report = check(copy)
    only_failure(report, path)
    assert "no incarnation has the fences of all its ranks" in report.failures[-1].message


def test_a_missing_fence_of_an_incarnation_that_trained_is_named(
    crashed: Trained, tmp_path: Path
) -> None:
    shutil.copytree(crashed.run.parent, tmp_path / "again")
    trained = train(tmp_path / "again", 12)
    fence = RunFolder(trained.run).fence(1, 0)
    fence.unlink()
    assert "is missing" in only_failure(check(trained), fence)


def test_an_incarnation_that_died_before_it_began_is_a_note(
    closed: Trained, tmp_path: Path
) -> None:
    copy = closed.copied(tmp_path)
    folder = RunFolder(copy.run)
    half = replace(
        read_fence(folder.fence(0, 0)), incarnation=1, parent=0, base_step=12, rank=1, world_size=2
    )
    write_fence(folder, half)
    report = check(copy)
    assert report.ok
    assert [note.message for note in report.notes] == [
        f"incarnation 1 died before it began: no {folder.fence(1, 0)}"
    ]


def test_another_torch_is_noted(closed: Trained, tmp_path: Path) -> None:
    copy = closed.copied(tmp_path)
    folder = RunFolder(copy.run)
    fence = read_fence(folder.fence(0, 0))
    folder.fence(0, 0).unlink()
    write_fence(folder, replace(fence, environment=replace(fence.environment, torch_version="9")))
    report = check(copy)
    assert report.ok
    assert "trained with torch 9 on cpu, replayed with torch 2" in report.notes[0].message


# Several ranks


@pytest.mark.slow
def test_ranks_may_come_and_go(pool: Pool, tmp_path: Path) -> None:
    build, settings = TRAININGS["cnn_sgd"], {"retention": None}
    for world_size, until in ((2, 9), (1, 9), (1, 12), (2, 14), (2, 16)):
        history(pool, build, tmp_path, world_size=world_size, until=until, settings=settings)
    trained = Trained(tmp_path / "run", tmp_path / "staging")
    report = check(trained)
    assert report.ok
    assert report.snapshots == (0, 7, 9, 12, 14, 16)
    assert Replayed(9, 9, compared=True) in report.replays
    assert report.checked.records == 2 * 9 + 3 + 2 * 4

    # Of an incarnation of its own: behind a slow snapshot the writer begins a segment a step later.
    other = trained.segment(15, incarnation=4, rank=1)
    other.unlink()
    assert "step 15 of rank 1 is lost" in only_failure(check(trained), other)
