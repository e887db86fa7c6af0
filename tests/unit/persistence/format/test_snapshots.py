"""Snapshots: plain safetensors files, whole only with the manifests of all ranks."""

from __future__ import annotations

import itertools
import json
import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from crc32c import crc32c
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file

from lowdiff.errors import DamagedFile, StorageError
from lowdiff.persistence.files.durable import make_directory
from lowdiff.persistence.files.mapped_file import MappedFile
from lowdiff.persistence.files.paths import RunFolder
from lowdiff.persistence.format.document import write_json
from lowdiff.persistence.format.image import (
    ImageFile,
    ImageTensor,
    Manifest,
    PartSums,
    check_shard,
    header_of,
    manifest_file,
    shard_file,
    stage_image,
)
from lowdiff.persistence.run.catalog import complete_snapshots
from tests.mounts import tmpfs_or_skip
from tests.unit.recovery.training import part_sums

RUN_ID = "00112233445566778899aabbccddeeff"
CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def image_tensor(name: str, tensor: torch.Tensor) -> ImageTensor:
    data = tensor.contiguous().view(-1).view(torch.uint8).numpy().data
    return ImageTensor(name, CODES[tensor.dtype], tuple(tensor.shape), data)


def random_tensor(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(len(shape))
    return torch.randint(0, 100, shape, generator=generator).to(dtype)


TENSORS = {
    f"model/{str(dtype).removeprefix('torch.')}/{'x'.join(map(str, shape))}": random_tensor(
        dtype, shape
    )
    for dtype in CODES
    for shape in [(), (1,), (3,), (2, 5), (0,), (0, 4), (7, 1, 3)]
}


def staged(path: Path, tensors: dict[str, torch.Tensor]) -> tuple[int, int]:
    return stage_image(path, [image_tensor(name, tensor) for name, tensor in tensors.items()])


def test_an_image_without_room_gives_back_that_of_the_one_before(tmp_path: Path) -> None:
    with tmpfs_or_skip(tmp_path / "memory", 1) as memory:
        path = memory / "snapshot"
        staged(path, {"model/a": torch.zeros(150_000)})
        with pytest.raises(StorageError):
            staged(path, {"model/a": torch.zeros(400_000)})
        assert not path.exists()
        staged(path, {"model/a": torch.zeros(200_000)})


def test_images_of_any_size_follow_each_other_in_one_file_that_is_mapped_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "snapshot"
    file = ImageFile(path)
    made = []

    def mapped(*given: Any) -> MappedFile:
        made.append(given)
        return MappedFile(*given)

    monkeypatch.setattr("lowdiff.persistence.format.image.MappedFile", mapped)
    for count in (1_000_000, 1_000_000, 999_999, 1_000_001, 10, 2_000_000):
        tensors = {"model/a": torch.rand(count)}
        size, checksum = file.stage([image_tensor(*one) for one in tensors.items()])
        assert path.stat().st_size == size
        assert crc32c(path.read_bytes()) == checksum
        assert_same(load_file(path), tensors)
    assert len(made) == 1


@pytest.mark.parametrize("way", ["removed", "another", "cut"])
def test_an_image_goes_into_a_file_made_anew_where_that_of_the_one_before_is_gone(
    tmp_path: Path, way: str
) -> None:
    path = tmp_path / "snapshot"
    file, tensors = ImageFile(path), [image_tensor("model/a", torch.rand(100_000))]
    expected = file.stage(tensors)
    if way == "cut":
        os.truncate(path, 5000)
    else:
        path.unlink()
    if way == "another":
        path.write_bytes(bytes(expected[0]))
    assert file.stage(tensors) == expected
    assert crc32c(path.read_bytes()) == expected[1]


def test_an_image_that_grows_without_room_gives_the_memory_back(tmp_path: Path) -> None:
    with tmpfs_or_skip(tmp_path / "memory", 1) as memory:
        file = ImageFile(memory / "snapshot")
        file.stage([image_tensor("model/a", torch.zeros(150_000))])
        with pytest.raises(StorageError):
            file.stage([image_tensor("model/a", torch.zeros(400_000))])
        (memory / "other").write_bytes(bytes(900_000))


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].shape == tensor.shape
        assert torch.equal(
            found[name].view(-1).view(torch.uint8), tensor.view(-1).view(torch.uint8)
        )


# The image


def test_an_image_is_a_safetensors_file_that_anyone_can_load(tmp_path: Path) -> None:
    path = tmp_path / "image.safetensors"
    size, _ = staged(path, TENSORS)
    assert path.stat().st_size == size
    assert_same(load_file(path), TENSORS)
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt", "writer": "lowdiff"}


