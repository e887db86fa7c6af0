"""An image comes back as it was written, and whatever else lies there is damage of its file."""

from __future__ import annotations

import errno
import json
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from crc32c import crc32c
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import lowdiff
from lowdiff.compressors import TopK
from lowdiff.core.layout import layout_of
from lowdiff.errors import DamagedFile
from lowdiff.persistence.files.paths import RunFolder
from lowdiff.persistence.format.image import SCALARS, Manifest, manifest_file
from lowdiff.persistence.format.values import same
from lowdiff.persistence.run.catalog import SnapshotSet, scan
from lowdiff.recovery import images
from lowdiff.recovery.images import write_image
from lowdiff.recovery.load import ImageReader, load_shard, load_snapshot, or_damaged
from lowdiff.recovery.replay import replayer as replaying
from lowdiff.recovery.replay.replayer import ReplayOptions
from lowdiff.recovery.replay.sizing import LocalRanks
from lowdiff.types import Fence
from tests.crash.pool import Pool
from tests.crash.trainings import batch, wrapped
from tests.processes import Script, peak_bytes
from tests.unit.recovery.test_plan import life as some_life
from tests.unit.recovery.training import Trained, flip, part_sums, train

TENSORS = {
    "double": torch.arange(7, dtype=torch.float64),
    "half": torch.tensor([[1.5, float("nan")], [-0.0, 3.0]], dtype=torch.bfloat16),
    "none": torch.empty(0, 3),
    "number": torch.tensor(3.0),
    "flags": torch.tensor([True, False, True]),
    "large": torch.arange(300_000, dtype=torch.int32).reshape(300, 1000),
    "codes": torch.tensor([1, 65535], dtype=torch.uint16),
}

_MIB = 1 << 20


def life() -> Fence:
    """A fence of one parameter of 256 MiB."""
    weight = torch.nn.Parameter(torch.empty(64, _MIB, device="meta"))
    return replace(some_life(0), layout=layout_of([("w", weight)]), names={})


def load_alone(image: str) -> None:
    """Print how much more memory a process takes that loads it."""
    before = peak_bytes()
    loaded = load_shard(Path(image), 3, life())
    sys.stdout.write(f"{peak_bytes() - before}\n")
    del loaded


@pytest.fixture
def image(tmp_path: Path) -> Path:
    path = tmp_path / "image"
    with path.open("wb") as file:
        write_image(file, {name: partial(TENSORS.__getitem__, name) for name in TENSORS})
    return path


@pytest.fixture
def shard(closed: Trained, tmp_path: Path) -> tuple[Path, SnapshotSet]:
    """A copied run's shard of step 10, and its snapshot."""
    copy = closed.copied(tmp_path)
    snapshots = scan(RunFolder(copy.run), [copy.staging]).snapshots
    return copy.shard(10), next(s for s in snapshots if s.step == 10)


def read(
    path: Path, num_threads: int = 1, parts: Sequence[int] | None = None
) -> dict[str, torch.Tensor]:
    found = {}
    with or_damaged(path), path.open("rb") as file:
        found = dict(
            ImageReader(file.fileno(), num_threads, first=lambda name: "e" in name, parts=parts)
        )
    return {name: found[name] for name in TENSORS if name in found}


def with_header(path: Path, header: bytes, body: bytes = bytes(16)) -> None:
    path.write_bytes(len(header).to_bytes(8, "little") + header + body)


def load(snapshot: SnapshotSet) -> Any:
    fence = scan(RunFolder(snapshot.run)).incarnations[snapshot.incarnation]
    return load_snapshot(snapshot, fence, 2)


def told_anew(shard: Path) -> None:
    """Let the manifest say what the file is now, as a stranger would."""
    path = manifest_file(shard.parent, 0)
    data = shard.read_bytes()
    known = Manifest.read(path)
    length = 8 + int.from_bytes(data[:8], "little")
    parts = (crc32c(data[:length]), *known.parts[1:])
    manifest = replace(known, bytes=len(data), checksum=crc32c(data), parts=parts)
    path.write_text(json.dumps(manifest.document()))


