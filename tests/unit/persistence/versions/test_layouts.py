"""Layouts of others: their documented bytes, read by hand, and conversions there and back."""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
import zstandard
from safetensors import safe_open

from lowdiff.errors import ConfigError, DamagedFile
from lowdiff.persistence.versions.layouts import LAYOUTS, Slime, Trl, convert
from lowdiff.persistence.versions.subscriber import Subscriber
from lowdiff.persistence.versions.target import FolderTarget
from lowdiff.persistence.versions.weights import Tensor
from lowdiff.persistence.versions.writer import VersionWriter
from tests.unit.persistence.versions.made import Weights, same, weights_at


def narrow(step: int) -> Weights:
    """Weights that TRL's layout can hold."""
    return {name: own for name, own in weights_at(step).items() if own.dtype == "BF16"}


def opened(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """What the safetensors library reads."""
    with safe_open(path, framework="pt") as file:
        names = list(file.keys())
        return {name: file.get_tensor(name) for name in names}, file.metadata() or {}


def test_slimes_bytes(tmp_path: Path) -> None:
    layout = Slime(tmp_path)
    for step in range(3):
        layout.write(step, weights_at(step))
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        *("weight_v000001", "weight_v000002", "weight_v000003")
    ]
    whole, _ = opened(tmp_path / "weight_v000001" / "model.safetensors")
    assert same({name: Tensor.of_torch(tensor) for name, tensor in whole.items()}, weights_at(0))
    folder = tmp_path / "weight_v000003"
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {
        "version": "000003",
        "step": "2",
        "base_version": "000002",
        "delta_encoding": "overwrite",
        "compression_format": "zstd",
        "checksum_format": "xxh3-128",
    }
    tensors, digests = opened(folder / "model.safetensors")
    before, after = weights_at(1), weights_at(2)
    changed = {n for n in after if not np.array_equal(before[n].bits, after[n].bits)}
    assert tensors.keys() == index["weight_map"].keys() == changed
    for name, blob in tensors.items():
        assert blob.dtype == torch.uint8
        assert digests[name] == xxhash.xxh3_128_hexdigest(after[name].bits.tobytes())
        text = zstandard.ZstdDecompressor().decompress(blob.numpy().tobytes())
        (count,) = struct.unpack_from("<I", text)
        positions = np.frombuffer(text, "<u4", count, 4)
        bits = before[name].bits.copy()
        bits[positions] = np.frombuffer(text, bits.dtype, count, 4 + 4 * count)
        assert np.array_equal(bits, after[name].bits)


def test_trls_bytes(tmp_path: Path) -> None:
    layout = Trl(tmp_path, anchor_every=3)
    for step in range(5):
        layout.write(step, narrow(step))
    found = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.safetensors"))
    assert found == [
        *("anchors/step_000001.safetensors", "anchors/step_000004.safetensors"),
        *(f"deltas/step_00000{n}.safetensors" for n in (2, 3, 5)),
    ]
    whole, told = opened(tmp_path / found[1])
    assert told["format"] == "anchor_checkpoint"
    assert told["model_version"] == "4"
    assert same({name: Tensor.of_torch(tensor) for name, tensor in whole.items()}, narrow(3))
    tensors, told = opened(tmp_path / found[-1])
    before, after = narrow(3), narrow(4)
    changed = json.loads(told["changed_params"])
    assert tensors.keys() == {f"{n}.{kind}" for n in changed for kind in ("indices", "values")}
    count = sum(tensors[f"{name}.indices"].numel() for name in changed)
    total = sum(own.bits.size for own in after.values())
    digest = hashlib.sha256(b"".join(after[n].bits.tobytes() for n in sorted(after))).hexdigest()
    assert told == {
        "format": "sparse_weight_patch",
        "version": "1",
        "model_version": "5",
        "prev_model_version": "4",
        "anchor_step": "4",
        "base_model_id": "",
        "num_changed_params": str(len(changed)),
        "total_changed_elements": str(count),
        "total_elements": str(total),
        "sparsity": str(1 - count / total),
        "checksum_sha256": digest,
        "changed_params": json.dumps(changed),
    }
    for name in changed:
        indices, values = tensors[f"{name}.indices"], tensors[f"{name}.values"]
        assert (indices.dtype, values.dtype) == (torch.int32, torch.bfloat16)
        flat = before[name].to_torch().clone().flatten()
        flat[indices.long()] = values
        assert torch.equal(
            flat.view(torch.int16), after[name].to_torch().flatten().view(torch.int16)
        )


