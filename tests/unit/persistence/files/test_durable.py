"""A final name means complete bytes, also after a kill or a power failure."""

from __future__ import annotations

import errno
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lowdiff.errors import StorageError
from lowdiff.persistence.files.durable import fsync_directory, make_directory, write_file
from lowdiff.persistence.format.document import read_json, write_json

ROOT = Path(__file__).parents[4]
CONTENT = {"name": "größe", "steps": [1, 2, -3], "density": 0.01, "parent": None, "ok": True}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "document.json"


class Journal:
    """What was done to files, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.entries: list[str] = []
        fsync, replace = os.fsync, Path.replace

        def log_fsync(descriptor: int) -> None:
            self.entries.append("fsync " + Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
            fsync(descriptor)

        def log_replace(source: Path, target: Path) -> Path:
            self.entries.append(f"rename {source.name} {target.name}")
            return replace(source, target)

        monkeypatch.setattr(os, "fsync", log_fsync)
        monkeypatch.setattr(Path, "replace", log_replace)


def test_a_file_is_fsynced_then_renamed_then_its_folder_is_fsynced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal(monkeypatch)
    write_file(tmp_path / "file", b"content")
    partial = journal.entries[0].removeprefix("fsync ")
    assert partial.endswith(".partial")
    expected = [f"fsync {partial}", f"rename {partial} file", f"fsync {tmp_path.name}"]
    assert journal.entries == expected
    assert (tmp_path / "file").read_bytes() == b"content"
    assert os.listdir(tmp_path) == ["file"]


def test_a_failed_write_leaves_the_old_file_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_file(tmp_path / "file", b"old")

    def fail(_: int) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(OSError, match="Input/output error"):
            write_file(tmp_path / "file", b"new")
    assert (tmp_path / "file").read_bytes() == b"old"
    write_file(tmp_path / "file", b"new")
    assert os.listdir(tmp_path) == ["file"]


WRITER = """
import sys
from pathlib import Path
from lowdiff.persistence.format.document import write_json

n = 0
while True:
    n += 1
    write_json(Path(sys.argv[1]), {"number": n, "filling": [n] * (n % 3000)})
    print(n, flush=True)
"""


def test_a_writer_killed_at_any_moment_leaves_its_last_document_or_the_next(path: Path) -> None:
    rng = random.Random(0)
    for _ in range(3):
        with subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path)],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            text=True,
        ) as writer:
            assert writer.stdout is not None
            writer.stdout.readline()
            time.sleep(rng.uniform(0, 0.05))
            writer.kill()
            told = [1, *(int(line) for line in writer.stdout if line.endswith("\n"))]
        document = read_json(path)
        number = document["number"]
        assert told[-1] <= number <= told[-1] + 1
        assert document["filling"] == [number] * (number % 3000)


def test_every_new_folder_is_durably_named_in_its_parent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal(monkeypatch)
    make_directory(tmp_path / "a" / "b" / "c")
    assert journal.entries == [f"fsync {tmp_path.name}", "fsync a", "fsync b"]
    make_directory(tmp_path / "a" / "b" / "c")
    assert len(journal.entries) == 3


def test_fsync_of_a_folder_that_is_none_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        fsync_directory(tmp_path / "file")


@pytest.mark.parametrize("number", [errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_file_system_without_hard_links_is_named_and_nothing_stays(
    path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """As exFAT, or a bucket that is mounted: two trainers might begin one incarnation there."""

    def missing(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "link", missing)
    with pytest.raises(StorageError, match=r"document\.json could not be written: .*hard links"):
        write_json(path, CONTENT, exclusive=True)
    assert not list(path.parent.iterdir())
