"""The staging log outlives its trainer, is read while it grows, and never kills training."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowdiff.errors import StorageError
from lowdiff.persistence.codec import Codec
from lowdiff.persistence.framing import RecordKind, RecordRef
from lowdiff.persistence.memory import MappedFile, read_view
from lowdiff.persistence.paths import StagingFolder
from lowdiff.persistence.sections import read_sections
from lowdiff.persistence.segments import batches_of
from lowdiff.persistence.staging import LogTail, StagingLog, open_chunk, staged_records
from lowdiff.types import Section
from tests.mounts import tmpfs_or_skip

ROOT = Path(__file__).parents[2]
RUN_ID = "00112233445566778899aabbccddeeff"
CHUNK = 4096
ITEMS = 98  # makes records of 504 bytes, of which 8 fill a chunk


def folder_in(root: Path, incarnation: int = 0, rank: int = 0) -> StagingFolder:
    folder = StagingFolder.of(root, RUN_ID, incarnation, rank)
    folder.root.mkdir(parents=True, exist_ok=True)
    return folder


def log_in(folder: StagingFolder, cap_bytes: int = 1 << 20) -> StagingLog:
    return StagingLog(folder, run_id=RUN_ID, world_size=1, chunk_bytes=CHUNK, cap_bytes=cap_bytes)


def payload(step: int, num_items: int = ITEMS) -> list[Section]:
    return [Section("values/float32", "planes", np.full(num_items, step, np.uint32))]


def append(log: StagingLog, step: int, *, durable: int = -1, num_items: int = ITEMS) -> int | None:
    meta = b"step %d" % step
    return log.append(
        RecordKind.DIFFERENTIAL, step, meta, payload(step, num_items), durable_step=durable
    )


def mark(log: StagingLog, step: int, *, durable: int = -1) -> None:
    assert log.append(RecordKind.SNAPSHOT, step, b"image %d" % step, (), durable_step=durable)


def check(record: RecordRef, num_items: int = ITEMS) -> int:
    """Its step, after comparing its content with what ``append`` wrote for that step."""
    step = record.header.step
    (section,) = read_sections(record.sections, Codec(), coded=False)
    assert bytes(record.meta) == b"step %d" % step
    np.testing.assert_array_equal(section.data, payload(step, num_items)[0].data)
    return step


def steps(folder: StagingFolder) -> list[int]:
    found = (record for _, record in staged_records(folder))
    return [check(r) for r in found if r.header.kind is RecordKind.DIFFERENTIAL]


def drained(tail: LogTail) -> list[RecordRef]:
    return list(iter(tail.next, None))


def ahead(log: StagingLog, step: int, parts: Sequence[int], *, durable: int = -1) -> bool:
    """Stage a payload of so many items in parts ahead, and then the record, as one ``append``."""
    for part, num_items in enumerate(parts):
        section = Section(f"part {part}", "planes", np.full(num_items, step, np.uint32))
        if not log.append_ahead([section], durable_step=durable):
            return False
    meta = b"step %d" % step
    return log.append(RecordKind.DIFFERENTIAL, step, meta, (), durable_step=durable) is not None


# Writing and reading


def test_what_is_appended_is_read_with_its_identity(tmp_path: Path) -> None:
    folder = folder_in(tmp_path, incarnation=3, rank=2)
    log = StagingLog(folder, run_id=RUN_ID, world_size=4, chunk_bytes=CHUNK, cap_bytes=CHUNK)
    size = append(log, 41)
    (record,) = drained(LogTail(folder))
    assert check(record) == 41
    header = record.header
    assert (header.kind, header.incarnation, header.rank) == (RecordKind.DIFFERENTIAL, 3, 2)
    assert (header.world_size, header.lap, header.coded) == (4, 0, False)
    assert size == record.end - record.offset


def test_data_is_copied_so_later_changes_of_it_do_not_matter(tmp_path: Path) -> None:
    folder = folder_in(tmp_path)
    data = np.zeros(100, np.uint32)
    section = Section("values/float32", "planes", data)
    log_in(folder).append(RecordKind.DIFFERENTIAL, 1, b"step 1", [section], durable_step=-1)
    data[:] = 7
    (_, record), *_ = staged_records(folder)
    assert not read_sections(record.sections, Codec(), coded=False)[0].data.any()


@pytest.mark.parametrize("parts", [[ITEMS], [40, 58], [1, 0, 3], [2000, 2]])
def test_what_is_staged_ahead_is_read_once_its_record_is_whole(
    tmp_path: Path, parts: list[int]
) -> None:
    folder = folder_in(tmp_path)
    log, tail = log_in(folder), LogTail(folder)
    append(log, 1)
    for step in range(2, 40):
        section = Section("part 0", "planes", np.full(parts[0], step, np.uint32))
        log.append_ahead([section], durable_step=-1)
        assert [record.header.step for record in drained(tail)] == [step - 1]
        assert ahead(log, step, parts[1:])
        last = [record for _, record in staged_records(folder)][-1]
        assert last.header.body_checksum == log.body_checksum
        assert bytes(last.meta) == b"step %d" % step
        found = read_sections(last.sections, Codec(), coded=False)
        assert [section.data.tolist() for section in found] == [[step] * n for n in parts]


def test_what_is_staged_ahead_moves_with_all_of_it_where_a_chunk_ends(tmp_path: Path) -> None:
    folder = folder_in(tmp_path)
    log = log_in(folder, cap_bytes=CHUNK)
    for step in range(1, 60):  # each has begun in a chunk that it does not fit into
        assert ahead(log, step, [300 + step, 400], durable=step - 1)
        *_, (_, record) = staged_records(folder)
        found = read_sections(record.sections, Codec(), coded=False)
        assert [section.data.tolist() for section in found] == [[step] * (300 + step), [step] * 400]
    assert len(folder.chunks()) == 2


def test_ahead_waits_for_room_and_can_be_given_up(tmp_path: Path) -> None:
    folder = folder_in(tmp_path)
    log = log_in(folder, cap_bytes=2 * CHUNK)
    for step in (1, 2, 3):  # two fit into a chunk
        assert ahead(log, step, [400])
    assert log.append_ahead(payload(4, 10), durable_step=1)
    assert not log.append_ahead(payload(4, 900), durable_step=1)
    log.drop_ahead()
    assert append(log, 4)
    assert [r.header.step for _, r in staged_records(folder)] == [1, 2, 3, 4]
    assert not ahead(log, 5, [900], durable=1)
    assert ahead(log, 5, [900], durable=2)
    assert [r.header.step for _, r in staged_records(folder)] == [3, 4, 5]


def test_the_log_rolls_into_new_chunks_which_a_reader_follows(tmp_path: Path) -> None:
    folder = folder_in(tmp_path)
    log, tail = log_in(folder), LogTail(folder)
    seen = []
    for step in range(1, 51):
        assert append(log, step)
        seen += [check(record) for record in drained(tail)]
    assert seen == list(range(1, 51)) == steps(folder)
    assert len(folder.chunks()) == 7  # eight records in each
    assert log.bytes_held == 7 * CHUNK


def test_a_reader_that_comes_late_starts_at_the_oldest_chunk(tmp_path: Path) -> None:
    folder = folder_in(tmp_path)
    tail = LogTail(folder)
    assert tail.next() is None
    log = log_in(folder)
    assert tail.next() is None
    for step in range(1, 21):
        append(log, step)
    assert [check(record) for record in drained(tail)] == list(range(1, 21))


def test_chunks_of_durable_records_are_reused_in_turn(tmp_path: Path) -> None:
    folder = folder_in(tmp_path)
    log, tail = log_in(folder, cap_bytes=3 * CHUNK), LogTail(folder)
    seen = []
    for step in range(1, 201):
        assert append(log, step, durable=step - 8)
        seen += [check(record) for record in drained(tail)]
    assert seen == list(range(1, 201))
    assert log.bytes_held <= 3 * CHUNK
    assert sum(path.stat().st_size for _, path in folder.chunks()) == log.bytes_held


def test_stale_records_behind_the_newest_one_of_a_reused_chunk_do_not_count(
    tmp_path: Path,
) -> None:
    folder = folder_in(tmp_path)
    log = log_in(folder, cap_bytes=2 * CHUNK)
    for step in range(1, 18):
        assert append(log, step, durable=step - 1)
    # Step 17 opened the third lap, in the chunk of steps 1 to 8: 2 to 8 still lie behind it.
    (first, _), (second, path) = folder.chunks()
    assert (first, second) == (1, 2)
    assert b"step 2" in path.read_bytes()
    assert steps(folder) == [*range(9, 17), 17]


def test_a_chunk_that_was_renamed_but_not_yet_given_its_header_holds_nothing(
    tmp_path: Path,
) -> None:
    folder = folder_in(tmp_path)
    log = log_in(folder)
    for step in range(1, 10):
        append(log, step)
    folder.chunk(0).rename(folder.chunk(2))  # what a trainer that dies right here leaves
    assert steps(folder) == [9]


def test_a_chunk_of_another_run_or_rank_holds_nothing(tmp_path: Path) -> None:
    folder = folder_in(tmp_path)
    append(log_in(folder), 1)
    for other in (
        StagingFolder.of(tmp_path, RUN_ID[::-1], 0, 0),
        StagingFolder.of(tmp_path, RUN_ID, 1, 0),
        StagingFolder.of(tmp_path, RUN_ID, 0, 1),
    ):
        shutil.copytree(folder.root, other.root)
        assert open_chunk(other, 0) is None
        assert not list(staged_records(other))


# Its size


def test_at_its_cap_the_log_refuses_until_more_is_durable(tmp_path: Path) -> None:
    folder = folder_in(tmp_path)
    log = log_in(folder, cap_bytes=2 * CHUNK)
    step = 1
    while append(log, step):
        step += 1
    assert step == 17  # two chunks of eight
    assert append(log, step, durable=7) is None
    assert steps(folder) == list(range(1, 17))
    assert append(log, step, durable=8)
    assert steps(folder) == list(range(9, 18))


def test_where_it_may_drop_the_log_takes_every_step_and_says_what_went(tmp_path: Path) -> None:
    folder = folder_in(tmp_path)
    log = log_in(folder, cap_bytes=2 * CHUNK)
    tail = LogTail(folder)
    for step in range(1, 30):
        meta = b"step %d" % step
        size = log.append(
            RecordKind.DIFFERENTIAL, step, meta, payload(step), durable_step=3, drop=True
        )
        assert size
        assert log.dropped_step == (-1 if step < 17 else 8 if step < 25 else 16)
    assert steps(folder) == list(range(17, 30))
    assert [check(record) for record in drained(tail)] == list(range(17, 30))


def test_a_reader_never_passes_on_what_was_dropped_under_it(tmp_path: Path) -> None:
    folder = folder_in(tmp_path)
    log = log_in(folder, cap_bytes=2 * CHUNK)
    for step in range(1, 17):
        append(log, step)
    held = drained(LogTail(folder))
    assert [check(record) for record in held] == list(range(1, 17))
    assert log.append(
        RecordKind.DIFFERENTIAL, 17, b"step 17", payload(17), durable_step=-1, drop=True
    )
    batches = batches_of(held, Codec())
    # Where the new record lies, an old one is gone; the others are whole, if stale.
    assert [(batch.first, batch.last) for batch in batches] == [(2, 16)]


def test_the_newest_chunk_is_never_given_up_even_if_all_in_it_is_durable(tmp_path: Path) -> None:
    folder = folder_in(tmp_path)
    log = log_in(folder, cap_bytes=CHUNK)
    for step in range(1, 12):
        assert append(log, step, durable=step - 1)
    assert steps(folder)[-1] == 11
    assert len(folder.chunks()) == 2


def test_a_record_larger_than_a_chunk_gets_one_of_its_own(tmp_path: Path) -> None:
    folder = folder_in(tmp_path)
    log = log_in(folder)
    append(log, 1)
    assert append(log, 2, num_items=5 * CHUNK)
    append(log, 3)
    sizes = [path.stat().st_size for _, path in folder.chunks()]
    assert sizes[0] == sizes[2] == CHUNK
    assert sizes[1] > 20 * CHUNK
    found = [record for _, record in staged_records(folder)]
    assert [check(r, n) for r, n in zip(found, (ITEMS, 20480, ITEMS), strict=True)] == [1, 2, 3]


def test_a_record_larger_than_the_cap_is_taken_once_it_is_alone(tmp_path: Path) -> None:
    folder = folder_in(tmp_path)
    log = log_in(folder, cap_bytes=2 * CHUNK)
    for step in range(1, 17):
        append(log, step)
    assert append(log, 17, num_items=5 * CHUNK) is None
    assert append(log, 17, durable=8, num_items=5 * CHUNK)
    held = log.bytes_held
    assert held > 20 * CHUNK
    for step in range(18, 400):
        assert append(log, step, durable=step - 1)
    assert log.bytes_held <= held  # the large chunk is reused like any other


@given(st.lists(st.tuples(st.integers(0, 2500), st.integers(0, 6), st.booleans()), max_size=40))
def test_any_sequence_of_sizes_and_progress_keeps_all_that_is_not_durable(
    tmp_path_factory: pytest.TempPathFactory, appends: list[tuple[int, int, bool]]
) -> None:
    folder = folder_in(tmp_path_factory.mktemp("log"))
    log, tail = log_in(folder, cap_bytes=3 * CHUNK), LogTail(folder)
    step, durable, sizes, seen = 0, 0, {}, []
    for size, progress, with_mark in appends:
        durable = min(step, durable + progress)
        if append(log, step + 1, durable=durable, num_items=size) is not None:
            step += 1
            sizes[step] = size
        if with_mark:
            log.append(RecordKind.SNAPSHOT, step, b"image", (), durable_step=durable)
        for record in drained(tail):
            if record.header.kind is RecordKind.DIFFERENTIAL:
                seen.append(check(record, sizes[record.header.step]))
        left = [r.header.step for _, r in staged_records(folder) if r.header.kind == 1]
        assert left == list(range(left[0] if left else step + 1, step + 1))
        assert not left or left[0] <= durable + 1
    assert seen == list(range(1, step + 1))


# Whoever reads it


def test_a_reader_that_starts_while_chunks_are_reused_finds_the_rest(tmp_path: Path) -> None:
    folder = folder_in(tmp_path)
    log = log_in(folder, cap_bytes=2 * CHUNK)
    for step in range(1, 17):
        append(log, step)
    tail = LogTail(folder)
    first = tail.next()
    assert first is not None
    assert check(first) == 1
    # Meanwhile both chunks it knows of are reused: steps up to 16 were durable before it came.
    for step in range(17, 34):
        assert append(log, step, durable=step - 1)
    assert [check(record) for record in drained(tail)][-8:] == list(range(26, 34))


def test_a_reader_does_not_leave_a_chunk_that_got_a_record_while_it_looked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folder_in(tmp_path)
    log, tail = log_in(folder), LogTail(folder)
    for step in range(1, 8):
        append(log, step)
    assert len(drained(tail)) == 7
    following, late = LogTail._following, iter([8, 9])

    def following_late(self: LogTail) -> int | None:
        for step in late:  # the last of its chunk, and the first of the next
            append(log, step)
        return following(self)

    monkeypatch.setattr(LogTail, "_following", following_late)
    assert [check(record) for record in drained(tail)] == [8, 9]


def test_the_mark_of_a_snapshot_stays_in_the_log_however_often_it_is_reused(
    tmp_path: Path,
) -> None:
    folder = folder_in(tmp_path)
    log = log_in(folder, cap_bytes=2 * CHUNK)
    append(log, 1)
    mark(log, 1)
    for step in range(2, 60):
        append(log, step, durable=step - 1)
    marks = [r for _, r in staged_records(folder) if r.header.kind is RecordKind.SNAPSHOT]
    assert marks
    assert {(r.header.step, bytes(r.meta)) for r in marks} == {(1, b"image 1")}
    mark(log, 59)
    for step in range(60, 99):
        append(log, step, durable=step - 1)
    marks = [r for _, r in staged_records(folder) if r.header.kind is RecordKind.SNAPSHOT]
    assert {r.header.step for r in marks} == {59}


READER = """
import sys, time
from pathlib import Path
from crc32c import crc32c
from lowdiff.persistence.paths import StagingFolder
from lowdiff.persistence.staging import LogTail

