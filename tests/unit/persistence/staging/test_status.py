"""The status page: whatever is torn, its reader finds the last whole status."""

from __future__ import annotations

import dataclasses
import threading
from pathlib import Path

import pytest

from lowdiff.persistence.staging.measurements import HistogramValue
from lowdiff.persistence.staging.status import StatusPage, StatusReader, WriterStatus

SLOT = 4096
FULL = WriterStatus(
    durable_step=41,
    durable_snapshot=40,
    segment_bytes=2**40,
    snapshot_bytes=7,
    batches=3,
    batch_seconds=HistogramValue(1e-6, (0, *range(2**40, 2**40 + 30), 7), 1e300, 1e299),
    retries=11,
    error="OSError: [Errno 28] No space left on device",
    closed=True,
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "status"


def test_every_field_is_read_as_it_was_published(path: Path) -> None:
    page = StatusPage(path, WriterStatus(durable_step=5))
    assert StatusReader(path, WriterStatus).read() == WriterStatus(durable_step=5)
    page.update(**{f.name: getattr(FULL, f.name) for f in dataclasses.fields(FULL)})
    assert StatusReader(path, WriterStatus).read() == FULL


def test_an_update_is_seen_by_a_reader_that_is_open(path: Path) -> None:
    page = StatusPage(path, WriterStatus(durable_step=0))
    reader = StatusReader(path, WriterStatus)
    for step in range(1, 6):
        page.update(durable_step=step)
        assert reader.read().durable_step == step


def test_a_later_writer_goes_on_with_the_page_of_an_earlier_one(path: Path) -> None:
    reader_of_first = None
    for life in range(3):
        page = StatusPage(path, WriterStatus(durable_step=10 * life))
        page.update(batches=life)
        reader_of_first = reader_of_first or StatusReader(path, WriterStatus)
        assert reader_of_first.read() == WriterStatus(durable_step=10 * life, batches=life)


@pytest.mark.parametrize("content", [b"", bytes(2 * SLOT)], ids=["no length yet", "all zero"])
def test_a_page_without_a_status_reads_as_nothing_durable(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    assert StatusReader(path, WriterStatus).read() == WriterStatus(durable_step=-1)


def published(path: Path) -> tuple[bytes, bytes, int]:
    """The page before and after one more update, and where that update's slot starts."""
    page = StatusPage(path, WriterStatus(durable_step=1))
    page.update(durable_step=2, error="first")
    before = path.read_bytes()
    page.update(durable_step=3, error="second")
    after = path.read_bytes()
    changed = next(i for i in range(len(after)) if before[i] != after[i])
    return before, after, changed // SLOT * SLOT


def test_an_update_touches_one_slot_and_they_take_turns(path: Path) -> None:
    before, after, start = published(path)
    other = SLOT - start
    assert before[other : other + SLOT] == after[other : other + SLOT]
    page = StatusPage(path, WriterStatus(durable_step=9))  # the next update
    assert path.read_bytes()[start : start + SLOT] == after[start : start + SLOT]
    assert page.status.durable_step == 9


def test_an_update_torn_anywhere_reads_as_the_old_status_or_the_new_one(path: Path) -> None:
    before, after, start = published(path)
    for cut in range(16 + 150):  # its head, and more than its content
        for first, last in ((before, after), (after, before)):
            torn = first[: start + cut] + last[start + cut : start + SLOT]
            whole = torn + first[start + SLOT :] if start == 0 else torn
            path.write_bytes(whole)
            status = StatusReader(path, WriterStatus).read()
            assert (status.durable_step, status.error) in ((2, "first"), (3, "second"))


def test_every_flip_in_the_newest_slot_reads_as_the_old_status_or_the_new_one(path: Path) -> None:
    _, after, start = published(path)
    for position in range(start, start + 16 + 120):
        path.write_bytes(after[:position] + bytes([after[position] ^ 255]) + after[position + 1 :])
        status = StatusReader(path, WriterStatus).read()
        assert (status.durable_step, status.error) in ((2, "first"), (3, "second"))


def test_a_reader_that_meets_two_torn_slots_keeps_what_it_read_before(path: Path) -> None:
    StatusPage(path, FULL)
    reader = StatusReader(path, WriterStatus)
    assert reader.read() == FULL
    with path.open("r+b") as file:
        file.write(bytes(2 * SLOT))
    assert reader.read() == FULL


@pytest.mark.slow
def test_a_reader_beside_a_busy_writer_never_goes_back(path: Path) -> None:
    page = StatusPage(path, WriterStatus(durable_step=0))
    reader = StatusReader(path, WriterStatus)
    done = threading.Event()

    def write() -> None:
        for step in range(1, 5001):
            page.update(durable_step=step, error="x" * (step % 50))
        done.set()

    writer = threading.Thread(target=write)
    writer.start()
    last = 0
    while not done.is_set():
        status = reader.read()
        assert status.durable_step >= last
        assert status.error == "x" * (status.durable_step % 50)
        last = status.durable_step
    writer.join()
    assert reader.read().durable_step == 5000


@pytest.mark.parametrize("letter", ["x", "ß", "盘", "\U0001f4be", "\udce9"])
def test_a_long_error_in_any_alphabet_fits_its_slot_and_keeps_its_beginning(
    path: Path, letter: str
) -> None:
    page = StatusPage(path, WriterStatus(durable_step=1))
    for _ in range(2):  # into both slots
        page.update(error="StorageError: " + 5000 * letter)
        error = StatusReader(path, WriterStatus).read().error
        assert error.startswith("StorageError: " + letter.encode(errors="replace").decode())
        assert 900 < len(error.encode()) <= 1000
    assert path.stat().st_size == 2 * SLOT
