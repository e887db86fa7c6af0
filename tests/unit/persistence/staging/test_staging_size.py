"""How large a staging log becomes, and what it gives up where it may."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowdiff.persistence.format.codec import Codec
from lowdiff.persistence.format.framing import RecordKind
from lowdiff.persistence.staging.log import LogTail, staged_records
from lowdiff.persistence.writer.segments import batches_of
from tests.unit.persistence.staged_logs import (
    CHUNK,
    ITEMS,
    append,
    check,
    drained,
    folder_in,
    log_in,
    payload,
    steps,
)


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


LARGE = 10 * CHUNK  # items: records of 40 chunks


def test_a_rare_large_record_makes_the_log_longer_only_for_a_while(tmp_path: Path) -> None:
    log = log_in(folder_in(tmp_path), cap_bytes=1000 * CHUNK)
    for step in range(1, 33):  # a stall: four chunks of eight
        assert append(log, step)
    for step in range(33, 1000):  # each lands on another chunk than the one before
        assert append(log, step, durable=step - 1, num_items=ITEMS if step % 41 else LARGE)
        assert log.bytes_held < 50 * CHUNK
        assert log.bytes_held == sum(p.stat().st_size for _, p in log.folder.chunks())
    for step in range(1000, 1040):
        assert append(log, step, durable=step - 1)
    assert log.bytes_held == 4 * CHUNK


def test_a_large_record_of_every_lap_keeps_its_chunk(tmp_path: Path) -> None:
    log = log_in(folder_in(tmp_path))
    inodes = set()
    for step in range(1, 300):  # three chunks, of which each is needed for another kind in turn
        assert append(log, step, durable=step - 3, num_items=(ITEMS, 1000, LARGE)[step % 3])
        if step > 30:
            inodes |= {path.stat().st_ino for _, path in log.folder.chunks()}
    assert len(inodes) == len(log.folder.chunks())


def test_chunks_grow_within_the_cap_only(tmp_path: Path) -> None:
    folder = folder_in(tmp_path)
    log, tail = log_in(folder, cap_bytes=100 * CHUNK), LogTail(folder)
    for step in range(1, 41):
        assert append(log, step)
    seen = [record.header.step for record in drained(tail)]
    for step in range(41, 500):
        assert append(log, step, durable=step - 1, num_items=ITEMS if step % 5 else LARGE)
        assert log.bytes_held <= 100 * CHUNK
        seen += [record.header.step for record in drained(tail)]
    assert seen == list(range(1, 500))


def test_a_large_record_waits_for_memory_that_can_become_free(tmp_path: Path) -> None:
    folder = folder_in(tmp_path)
    log = log_in(folder, cap_bytes=4 * CHUNK)
    for step in range(1, 25):
        append(log, step)
    assert append(log, 25, durable=8, num_items=LARGE) is None
    assert steps(folder)[-16:] == list(range(9, 25))
    assert append(log, 25, durable=16, num_items=LARGE)
    assert [r.header.step for _, r in staged_records(folder)] == list(range(17, 26))


@pytest.mark.slow
def test_where_it_may_drop_the_log_keeps_its_cap_for_large_records_too(tmp_path: Path) -> None:
    folder = folder_in(tmp_path)
    log = log_in(folder, cap_bytes=100 * CHUNK)
    for step in range(1, 1500):
        num_items = ITEMS if step % 40 else LARGE
        size = log.append(
            RecordKind.DIFFERENTIAL, step, b"", payload(step, num_items), durable_step=3, drop=True
        )
        assert size
        assert log.bytes_held <= 100 * CHUNK
        found = [record.header.step for _, record in staged_records(folder)]
        assert found == list(range(found[0], step + 1))
        assert log.dropped_step == (found[0] - 1 if found[0] > 1 else -1)


def test_a_record_larger_than_the_cap_is_taken_once_it_is_alone(tmp_path: Path) -> None:
    folder = folder_in(tmp_path)
    log = log_in(folder, cap_bytes=2 * CHUNK)
    for step in range(1, 17):
        append(log, step)
    assert append(log, 17, num_items=5 * CHUNK) is None
    assert append(log, 17, durable=8, num_items=5 * CHUNK)
    assert log.bytes_held > 20 * CHUNK
    for step in range(18, 400):
        assert append(log, step, durable=step - 1)
    assert log.bytes_held == 2 * CHUNK


@pytest.mark.slow
@given(st.lists(st.tuples(st.integers(0, 2500), st.integers(0, 6)), max_size=40))
def test_any_sequence_of_sizes_and_progress_keeps_all_that_is_not_durable(
    tmp_path_factory: pytest.TempPathFactory, appends: list[tuple[int, int]]
) -> None:
    folder = folder_in(tmp_path_factory.mktemp("log"))
    log, tail = log_in(folder, cap_bytes=3 * CHUNK), LogTail(folder)
    step, durable, sizes, seen = 0, 0, {}, []
    for size, progress in appends:
        durable = min(step, durable + progress)
        if append(log, step + 1, durable=durable, num_items=size) is not None:
            step += 1
            sizes[step] = size
        assert log.bytes_held <= 3 * CHUNK or len(folder.chunks()) == 2
        for record in drained(tail):
            if record.header.kind is RecordKind.DIFFERENTIAL:
                seen.append(check(record, sizes[record.header.step]))
        left = [r.header.step for _, r in staged_records(folder) if r.header.kind == 1]
        assert left == list(range(left[0] if left else step + 1, step + 1))
        assert not left or left[0] <= durable + 1
    assert seen == list(range(1, step + 1))