@pytest.mark.cases(7)
@pytest.mark.parametrize("num_threads", [1, 2, 5])
@pytest.mark.parametrize("batch_bytes", [1, 64, 1 << 26])
def test_tensors_come_back_with_their_checksum(
    image: Path, num_threads: int, batch_bytes: int, limits: Callable[..., None]
) -> None:
    limits(copy_share_bytes=1000, copy_piece_bytes=333, load_batch_bytes=batch_bytes)
    parts = part_sums(image.read_bytes())
    assert same(read(image, num_threads, parts), TENSORS)
    for index in range(len(parts)):
        wrong = [part ^ (at == index) for at, part in enumerate(parts)]
        with pytest.raises(DamagedFile, match="other bytes than were written"):
            read(image, num_threads, wrong)
    for wrong in (parts[:-1], [*parts, 0], []):
        with pytest.raises(DamagedFile):
            read(image, num_threads, wrong)


def test_those_that_are_wanted_first_come_first_and_all_in_their_order(image: Path) -> None:
    with image.open("rb") as file:
        names = [name for name, _ in ImageReader(file.fileno(), 1, first="large".__eq__)]
    assert names == ["large", "double", "none", "number", "codes", "half", "flags"]


def test_a_read_that_ends_early_is_taken_up(image: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    really = os.preadv

    def some(descriptor: int, targets: Sequence[memoryview], offset: int) -> int:
        return really(descriptor, [targets[0][: max(1, len(targets[0]) // 2)]], offset)

    monkeypatch.setattr(os, "preadv", some)
    assert same(read(image), TENSORS)


def test_every_tensor_has_memory_of_its_own(image: Path) -> None:
    found = read(image)
    filled = [tensor for tensor in found.values() if tensor.numel()]
    assert all(t.untyped_storage().nbytes() == t.nbytes for t in filled)
    assert len({t.untyped_storage().data_ptr() for t in filled}) == len(filled) == 6


@pytest.mark.slow
def test_no_flipped_byte_of_a_header_is_more_than_damage(image: Path) -> None:
    data = image.read_bytes()
    length, parts = 8 + int.from_bytes(data[:8], "little"), part_sums(data)
    told = []
    for position in range(length):
        for bit in (1, 0x20, 0x80):
            image.write_bytes(
                data[:position] + bytes([data[position] ^ bit]) + data[position + 1 :]
            )
            with pytest.raises(DamagedFile) as caught:
                read(image, parts=parts)
            told.append(len(str(caught.value)))
    assert max(told) < 1000


@pytest.mark.parametrize("length", [0, 7, 8, 500])
def test_an_image_that_was_cut_off_is_damaged(image: Path, length: int) -> None:
    image.write_bytes(image.read_bytes()[:length])
    with pytest.raises(DamagedFile, match=r"file ends at byte|its header is said|do not end where"):
        read(image)


@pytest.mark.parametrize(
    ("shape", "why"),
    [
        ([-1, -4], "has no shape"),
        ([4.0], "has no shape"),
        ([True, 4], "has no shape"),
        (["x", 1 << 34], "has no shape"),
        ([[0], 1 << 34], "has no shape"),
        (4, "has no shape"),
        ([1] * 65, "has no shape"),
        ([10**400, 1.5], "has no shape"),
        ([10**400], "is too large"),
        ([0, 1 << 62, 1 << 62], "is too large"),
        ([1 << 62, 1 << 62, 0], "is too large"),
        ([1 << 40], "does not begin where"),
        ([5], "does not begin where"),
        ([3], "does not begin where"),
    ],
)
def test_sizes_are_checked_before_anything_is_made_of_them(
    tmp_path: Path, shape: Any, why: str
) -> None:
    told = {"dtype": "F32", "shape": shape, "data_offsets": [0, 16]}
    with_header(tmp_path / "image", json.dumps({"w": told}).encode())
    with pytest.raises(DamagedFile, match=f"'w' {why}"):
        read(tmp_path / "image")


@pytest.mark.parametrize(
    "told",
    [
        {"dtype": "F8_E4M3", "shape": [16], "data_offsets": [0, 16]},
        {"dtype": "X8", "shape": [16], "data_offsets": [0, 16]},
        {"dtype": ["F32"], "shape": [4], "data_offsets": [0, 16]},
        {"dtype": "F32", "shape": [4]},
        {"dtype": "F32", "shape": [4], "data_offsets": [4, 20]},
        {"dtype": "F32", "shape": [4], "data_offsets": 16},
        {"dtype": "F32", "shape": [4], "data_offsets": [0.0, 16.0]},
        {"dtype": "F32", "shape": [4], "data_offsets": [False, 16]},
        {"dtype": "F32", "shape": [4], "data_offsets": [0, 16, 32]},
        {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
        [],
        None,
    ],
)
def test_strange_entries_are_damage(tmp_path: Path, told: Any) -> None:
    with_header(tmp_path / "image", json.dumps({"w": told}).encode())
    with pytest.raises(DamagedFile, match="not a snapshot shard"):
        read(tmp_path / "image")


@pytest.mark.parametrize(
    "header", [b"[]", b"{", b"\xff" * 9999, b"[" * 100_000, b"null", b"9" * 5000]
)
def test_headers_that_are_no_objects_are_damage_that_is_told_shortly(
    tmp_path: Path, header: bytes
) -> None:
    with_header(tmp_path / "image", header)
    with pytest.raises(DamagedFile, match="its header is no") as caught:
        read(tmp_path / "image")
    assert len(str(caught.value)) < 1000


def test_two_tensors_in_one_place_are_damage(tmp_path: Path) -> None:
    place = {"dtype": "U8", "shape": [16], "data_offsets": [0, 16]}
    with_header(tmp_path / "image", json.dumps({"a": place, "b": place}).encode())
    with pytest.raises(DamagedFile, match="'b' does not begin where"):
        read(tmp_path / "image")


@pytest.mark.slow
@pytest.mark.parametrize(
    "item", [pytest.param("frozen/embedding", marks=pytest.mark.slow), "tensor/average"]
)
def test_an_item_is_encoded_while_nothing_else_is_in_memory(tmp_path: Path, item: str) -> None:
    """Encoding takes four copies for a moment."""
    with (tmp_path / "image").open("wb") as file:
        write_image(
            file,
            {
                item: partial(torch.ones, 16, _MIB),
                "model/w": partial(torch.ones, 64, _MIB),
                SCALARS: partial(images.scalars_tensor, [], [], [], {}),
            },
        )
    process = Script(load_alone, tmp_path / "image", output=tmp_path / "output.txt")
    assert process.wait() == 0, process.printed()
    grown = int(process.printed())
    assert 300 * _MIB < grown < 400 * _MIB


# Shards of a run


def test_a_longer_shard_is_refused_before_it_is_read(
    shard: tuple[Path, SnapshotSet], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, snapshot = shard
    with path.open("ab") as file:
        file.truncate(1 << 40)

    def refuse(*_: object) -> int:
        raise AssertionError("it is read")

    monkeypatch.setattr(os, "preadv", refuse)
    with pytest.raises(DamagedFile, match=f"{1 << 40} bytes found"):
        load(snapshot)


def averaged(rank: int, world_size: int, folder: str) -> None:
    """A pool's job: rank 1 updates an average one step later than rank 0 does."""
    torch.manual_seed(0)
    model = wrapped(torch.nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    checkpointer = lowdiff.Checkpointer(
        f"{folder}/run", staging=f"{folder}/staging", compressor=TopK(0.5)
    )
    checkpointer.attach(model, optimizer, average=average)
    for step in checkpointer.steps(4):
        optimizer.zero_grad()
        model(batch(step, rank, 4, 8)).square().mean().backward()
        optimizer.step()
        if step >= rank:
            average.update_parameters(model)
    checkpointer.close()


def test_shards_that_count_other_updates_of_an_average_are_no_snapshot(
    pool: Pool, engine: str, tmp_path: Path
) -> None:
    pool.run(averaged, 2, str(tmp_path))
    newest = scan(RunFolder(tmp_path / "run")).snapshots[-1]
    assert newest.step == 4
    with pytest.raises(DamagedFile, match="after different numbers of updates"):
        load(newest)


@pytest.mark.parametrize("is_error", [False, True])
def test_what_was_misread_once_is_read_again(
    shard: tuple[Path, SnapshotSet],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    is_error: bool,
) -> None:
    path, snapshot = shard
    whole = load(snapshot)
    really, failures = os.preadv, 1

    def read_badly(descriptor: int, targets: Sequence[memoryview], offset: int) -> int:
        nonlocal failures
        count = really(descriptor, targets, offset)
        if offset > 8 and failures:
            failures -= 1
            if is_error:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            targets[0][count - 1] ^= 1
        return count

    monkeypatch.setattr(os, "preadv", read_badly)
    found = load(snapshot)
    assert failures == 0
    assert same(found.parameters, whole.parameters)
    assert same([o.state for o in found.optimizers], [o.state for o in whole.optimizers])
    why = "Input/output error" if is_error else "other bytes than were written"
    assert f"{path} was misread" in caplog.text
    assert why in caplog.text


def test_a_medium_that_fails_is_damage_and_an_older_snapshot_serves(
    closed: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = closed.copied(tmp_path)
    bad = copy.shard(10).stat()
    really = os.preadv

    def fail(descriptor: int, targets: Sequence[memoryview], offset: int) -> int:
        end = offset + len(targets[0])
        if os.fstat(descriptor).st_ino == bad.st_ino and end == bad.st_size:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return really(descriptor, targets, offset)

    monkeypatch.setattr(os, "preadv", fail)
    snapshots = scan(RunFolder(copy.run), [copy.staging]).snapshots
    with pytest.raises(DamagedFile, match=r"cannot be read .*Input/output error"):
        load(next(s for s in snapshots if s.step == 10))
    state = lowdiff.recover(copy.run, 11, staging=copy.staging)
    assert state.base_step == 5
    assert same(dict(state.model_state_dict()), dict(closed.models[11]))


@pytest.mark.parametrize("is_told", [False, True])
def test_with_a_damaged_header_an_older_snapshot_serves(
    closed: Trained, tmp_path: Path, is_told: bool
) -> None:
    """Also where the manifest was made to fit."""
    copy = closed.copied(tmp_path)
    flip(copy.shard(10), 20)
    if is_told:
        told_anew(copy.shard(10))
    state = lowdiff.recover(copy.run, 11, staging=copy.staging)
    assert state.base_step == 5
    assert same(dict(state.model_state_dict()), dict(closed.models[11]))


def test_no_step_is_given_up_for_what_cannot_be_read_just_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is damaged is passed over for an earlier step; what cannot be read may be read again."""
    trained = train(tmp_path, 12)
    shutil.rmtree(trained.run / "segments")
    newest = trained.shard(12)
    bad = newest.stat()
    really = os.preadv

    def fail(descriptor: int, targets: Sequence[memoryview], offset: int) -> int:
        if os.fstat(descriptor).st_ino == bad.st_ino:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return really(descriptor, targets, offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", fail)
        with pytest.raises(DamagedFile, match=r"cannot be read .*Stale file handle"):
            train(tmp_path, 14)
    flip(newest, -1)
    assert lowdiff.recover(trained.run, staging=trained.staging).step == 10
    flip(newest, -1)
    assert train(tmp_path, 14).models.keys() == {12, 13, 14}


@pytest.mark.parametrize(
    ("options", "cores"),
    [
        (ReplayOptions(), 8),
        (ReplayOptions(num_workers=3), 3),
        (ReplayOptions(here=LocalRanks(4, ())), 2),
        (ReplayOptions(here=LocalRanks(100, ())), 1),
        (ReplayOptions(whole=True), 8),
        (ReplayOptions(device=torch.device("meta")), 8),
    ],
)
def test_a_snapshot_is_read_by_the_cores_that_this_process_has(
    options: ReplayOptions, cores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replaying, "usable_cores", lambda: 8)
    assert options.readers == cores