tail = LogTail(StagingFolder.of(Path(sys.argv[1]), sys.argv[2], 0, 0))
while True:
    record = tail.next()
    if record is None:
        time.sleep(0.0003)
        continue
    # The body is read once more here, after the check: nobody may have touched it.
    print(record.header.step, crc32c(record.body) == record.header.body_checksum, flush=True)
"""


def start(code: str, *arguments: str | Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )


def test_another_process_reads_every_record_once_while_the_log_grows_and_wraps(
    tmp_path: Path,
) -> None:
    folder = folder_in(tmp_path)
    log = log_in(folder, cap_bytes=4 * CHUNK)
    seen: list[str] = []
    with start(READER, tmp_path, RUN_ID) as reader:
        assert reader.stdout is not None
        lines = iter(reader.stdout.readline, "")
        follower = threading.Thread(target=lambda: seen.extend(map(str.strip, lines)))
        follower.start()
        for step in range(1, 1001):
            while append(log, step, durable=len(seen), num_items=step * 7919 % 400) is None:
                time.sleep(0.0002)
        deadline = time.monotonic() + 20
        while len(seen) < 1000 and time.monotonic() < deadline:
            time.sleep(0.001)
        reader.kill()
        follower.join()
    assert seen == [f"{step} True" for step in range(1, 1001)]


TRAINER = """
import sys
from pathlib import Path
import numpy as np
from lowdiff.persistence.framing import RecordKind
from lowdiff.persistence.paths import StagingFolder
from lowdiff.persistence.staging import StagingLog
from lowdiff.types import Section