@given(
    st.lists(
        st.tuples(st.sampled_from(list(CODES)), st.lists(st.integers(0, 4), max_size=3)),
        max_size=12,
    )
)
def test_any_tensors_come_back(
    tmp_path_factory: pytest.TempPathFactory, kinds: list[tuple[torch.dtype, list[int]]]
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.safetensors"
    tensors = {f"t{i}": random_tensor(d, tuple(shape)) for i, (d, shape) in enumerate(kinds)}
    staged(path, tensors)
    assert_same(load_file(path), tensors)


def test_the_length_and_checksum_told_are_those_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "image"
    size, checksum = staged(path, TENSORS)
    data = path.read_bytes()
    assert (size, checksum) == (len(data), crc32c(data))


def test_every_tensor_is_aligned_to_its_item_and_the_first_to_64_bytes(tmp_path: Path) -> None:
    path = tmp_path / "image"
    staged(path, TENSORS)
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    assert start % 64 == 0
    header = json.loads(data[8:start])
    del header["__metadata__"]
    ends = [0]
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        assert begin == ends[-1], "no holes"
        assert (start + begin) % TENSORS[name].element_size() == 0
        ends.append(end)
    assert start + ends[-1] == len(data)


def test_the_same_tensors_make_the_same_bytes_in_any_order(tmp_path: Path) -> None:
    staged(tmp_path / "a", TENSORS)
    staged(tmp_path / "b", dict(reversed(TENSORS.items())))
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_a_smaller_image_may_follow_a_larger_one_in_its_place_and_the_other_way(
    tmp_path: Path,
) -> None:
    path = tmp_path / "image.safetensors"
    few = dict(itertools.islice(TENSORS.items(), 3))
    for tensors in (TENSORS, few, TENSORS):
        size, checksum = staged(path, tensors)
        assert path.stat().st_size == size
        assert crc32c(path.read_bytes()) == checksum
        assert_same(load_file(path), tensors)


def test_the_bytes_of_a_small_image_are_pinned(tmp_path: Path) -> None:
    path = tmp_path / "image"
    two = torch.tensor([1.0, -2.0])
    staged(path, {"residual/b": two.to(torch.bfloat16), "model/w": two})
    header = (
        b'{"__metadata__":{"format":"pt","writer":"lowdiff"},'
        b'"model/w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},'
        b'"residual/b":{"dtype":"BF16","shape":[2],"data_offsets":[8,12]}}'
    )
    padded = header.ljust(184)
    assert path.read_bytes() == (
        (184).to_bytes(8, "little") + padded + bytes.fromhex("0000803f000000c0803f00c0")
    )


@pytest.mark.parametrize("piece_bytes", [1, 7, 64, 1 << 20])
def test_sums_of_parts_do_not_depend_on_the_pieces(tmp_path: Path, piece_bytes: int) -> None:
    path = tmp_path / "image"
    staged(path, {**TENSORS, "none": torch.empty(0)})
    image = memoryview(path.read_bytes())
    header = header_of(image)
    sums = PartSums(header.bytes, header.entries)
    for start in range(0, len(image), piece_bytes):
        sums.add(image[start : start + piece_bytes])
    assert sums.found == part_sums(bytes(image))


# Its manifests


def write_shard(folder: RunFolder, rank: int, /, **changes: Any) -> Path:
    path = folder.snapshot(2, 40)
    make_directory(path)
    size, checksum = staged(shard_file(path, rank), TENSORS)
    manifest = Manifest(RUN_ID, 2, 40, rank, world_size=3, bytes=size, checksum=checksum, parts=())
    write_json(manifest_file(path, rank), asdict(replace(manifest, **changes)))
    return path


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path / "run")


def test_a_snapshot_exists_once_the_manifests_of_all_its_ranks_do(folder: RunFolder) -> None:
    for present in itertools.product([False, True], repeat=3):
        for rank in range(3):
            write_shard(folder, rank)
            if not present[rank]:
                manifest_file(folder.snapshot(2, 40), rank).unlink()
        found = complete_snapshots(folder, RUN_ID)
        assert [(s.incarnation, s.step) for s in found] == ([(2, 40)] if all(present) else [])
    (snapshot,) = complete_snapshots(folder, RUN_ID)
    assert [m.rank for m in snapshot.manifests] == [0, 1, 2]
    assert snapshot.bytes == sum(shard_file(snapshot.folder, r).stat().st_size for r in range(3))