def test_a_version_without_a_change_has_a_place_in_trls_layout(tmp_path: Path) -> None:
    layout = Trl(tmp_path)
    layout.write(0, narrow(1))
    layout.write(1, narrow(1))
    tensors, told = opened(tmp_path / "deltas" / "step_000002.safetensors")
    assert tensors.keys() == {"__empty_delta__"}
    assert told["changed_params"] == "[]"
    assert [same(dict(found), narrow(1)) for _, found in Trl(tmp_path).versions()] == [True, True]


@pytest.mark.parametrize("name", sorted(LAYOUTS))
def test_it_is_read_back_and_goes_on_after_a_restart(tmp_path: Path, name: str) -> None:
    made = narrow if name == "trl" else weights_at
    layout = LAYOUTS[name](tmp_path, 4)
    for step in range(6):
        if step == 3:
            layout = LAYOUTS[name](tmp_path, 4)
        layout.write(step, made(step))
    found = list(LAYOUTS[name](tmp_path).versions())
    assert [number for number, _ in found] == [1, 2, 3, 4, 5, 6]
    assert all(same(dict(weights), made(step)) for step, (_, weights) in enumerate(found))


@pytest.mark.parametrize("name", sorted(LAYOUTS))
def test_there_and_back(tmp_path: Path, name: str) -> None:
    made = narrow if name == "trl" else weights_at
    with VersionWriter(FolderTarget(tmp_path / "own"), "run") as writer:
        writer.publish(7, 0, made(7), {"tied": "embedding"})
    expected = {**made(7), "tied": made(7)["embedding"]}
    own, other, back = (str(tmp_path / part) for part in ("own", "other", "back"))
    assert list(convert(own, other, source_layout="lowdiff", target_layout=name)) == [7]
    assert list(convert(other, back, source_layout=name, target_layout="lowdiff")) == [1]
    version = Subscriber(back).newest()
    assert version is not None
    assert same(version.tensors, expected)


def test_between_two_others(tmp_path: Path) -> None:
    layout = Trl(tmp_path / "trl", 3)
    for step in range(7):
        layout.write(step, narrow(step))
    paths = str(tmp_path / "trl"), str(tmp_path / "slime")
    assert list(convert(*paths, source_layout="trl", target_layout="slime")) == [*range(1, 8)]
    found = [dict(weights) for _, weights in Slime(tmp_path / "slime").versions()]
    assert all(same(weights, narrow(step)) for step, weights in enumerate(found))


@pytest.mark.parametrize("name", sorted(LAYOUTS))
def test_a_flipped_bit_of_a_change_is_named(tmp_path: Path, name: str) -> None:
    made = narrow if name == "trl" else weights_at
    layout = LAYOUTS[name](tmp_path)
    layout.write(0, made(0))
    layout.write(1, made(1))
    path = max(tmp_path.rglob("*.safetensors"), key=lambda p: ("delta" in str(p), str(p)))
    data = bytearray(path.read_bytes())
    start = 8 + int.from_bytes(data[:8], "little")
    for at in range(start, len(data), max(1, (len(data) - start) // 50)):
        bad = bytearray(data)
        bad[at] ^= 4
        path.write_bytes(bad)
        with pytest.raises(DamagedFile):
            list(LAYOUTS[name](tmp_path).versions())


def test_what_a_layout_cannot_hold_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="TRL's layout holds bfloat16 only"):
        Trl(tmp_path / "a").write(0, weights_at(0))
    with pytest.raises(ConfigError, match="a layout is lowdiff, slime or trl, got 'vllm'"):
        list(convert("a", "b", source_layout="lowdiff", target_layout="vllm"))
    huge: Any = np.lib.stride_tricks.as_strided(np.zeros(1, "<u2"), (1 << 31,), (0,))
    with pytest.raises(ConfigError, match="elements, more than trl counts"):
        Trl(tmp_path / "b").write(0, {"huge": Tensor("BF16", (1 << 31,), huge)})


def test_another_encoding_of_slime_is_refused(tmp_path: Path) -> None:
    layout = Slime(tmp_path)
    layout.write(0, weights_at(0))
    layout.write(1, weights_at(1))
    path = tmp_path / "weight_v000002" / "model.safetensors.index.json"
    path.write_text(path.read_text().replace("overwrite", "xor"))
    with pytest.raises(DamagedFile, match="only overwrite and zstd are read"):
        list(Slime(tmp_path).versions())


@pytest.mark.parametrize("source", ["lowdiff", "slime", "trl"])
@pytest.mark.parametrize("target", ["lowdiff", "slime"])
def test_a_source_without_a_version_is_refused_and_makes_no_target(
    tmp_path: Path, source: str, target: str
) -> None:
    found = convert(
        str(tmp_path / "typo"), str(tmp_path / "out"), source_layout=source, target_layout=target
    )
    with pytest.raises(ConfigError, match=f"typo holds no version of layout {source}"):
        list(found)
    assert not (tmp_path / "out").exists()