folder = StagingFolder.of(Path(sys.argv[1]), sys.argv[2], 0, 0)
folder.root.mkdir(parents=True)
log = StagingLog(folder, run_id=sys.argv[2], world_size=1, chunk_bytes=4096, cap_bytes=1 << 30)
step = 0
while True:
    step += 1
    data = Section("values/float32", "planes", np.full(98, step, np.uint32))
    log.append(RecordKind.DIFFERENTIAL, step, b"step %d" % step, [data], durable_step=step - 30)
    print(step, flush=True)
"""


@pytest.mark.parametrize("milliseconds", [1, 7, 30])
def test_what_was_staged_before_a_kill_is_there_after_it(tmp_path: Path, milliseconds: int) -> None:
    with start(TRAINER, tmp_path, RUN_ID) as trainer:
        assert trainer.stdout is not None
        trainer.stdout.readline()
        time.sleep(milliseconds / 1000)
        trainer.kill()
        told = [1, *(int(line) for line in trainer.stdout if line.endswith("\n"))]
    found = steps(folder_in(tmp_path))
    assert found == list(range(found[0], found[-1] + 1))
    assert found[0] <= max(1, told[-1] - 30 + 1)
    assert told[-1] <= found[-1] <= told[-1] + 1


# Memory that is not there


@pytest.fixture
def full_tmpfs(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of 1 MiB with a file of 1 MiB less 64 KiB in it."""
    with tmpfs_or_skip(tmp_path / "small", 1) as folder:
        (folder / "filler").write_bytes(bytes((1 << 20) - (64 << 10)))
        yield folder


