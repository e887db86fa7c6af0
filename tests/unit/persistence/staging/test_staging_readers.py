"""Whoever reads a staging log while it grows, and after its trainer was killed."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from lowdiff.persistence.files.paths import StagingFolder
from lowdiff.persistence.format.framing import HEADER_BYTES
from lowdiff.persistence.staging.log import LogTail, staged_records
from tests.unit.persistence.staged_logs import (
    CHUNK,
    RUN_ID,
    TRAINER,
    append,
    check,
    drained,
    folder_in,
    log_in,
    start,
    steps,
)


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


def test_a_reader_does_not_leave_a_chunk_that_got_a_record_while_it_looked(tmp_path: Path) -> None:
    folder, late = folder_in(tmp_path), list[int]()
    log = log_in(folder)

    class SeenByReader(StagingFolder):
        """Gets records when its reader looks for another chunk."""

        def chunk(self, sequence: int) -> Path:
            while late:
                append(log, late.pop(0))
            return super().chunk(sequence)

    tail = LogTail(SeenByReader(folder.root, folder.incarnation, folder.rank))
    for step in range(1, 8):
        append(log, step)
    assert len(drained(tail)) == 7
    late += [8, 9]  # the last of its chunk, and the first of the next
    assert [check(record) for record in drained(tail)] == [8, 9]


@pytest.mark.parametrize("damaged", [[3], [8], [9], [9, 10], [24], [25]])
def test_a_reader_passes_over_damaged_records_only(tmp_path: Path, damaged: list[int]) -> None:
    """Eight records fill a chunk, so some are the first or the last of theirs."""
    folder = folder_in(tmp_path)
    log = log_in(folder)
    for step in range(1, 26):
        append(log, step)
    for path, staged in list(staged_records(folder)):
        if staged.header.step in damaged:
            with path.open("r+b") as file:
                file.seek(staged.offset + HEADER_BYTES)
                file.write(bytes([staged.body[0] ^ 1]))
    passed: list[int] = []
    tail = LogTail(folder, lambda header: passed.append(header.step))
    found: list[int] = []
    while (record := tail.next()) is not None or tail.is_at_damage:
        found += [] if record is None else [check(record)]
    whole = [step for step in range(1, 26) if step not in damaged]
    assert found == whole
    assert passed == damaged
    assert steps(folder) == whole


READER = """
import sys, time
from pathlib import Path
from crc32c import crc32c
from lowdiff.persistence.files.paths import StagingFolder
from lowdiff.persistence.staging.log import LogTail

tail = LogTail(StagingFolder.of(Path(sys.argv[1]), sys.argv[2], 0, 0))
while True:
    record = tail.next()
    if record is None:
        time.sleep(0.0003)
        continue
    # The body is read once more here, after the check: nobody may have touched it.
    print(record.header.step, crc32c(record.body) == record.header.body_checksum, flush=True)
"""


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


@pytest.mark.cases(2)
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
