"""A staging log where memory is not there."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from lowdiff.errors import StorageError
from lowdiff.persistence.files.mapped_file import MappedFile, read_view
from lowdiff.persistence.format.framing import RecordKind
from lowdiff.persistence.staging.log import LogTail, StagingLog
from tests.mounts import fill, tmpfs_or_skip
from tests.unit.persistence.staged_logs import (
    CHUNK,
    RUN_ID,
    TRAINER,
    ahead,
    append,
    check,
    drained,
    folder_in,
    log_in,
    payload,
    start,
    steps,
)


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


# A record that is longer than the chunks there are


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of 4 MiB."""
    with tmpfs_or_skip(tmp_path / "memory", 4) as folder:
        yield folder


def long_log(memory: Path) -> StagingLog:
    """A log whose chunks are of 1 MiB, with a first record that is durable."""
    log = StagingLog(
        folder_in(memory), run_id=RUN_ID, world_size=1, chunk_bytes=1 << 20, cap_bytes=8 << 20
    )
    assert append(log, 1)
    return log


LONG = 300_000  # items: records of 1.2 MB


def test_a_chunk_that_is_too_small_grows_while_others_map_it(memory: Path) -> None:
    log = long_log(memory)
    tail = LogTail(log.folder)  # as a writer's: whatever has no name any more, it still maps
    assert [check(record) for record in drained(tail)] == [1]
    fill(memory, 512 << 10)
    assert append(log, 2, durable=1, num_items=LONG)
    assert [check(record, LONG) for record in drained(tail)] == [2]
    assert log.bytes_held == sum(path.stat().st_size for _, path in log.folder.chunks())


def test_a_chunk_that_cannot_grow_stays_and_the_log_goes_on(memory: Path) -> None:
    log = long_log(memory)
    filler = fill(memory, 64 << 10)
    for _ in range(2):
        with pytest.raises(StorageError, match=r"staging needs 1\.1 MiB at .* is full; free it"):
            append(log, 2, durable=1, num_items=LONG)
        assert steps(log.folder) == [1]
    assert append(log, 2, durable=1)
    assert steps(log.folder) == [1, 2]
    filler.unlink()
    assert append(log, 3, durable=2, num_items=LONG)
    *_, last = drained(LogTail(log.folder))
    assert check(last, LONG) == 3


def test_what_is_staged_ahead_outlives_a_chunk_that_cannot_grow(memory: Path) -> None:
    log = long_log(memory)
    assert log.append_ahead(payload(2), durable_step=1)
    filler = fill(memory, 64 << 10)
    with pytest.raises(StorageError):
        log.append_ahead(payload(2, LONG), durable_step=1)
    filler.unlink()
    assert ahead(log, 2, [LONG], durable=1)
    (record,) = drained(LogTail(log.folder))
    assert record.is_intact()
    assert record.header.body_bytes > 4 * LONG


def test_what_could_not_be_dropped_is_not_said_to_be(memory: Path) -> None:
    log = StagingLog(
        folder_in(memory), run_id=RUN_ID, world_size=1, chunk_bytes=CHUNK, cap_bytes=2 * CHUNK
    )
    for step in range(1, 17):
        assert append(log, step)
    fill(memory, 64 << 10)
    with pytest.raises(StorageError):
        log.append(RecordKind.DIFFERENTIAL, 17, b"", payload(17, LONG), durable_step=-1, drop=True)
    assert log.dropped_step == -1
    assert steps(log.folder) == list(range(1, 17))


# Whatever the reason is


@contextmanager
def refusing(number: int, call: str = "posix_fallocate") -> Iterator[None]:
    def refuse(*arguments: object) -> int:
        raise OSError(number, os.strerror(number))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, call, refuse)
        yield


@pytest.mark.parametrize(
    ("number", "call", "why"),
    [
        (errno.ENOSPC, "posix_fallocate", "that file system is full"),
        (errno.ENOSPC, "open", "that file system is full"),
        (errno.EDQUOT, "posix_fallocate", "your quota there is used up"),
        (errno.EIO, "ftruncate", "cannot have it (Input/output error)"),
    ],
)
def test_memory_that_is_refused_is_waited_for_whoever_refuses_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, number: int, call: str, why: str
) -> None:
    log = log_in(folder_in(tmp_path))
    with refusing(number, call):
        step = 1
        while append(log, step):
            step += 1
        assert append(log, step) is None
    assert step == 9  # one chunk of eight
    assert len(caplog.records) == 1
    assert why in caplog.text
    assert append(log, step)
    assert steps(log.folder) == list(range(1, 10))


def test_a_chunk_that_somebody_removed_is_a_storage_error(tmp_path: Path) -> None:
    log = log_in(folder_in(tmp_path), cap_bytes=2 * CHUNK)
    for step in range(1, 17):
        assert append(log, step)
    log.folder.chunk(0).unlink()
    with pytest.raises(StorageError, match="cannot have it"):
        append(log, 17, durable=8)


def test_a_chunk_that_cannot_grow_is_no_error_while_more_can_become_durable(tmp_path: Path) -> None:
    log = log_in(folder_in(tmp_path))
    for step in range(1, 25):
        assert append(log, step)
    with refusing(errno.ENOSPC):
        assert append(log, 25, durable=8, num_items=LONG) is None
        with pytest.raises(StorageError, match="is full"):
            append(log, 25, durable=16, num_items=LONG)
        assert steps(log.folder)[-8:] == list(range(17, 25))
        assert append(log, 25, durable=16)
    assert append(log, 26, durable=25, num_items=LONG)
    assert [check(r, LONG) for r in drained(LogTail(log.folder))[-1:]] == [26]


def test_a_long_chunk_serves_on_where_there_is_no_memory_for_a_shorter_one(tmp_path: Path) -> None:
    log = log_in(folder_in(tmp_path))
    assert append(log, 1, num_items=LONG)
    with refusing(errno.ENOSPC):
        for step in range(2, 5000):
            assert append(log, step, durable=step - 1)
    held = log.bytes_held
    assert held > 4 * LONG
    for step in range(5000, 8000):
        assert append(log, step, durable=step - 1)
    assert log.bytes_held == 2 * CHUNK