FILLER = (
    TRAINER.replace("step - 30", "-1")
    .replace("    log.append", "    size = log.append")
    .replace("    print(step, flush=True)", "    if size is None:\n        break")
    + """
Path(sys.argv[1], "filler").unlink()
assert log.append(RecordKind.DIFFERENTIAL, step, b"step %d" % step, [data], durable_step=-1)
print(step)"""
)


def test_in_a_full_tmpfs_the_log_waits_and_goes_on_when_there_is_room(full_tmpfs: Path) -> None:
    # In a process of its own: a store into a hole would be SIGBUS, which kills it.
    with start(FILLER, full_tmpfs, RUN_ID) as trainer:
        out, _ = trainer.communicate(timeout=20)
    assert trainer.returncode == 0
    assert steps(folder_in(full_tmpfs)) == list(range(1, int(out) + 1))
    assert int(out) > 50


def test_a_log_that_finds_no_memory_at_all_says_what_to_do(full_tmpfs: Path) -> None:
    with pytest.raises(StorageError, match="full; free it, enlarge it, or pass Checkpointer") as e:
        StagingLog(
            folder_in(full_tmpfs), run_id=RUN_ID, world_size=1, chunk_bytes=1 << 19, cap_bytes=1
        )
    assert "staging needs 0.5 MiB at" in str(e.value)


