"""A final name means complete bytes, and a damaged document never passes for a good one."""

from __future__ import annotations

import errno
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from crc32c import crc32c
from hypothesis import given
from hypothesis import strategies as st

from lowdiff.errors import DamagedFile, OtherFormat, StorageError
from lowdiff.persistence.files.durable import fsync_directory, make_directory, write_file
from lowdiff.persistence.format.document import read_json, write_json

ROOT = Path(__file__).parents[4]
CONTENT = {"name": "größe", "steps": [1, 2, -3], "density": 0.01, "parent": None, "ok": True}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "document.json"


# Files


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


# Documents


def test_the_bytes_of_a_document_are_pinned(path: Path) -> None:
    write_json(path, {"run_id": "0f", "parts": [1, 0.5]})
    assert path.read_text() == (
        '{\n "format": 3,\n "run_id": "0f",\n "parts": [\n  1,\n  0.5\n ],\n'
        ' "crc32c": 3977996872\n}\n'
    )
    # The checksum is over the document without it: sorted keys, no spaces, ASCII.
    assert crc32c(b'{"format":3,"parts":[1,0.5],"run_id":"0f"}') == 3977996872


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=10,
)


@given(st.dictionaries(st.text().filter(lambda k: k not in ("format", "crc32c")), json_values))
def test_any_document_comes_back(
    tmp_path_factory: pytest.TempPathFactory, content: dict[str, Any]
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.json"
    write_json(path, content)
    assert read_json(path) == content


def test_every_truncation_is_damage_that_names_the_file(path: Path) -> None:
    write_json(path, CONTENT)
    data = path.read_bytes()
    for length in range(len(data) - 1):  # the last byte is a newline
        path.write_bytes(data[:length])
        with pytest.raises(DamagedFile, match=r"document\.json is damaged"):
            read_json(path)


def test_every_flip_is_damage_or_changes_nothing_and_is_never_a_later_format(path: Path) -> None:
    write_json(path, CONTENT)
    data = path.read_bytes()
    harmless = 0
    for position in range(len(data)):
        for mask in (1, 2, 4, 8, 16, 32, 64, 128, 255):
            changed = bytearray(data)
            changed[position] ^= mask
            path.write_bytes(changed)
            try:
                assert read_json(path) == CONTENT
                harmless += 1
            except DamagedFile:
                pass
    assert harmless < 200  # white space became another white space


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{}",
        b"[]",
        b"7",
        b"null",
        b'"format"',
        b'{"format": 1}',
        b'{"format": "one", "crc32c": 0}',
        b'{"format": null, "crc32c": 0}',
        b'{"format": 1, "crc32c": "0"}',
        b'{"crc32c": 0}',
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"format": 1e999, "crc32c": 0}',
    ],
    ids=repr,
)
def test_what_is_no_document_is_damage(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    with pytest.raises(DamagedFile):
        read_json(path)


@pytest.mark.parametrize("version", [1, 2, 4])
def test_another_version_is_named_once_its_checksum_holds(path: Path, version: int) -> None:
    other = {"format": version, "novelty": 1}
    checksum = crc32c(json.dumps(other, sort_keys=True, separators=(",", ":")).encode())
    path.write_text(json.dumps({**other, "crc32c": checksum}))
    with pytest.raises(OtherFormat, match=f"document.json has format version {version}") as caught:
        read_json(path)
    assert caught.value.found == version
    path.write_text(json.dumps({**other, "crc32c": checksum ^ 1}))
    with pytest.raises(DamagedFile):
        read_json(path)


def test_a_missing_document_is_not_a_damaged_one(path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_json(path)
