"""A staging log where memory is not there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from lowdiff.errors import StorageError
from lowdiff.persistence.memory import MappedFile, read_view
from lowdiff.persistence.staging import StagingLog
from tests.mounts import tmpfs_or_skip
from tests.persistence.staged_logs import RUN_ID, TRAINER, folder_in, start, steps


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