def test_a_file_that_did_not_fit_has_no_length_that_a_reader_could_stumble_over(
    full_tmpfs: Path,
) -> None:
    path = full_tmpfs / "large"
    with pytest.raises(StorageError, match=r"0\.5 MiB"):
        MappedFile(path, 1 << 19)
    assert bytes(read_view(path)) == b""
    assert (full_tmpfs / "filler").stat().st_size == (1 << 20) - (64 << 10)


def test_every_byte_of_a_mapped_file_is_allocated_when_it_is_made(tmp_path: Path) -> None:
    MappedFile(tmp_path / "file", 1 << 20)
    assert os.stat(tmp_path / "file").st_blocks * 512 >= 1 << 20


def test_a_mapped_file_takes_the_length_it_is_given_and_keeps_what_was_there(
    tmp_path: Path,
) -> None:
    path = tmp_path / "file"
    MappedFile(path, 100).view[:] = b"x" * 100
    assert bytes(MappedFile(path, 40).view) == b"x" * 40
    assert bytes(MappedFile(path, 60).view) == b"x" * 40 + bytes(20)
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_copy_that_fails_leaves_no_record_and_no_gap(tmp_path: Path) -> None:
    folder = folder_in(tmp_path)
    log = log_in(folder)
    append(log, 1)
    gaps = Section("values/float32", "planes", np.zeros(8, np.uint32)[::2])
    with pytest.raises(ValueError, match="contiguous"):
        log.append(RecordKind.DIFFERENTIAL, 2, b"", [*payload(2), gaps], durable_step=-1)
    assert steps(folder) == [1]
    assert append(log, 2)
    assert steps(folder) == [1, 2]