def test_snapshots_come_by_step_then_incarnation(folder: RunFolder) -> None:
    for incarnation, step in [(1, 9), (0, 10), (0, 9), (2, 3)]:
        path = folder.snapshot(incarnation, step)
        make_directory(path)
        manifest = Manifest(RUN_ID, incarnation, step, 0, 1, 0, 0, ())
        write_json(manifest_file(path, 0), asdict(manifest))
    found = complete_snapshots(folder, RUN_ID)
    assert [(s.step, s.incarnation) for s in found] == [(3, 2), (9, 0), (9, 1), (10, 0)]


@pytest.mark.parametrize(
    "changes",
    [
        {"run_id": RUN_ID[::-1]},
        {"incarnation": 1},
        {"step": 41},
        {"rank": 0},
        {"world_size": 4},
        {"world_size": 2},
    ],
    ids=str,
)
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_manifest_of_something_else_makes_it_no_snapshot(
    folder: RunFolder, rank: int, changes: dict[str, Any]
) -> None:
    if changes == {"rank": 0} and rank == 0:
        changes = {"rank": 2}
    for other in range(3):
        write_shard(folder, other, **(changes if other == rank else {}))
    assert complete_snapshots(folder, RUN_ID) == ()


def test_a_damaged_manifest_makes_it_no_snapshot(folder: RunFolder) -> None:
    for rank in range(3):
        path = manifest_file(write_shard(folder, rank), rank)
    data = path.read_bytes()
    path.write_bytes(data.replace(b'"step": 40', b'"step": 41'))
    assert complete_snapshots(folder, RUN_ID) == ()


def test_a_document_with_other_fields_is_no_manifest(tmp_path: Path) -> None:
    path = tmp_path / "rank-0000.json"
    manifest = asdict(Manifest(RUN_ID, 0, 1, 0, 1, 2, 3, (4, 5)))
    write_json(path, manifest)
    assert Manifest.read(path) == Manifest(RUN_ID, 0, 1, 0, 1, 2, 3, (4, 5))
    for content in (
        {**manifest, "more": 1},
        {**manifest, "parts": 4},
        {**manifest, "parts": [4, "5"]},
        {**manifest, "parts": [True]},
        {"step": 1},
        {},
    ):
        write_json(path, content)
        with pytest.raises(DamagedFile, match="not a manifest"):
            Manifest.read(path)


# Its shards


@pytest.fixture
def shard(tmp_path: Path) -> tuple[Path, Manifest]:
    tensors = {"model/w": torch.arange(20, dtype=torch.float32)}
    size, checksum = staged(shard_file(tmp_path, 1), tensors)
    return tmp_path, Manifest(RUN_ID, 0, 5, 1, 2, size, checksum, ())


def test_a_whole_shard_is_named_by_its_path(shard: tuple[Path, Manifest]) -> None:
    folder, manifest = shard
    assert check_shard(folder, manifest) == folder / "rank-0001.safetensors"


def test_every_flipped_byte_of_a_shard_fails_its_checksum(shard: tuple[Path, Manifest]) -> None:
    folder, manifest = shard
    path = shard_file(folder, 1)
    data = path.read_bytes()
    for position in range(len(data)):
        path.write_bytes(data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :])
        with pytest.raises(DamagedFile, match="fails its checksum"):
            check_shard(folder, manifest)


@pytest.mark.parametrize("change", [-1, 1, -10_000, 4096])
def test_a_shard_of_another_length_says_both(shard: tuple[Path, Manifest], change: int) -> None:
    folder, manifest = shard
    path = shard_file(folder, 1)
    data = path.read_bytes()
    path.write_bytes(data[:change] if change < 0 else data + bytes(change))
    with pytest.raises(DamagedFile, match=f"bytes found, {len(data)} expected"):
        check_shard(folder, manifest)


def test_a_missing_shard_is_damage_because_its_manifest_exists(
    shard: tuple[Path, Manifest],
) -> None:
    folder, manifest = shard
    shard_file(folder, 1).unlink()
    with pytest.raises(DamagedFile, match="missing although its manifest exists"):
        check_shard(folder, manifest)


def test_a_shard_that_cannot_be_read_says_why(shard: tuple[Path, Manifest]) -> None:
    folder, manifest = shard
    shard_file(folder, 1).unlink()
    shard_file(folder, 1).mkdir()
    with pytest.raises(DamagedFile, match=r"cannot be read .*Is a directory"):
        check_shard(folder, manifest)
