"""An image comes back as it was written, and whatever else lies there is refused by name."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from crc32c import crc32c

from lowdiff.persistence import copying
from lowdiff.persistence.values import same
from lowdiff.recovery.images import read_image, write_image
from lowdiff.recovery.load import UNFIT

TENSORS = {
    "double": torch.arange(7, dtype=torch.float64),
    "half": torch.tensor([[1.5, float("nan")], [-0.0, 3.0]], dtype=torch.bfloat16),
    "none": torch.empty(0, 3),
    "number": torch.tensor(3.0),
    "flags": torch.tensor([True, False, True]),
    "large": torch.arange(300_000, dtype=torch.int32).reshape(300, 1000),
    "codes": torch.tensor([1, 65535], dtype=torch.uint16),
}


@pytest.fixture
def image(tmp_path: Path) -> Path:
    path = tmp_path / "image"
    with path.open("wb") as file:
        write_image(file, {name: partial(TENSORS.__getitem__, name) for name in TENSORS})
    return path


def with_header(image: Path, header: bytes) -> None:
    """Put another header before the tensors of an image."""
    data = image.read_bytes()
    body = data[8 + int.from_bytes(data[:8], "little") :]
    image.write_bytes(len(header).to_bytes(8, "little") + header + body)


@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_tensors_come_back_with_length_and_checksum(
    image: Path, num_threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copying, "_SHARE_BYTES", 1000)
    found, size, checksum = read_image(image, num_threads)
    assert same({name: found[name] for name in TENSORS}, TENSORS)
    data = image.read_bytes()
    assert (size, checksum) == (len(data), crc32c(data))


def test_every_tensor_has_memory_of_its_own(image: Path) -> None:
    found, _, _ = read_image(image)
    assert all(t.untyped_storage().nbytes() == t.nbytes for t in found.values())
    for tensor in found.values():
        tensor.zero_()
    again, _, _ = read_image(image)
    assert same({name: again[name] for name in TENSORS}, TENSORS)


def test_no_flipped_byte_of_a_header_is_more_than_an_unfit_image(image: Path) -> None:
    data = image.read_bytes()
    length = 8 + int.from_bytes(data[:8], "little")
    for position in range(length):
        for flip in (1, 0x20, 0x80):
            image.write_bytes(
                data[:position] + bytes([data[position] ^ flip]) + data[position + 1 :]
            )
            try:
                _, size, checksum = read_image(image)
            except UNFIT:
                continue
            assert (size, checksum) != (len(data), crc32c(data))


@pytest.mark.parametrize("length", [0, 7, 8, 500])
def test_an_image_that_was_cut_off_is_unfit(image: Path, length: int) -> None:
    image.write_bytes(image.read_bytes()[:length])
    with pytest.raises(UNFIT):
        read_image(image)


@pytest.mark.parametrize(
    "described",
    [
        {"dtype": "F32", "shape": [-1, -4], "data_offsets": [0, 16]},
        {"dtype": "F32", "shape": [4.0], "data_offsets": [0, 16]},
        {"dtype": "F32", "shape": [5], "data_offsets": [0, 16]},
        {"dtype": "F32", "shape": [3], "data_offsets": [4, 16]},
        {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 1 << 42]},
        {"dtype": "F8_E4M3", "shape": [16], "data_offsets": [0, 16]},
        {"dtype": ["F32"], "shape": [4], "data_offsets": [0, 16]},
        {"dtype": "F32", "shape": 4, "data_offsets": [0, 16]},
        {"dtype": "F32", "shape": [4]},
        [],
        None,
    ],
)
def test_strange_headers_are_unfit(tmp_path: Path, described: object) -> None:
    path = tmp_path / "image"
    header = json.dumps({"w": described}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(16))
    with pytest.raises(UNFIT):
        read_image(path)


@pytest.mark.parametrize("header", [b"[]", b"{", b"\xff", b"[" * 100_000, b"null"])
def test_headers_that_are_no_objects_are_unfit(image: Path, header: bytes) -> None:
    with_header(image, header)
    with pytest.raises(UNFIT):
        read_image(image)


def test_two_tensors_in_one_place_are_unfit(tmp_path: Path) -> None:
    path = tmp_path / "image"
    place = {"dtype": "U8", "shape": [16], "data_offsets": [0, 16]}
    header = json.dumps({"a": place, "b": place}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(16))
    with pytest.raises(ValueError, match="b is no tensor at bytes 16 to 32"):
        read_image(path)
