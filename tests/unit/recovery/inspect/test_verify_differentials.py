"""What ``verify`` finds in segments and staging logs that were damaged."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from lowdiff.errors import DamagedFile
from lowdiff.persistence.files.locks import FileLock
from lowdiff.persistence.files.paths import RunFolder, StagingFolder
from lowdiff.persistence.format.codec import Codec
from lowdiff.persistence.format.differentials import read_differential
from lowdiff.persistence.run.catalog import scan
from lowdiff.recovery.damage import judge
from lowdiff.recovery.engine import look_again
from lowdiff.recovery.inspect.verify import Replayed
from tests.unit.recovery.training import Trained, flip, train
from tests.unit.recovery.verified import check, only_failure, records_of


def test_a_flipped_bit_inside_a_segment_names_file_and_offset(
    closed: Trained, tmp_path: Path
) -> None:
    copy = closed.copied(tmp_path)
    record = records_of(copy.segment(6))[2]
    flip(copy.segment(6), record.offset + 200)
    report = check(copy)
    only_failure(report, copy.segment(6))
    assert report.failures[0].offset == record.offset
    assert any("step 8 of rank 0 is lost" in failure.message for failure in report.failures)
    assert Replayed(0, 5, compared=True) in report.replays
    assert Replayed(10, 12, compared=True) in report.replays
    assert report.recoverable == ((0, 7), (10, 12))


@pytest.mark.parametrize("place", ["file header", "record header", "last byte"])
def test_a_flipped_bit_anywhere_in_a_segment_names_it(
    closed: Trained, tmp_path: Path, place: str
) -> None:
    copy = closed.copied(tmp_path)
    path = copy.segment(11)
    last = records_of(path)[-1]
    where = {
        "file header": 20,
        "record header": last.offset + 10,
        "last byte": last.offset + 64 + last.header.body_bytes - 1,
    }
    flip(path, where[place])
    only_failure(check(copy), path)


def test_a_flipped_bit_in_the_newest_record_is_no_torn_tail(
    crashed: Trained, tmp_path: Path
) -> None:
    copy = crashed.copied(tmp_path)
    shutil.rmtree(copy.staging)
    last = records_of(copy.segment(6))[-1]
    flip(copy.segment(6), last.offset + 70)
    report = check(copy)
    only_failure(report, copy.segment(6))
    assert report.recoverable == ((0, 8),)


def test_a_missing_segment_is_named(closed: Trained, tmp_path: Path) -> None:
    copy = closed.copied(tmp_path)
    copy.segment(6).unlink()
    report = check(copy)
    assert "step 6 of rank 0 is lost" in only_failure(report, copy.segment(6))
    assert len(report.failures) == 1


def test_a_missing_segment_after_the_last_snapshot_is_named(tmp_path: Path) -> None:
    train(tmp_path, 3, end="crash", snapshot_every=100)
    trained = train(tmp_path, 6, end="crash", snapshot_every=100)
    shutil.rmtree(trained.staging)
    _, middle, last = records_of(trained.segment(4, incarnation=1))
    path = trained.segment(4, incarnation=1)
    data = path.read_bytes()
    path.write_bytes(data[: middle.offset] + data[middle.end : last.end])
    report = check(trained)
    assert "step 5 of rank 0 is lost" in only_failure(report, trained.segment(5, incarnation=1))


@pytest.mark.parametrize("kept", ["staging", "nothing"])
@pytest.mark.parametrize("tail", ["short body", "short header", "zeros"])
def test_a_torn_tail_of_a_dead_writer_is_a_note(
    crashed: Trained, tmp_path: Path, tail: str, kept: str
) -> None:
    copy = crashed.copied(tmp_path)
    if kept == "nothing":
        shutil.rmtree(copy.staging)
    path = copy.segment(6)
    last = records_of(path)[-1]
    data = path.read_bytes()
    path.write_bytes(
        {
            "short body": data[: last.end - 20],
            "short header": data[: last.offset + 30],
            "zeros": data[: last.offset + 90] + bytes(len(data) - last.offset - 90),
        }[tail]
    )
    report = check(copy)
    assert report.ok
    assert [(note.path, note.offset) for note in report.notes] == [(str(path), last.offset)]
    assert report.recoverable == ((0, 9 if kept == "staging" else 8),)


@pytest.mark.parametrize("listed", ["nothing", "half a header", "a record and a half"])
@pytest.mark.parametrize("now", ["half a header", "three records and a half", "all four"])
def test_a_segment_that_a_live_writer_is_at_is_judged_by_what_it_is_now(
    crashed: Trained, tmp_path: Path, listed: str, now: str
) -> None:
    copy = crashed.copied(tmp_path)
    path, folder = copy.segment(6), RunFolder(copy.run)
    data, records = path.read_bytes(), records_of(path)
    written = {
        "nothing": 0,
        "half a header": 30,
        "a record and a half": records[1].offset + 90,
        "three records and a half": records[3].offset + 90,
        "all four": len(data),
    }
    path.write_bytes(data[: written[listed]])
    catalog = scan(folder, [copy.staging])
    assert [error.path for error in catalog.damage] == [path]
    path.write_bytes(data[: max(written[listed], written[now])])
    failures, notes = judge(folder, catalog)
    assert not failures
    assert [note.path for note in notes] == ([] if now == "all four" else [str(path)])


def test_a_segment_torn_in_its_first_bytes_is_a_note(crashed: Trained, tmp_path: Path) -> None:
    copy = crashed.copied(tmp_path)
    copy.segment(10).write_bytes(copy.segment(6).read_bytes()[:20])
    report = check(copy)
    assert report.ok
    assert [note.path for note in report.notes] == [str(copy.segment(10))]


def test_a_torn_tail_before_a_later_snapshot_is_a_failure(closed: Trained, tmp_path: Path) -> None:
    copy = closed.copied(tmp_path)
    path = copy.segment(6)
    last = records_of(path)[-1]
    path.write_bytes(path.read_bytes()[: last.end - 20])
    report = check(copy)
    only_failure(report, path)
    assert report.failures[0].offset == last.offset
    assert not report.notes


def test_a_flipped_bit_before_a_torn_tail_is_a_failure(crashed: Trained, tmp_path: Path) -> None:
    copy = crashed.copied(tmp_path)
    shutil.rmtree(copy.staging)
    path = copy.segment(6)
    first, _, _, last = records_of(path)
    data = path.read_bytes()
    path.write_bytes(data[: last.offset] + bytes(len(data) - last.offset))
    flip(path, first.offset + 100)
    report = check(copy)
    only_failure(report, path)
    assert report.failures[0].offset == first.offset


def test_what_a_later_incarnation_made_void_may_be_torn(tmp_path: Path) -> None:
    first = train(tmp_path, 4, end="crash")
    shutil.rmtree(first.staging)
    path = first.segment(1)
    torn = path.read_bytes()[: records_of(path)[-1].end - 20]
    path.write_bytes(torn)
    trained = train(tmp_path, 6)
    path.write_bytes(torn)
    report = check(trained)
    assert report.ok
    assert "void" in report.notes[0].message


def test_a_flipped_bit_inside_the_staging_log_names_file_and_offset(
    crashed: Trained, tmp_path: Path
) -> None:
    copy = crashed.copied(tmp_path)
    chunk = next(copy.staging.rglob("*.chunk"))
    record = records_of(chunk)[4]
    flip(chunk, record.offset + 100)
    report = check(copy)
    only_failure(report, chunk)
    assert report.failures[0].offset == record.offset
    assert report.recoverable == ((0, 9),)


def test_a_damaged_header_of_a_chunk_is_named(crashed: Trained, tmp_path: Path) -> None:
    copy = crashed.copied(tmp_path)
    chunk = next(copy.staging.rglob("*.chunk"))
    flip(chunk, 10)
    only_failure(check(copy), chunk)


def test_a_chunk_that_was_only_just_made_is_no_damage(crashed: Trained, tmp_path: Path) -> None:
    copy = crashed.copied(tmp_path)
    chunk = next(copy.staging.rglob("*.chunk"))
    chunk.with_name("log-00000001.chunk").write_bytes(bytes(4096))
    assert check(copy).ok


def test_staged_bytes_that_were_overwritten_are_not_decoded(
    crashed: Trained, tmp_path: Path
) -> None:
    copy = crashed.copied(tmp_path)
    (stage,) = StagingFolder.all(copy.staging)
    lock = FileLock(stage.trainer_lock)
    assert lock.acquire("a trainer that lives")
    stored = scan(RunFolder(copy.run), [copy.staging]).records[0, 0][4]
    lock.release()
    assert read_differential(stored, Codec()).step == 4
    with stored.path.open("r+b") as file:
        file.seek(stored.record.offset + 64 + stored.record.header.meta_bytes + 100)
        file.write(b"overwritten")
    with pytest.raises(DamagedFile, match="step 4 was overwritten"):
        read_differential(stored, Codec())


def test_overwritten_staging_is_looked_at_again(crashed: Trained) -> None:
    folder = RunFolder(crashed.run)
    old = scan(folder, [crashed.staging])
    seen = []

    def act(catalog: object) -> str:
        seen.append(catalog)
        if len(seen) == 1:
            raise DamagedFile(crashed.staging / "x" / "log-00000000.chunk", "overwritten")
        return "done"

    assert look_again(folder, crashed.staging, old, act) == "done"
    assert seen[0] is old
    assert seen[1] is not old


def test_other_damage_is_not_looked_at_again(crashed: Trained) -> None:
    seen = []

    def act(catalog: object) -> None:
        seen.append(catalog)
        raise DamagedFile(crashed.segment(1), "bad")

    folder = RunFolder(crashed.run)
    with pytest.raises(DamagedFile, match="bad"):
        look_again(folder, crashed.staging, scan(folder), act)
    assert len(seen) == 1
