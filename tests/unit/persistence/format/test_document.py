"""JSON documents come back, or are named as damaged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from crc32c import crc32c
from hypothesis import given
from hypothesis import strategies as st

from lowdiff.errors import DamagedFile, OtherFormat
from lowdiff.persistence.format.document import read_json, write_json

ROOT = Path(__file__).parents[4]
CONTENT = {"name": "größe", "steps": [1, 2, -3], "density": 0.01, "parent": None, "ok": True}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "document.json"


def test_the_bytes_of_a_document_are_pinned(path: Path) -> None:
    write_json(path, {"run_id": "0f", "parts": [1, 0.5]})
    assert path.read_text() == (
        '{\n "format": 4,\n "run_id": "0f",\n "parts": [\n  1,\n  0.5\n ],\n'
        ' "crc32c": 1567316025\n}\n'
    )
    # The checksum is over the document without it: sorted keys, no spaces, ASCII.
    assert crc32c(b'{"format":4,"parts":[1,0.5],"run_id":"0f"}') == 1567316025


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**64) + 1, 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
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


@pytest.mark.slow
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


@pytest.mark.parametrize("version", [1, 3, 5])
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


@pytest.mark.parametrize("value", [float("inf"), float("nan"), 10**400, -(2**64)], ids=str)
def test_a_number_that_no_field_holds_is_damage(path: Path, value: float) -> None:
    write_json(path, {"value": [value]})
    with pytest.raises(DamagedFile, match="no number of lowdiff"):
        read_json(path)
