"""docs/format.md is enough to read a run: its examples are read here, by lowdiff and without it."""

from __future__ import annotations

import ast
import hashlib
import json
import re
import shutil
import struct
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import numpy.typing as npt
import pytest
import zstandard

import lowdiff
from lowdiff.core.layout import flat, share_owners
from lowdiff.core.memory import bits
from lowdiff.persistence.files.paths import RunFolder, StagingFolder
from lowdiff.persistence.format.codec import CODINGS, Codec
from lowdiff.persistence.format.differentials import encode_scalars
from lowdiff.persistence.format.document import read_json
from lowdiff.persistence.format.framing import FileHeader, FileKind, RecordKind, read_records
from lowdiff.persistence.format.segment_file import Footer
from lowdiff.persistence.format.values import decode, encode, same, stored_type_of_code
from lowdiff.persistence.staging.log import StagingLog, staged_records
from lowdiff.persistence.staging.residual_slots import ResidualSlots, checksum_slots
from lowdiff.persistence.writer.segments import coded_record
from lowdiff.types import (
    Differential,
    Layout,
    OptimizerStep,
    ParameterSpec,
    Payload,
    ResidualMark,
    Section,
)

DOC = Path(__file__).parents[4].joinpath("docs", "format.md").read_text()
GOLDEN = Path(__file__).parents[3] / "golden" / "v4" / "run"
RUN_ID = "00112233445566778899aabbccddeeff"
SHORT = (",", ":")

EXAMPLE = Differential(
    step=201,
    incarnation=2,
    rank=0,
    world_size=1,
    optimizers=(OptimizerStep(True, ({"lr": 0.5},)),),
    absent=(),
    held=(0,),
    payload=Payload(
        (
            Section("indices/float32", "ascending", np.array([1, 258])),
            Section("values/float32", "planes", np.array([0.5, -2], np.float32).view(np.uint32)),
        )
    ),
    items={"rng/torch": encode(1)},
    residual=ResidualMark(slot=1, generation=9),
    digests=(0x01020304,),
)


def hex_in_doc() -> bytes:
    (block,) = re.findall(r"```hex\n(.*?)```", DOC, re.DOTALL)
    return bytes.fromhex("".join(line.partition("#")[0] for line in block.splitlines()))


def segment_of(root: Path, *differentials: Differential) -> bytes:
    first = differentials[0]
    folder = StagingFolder.of(root, RUN_ID, first.incarnation, first.rank)
    folder.root.mkdir(parents=True)
    log = StagingLog(
        folder, run_id=RUN_ID, world_size=first.world_size, chunk_bytes=4096, cap_bytes=1 << 20
    )
    for d in differentials:
        log.append(
            RecordKind.DIFFERENTIAL,
            d.step,
            encode_scalars(d),
            d.payload.sections,
            durable_step=-1,
        )
    header = FileHeader(
        FileKind.SEGMENT, RUN_ID, first.incarnation, first.rank, first.world_size, first.step
    )
    coded = [coded_record(record, Codec()) for _, record in staged_records(folder)]
    data, offsets = header.pack(), []
    for record in coded:
        offsets.append(len(data))
        data += record
    return data + Footer(offsets, [], len(data)).pack(header)


def test_lowdiff_writes_the_worked_example_byte_for_byte(tmp_path: Path) -> None:
    assert hex_in_doc() == segment_of(tmp_path, EXAMPLE)


# A reader written from the page alone


def crc32c(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def padded(size: int) -> int:
    return -(-size // 8) * 8


def read_segment(data: bytes) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Section 4: the file header, and each record's header with its body."""
    head = struct.unpack_from("<8sHHIIIQ16s12xI", data)
    assert head[0] == b"LOWDIFF\n"
    assert head[1:3] == (4, 2)
    assert head[-1] == crc32c(data[:60])
    file = dict(
        zip(("incarnation", "rank", "world_size", "first", "run_id"), head[3:8], strict=True)
    )
    records, offset = [], 64
    while offset + 64 <= len(data):
        names = "kind flags meta_bytes body_bytes body_crc world_size step incarnation rank lap"
        magic, crc, *fields = struct.unpack_from("<4sIHHIQIIQIIQ8x", data, offset)
        record: dict[str, Any] = dict(zip(names.split(), fields, strict=True))
        if magic != b"LDRC" or crc != crc32c(data[offset + 8 : offset + 64]):
            break
        body = data[offset + 64 : offset + 64 + record["body_bytes"]]
        if len(body) < record["body_bytes"] or crc32c(body) != record["body_crc"]:
            break
        if any(record[key] != file[key] for key in ("incarnation", "rank", "world_size")):
            break
        end_of_sections = len(body) - padded(record["meta_bytes"])
        record["meta"] = body[end_of_sections:][: record["meta_bytes"]]
        if record["flags"] & 4:
            record["meta"] = zstandard.ZstdDecompressor().decompress(record["meta"])
        record["sections"] = read_sections(body[:end_of_sections])
        record["offset"] = offset
        records.append(record)
        offset += 64 + record["body_bytes"]
    return file, records


def read_footer(data: bytes) -> tuple[dict[int, int], list[int]] | None:
    """Section 4: where the record of each step starts, and which of them cannot be replayed."""
    num_steps, marked, start, zero, magic, crc = struct.unpack("<QQQ28s8sI", data[-64:])
    if magic != b"LDSEALED" or start + 8 * (num_steps + marked) + 64 != len(data):
        return None
    assert zero == bytes(28)
    if crc != crc32c(data[:60] + data[start:-4]):
        return None
    first = struct.unpack_from("<Q", data, 24)[0]
    offsets = struct.unpack_from(f"<{num_steps}Q", data, start)
    steps = struct.unpack_from(f"<{marked}Q", data, start + 8 * num_steps)
    return dict(zip(range(first, first + num_steps), offsets, strict=True)), list(steps)


def read_sections(data: bytes) -> dict[str, npt.NDArray[Any]]:
    """Section 5."""
    found = {}
    offset = 0
    while offset < len(data):
        name_bytes, coding, item, zero, count, stored = struct.unpack_from("<HBBIQQ", data, offset)
        assert zero == 0
        name = data[offset + 24 : offset + 24 + name_bytes].decode()
        start = offset + padded(24 + name_bytes)
        found[name] = read_array(data[start : start + stored], coding, item, count)
        offset = start + padded(stored)
    return found


def read_array(data: bytes, coding: int, item: int, count: int) -> npt.NDArray[Any]:
    if count == 0 or coding == 0:
        return np.frombuffer(data, f"<u{item}")
    sizes = struct.unpack_from(f"<{data[0]}Q", data, 1)
    offset, total = 1 + 8 * data[0], np.zeros(count, np.uint64)
    for p, size in enumerate(sizes):
        plane = data[offset : offset + size]
        if size < count:
            plane = zstandard.ZstdDecompressor().decompress(plane)
        total |= np.frombuffer(plane, np.uint8).astype(np.uint64) << np.uint64(8 * p)
        offset += size
    if coding == 1:
        return np.cumsum(total + np.uint64(1)) - np.uint64(1)
    return total.astype(f"<u{item}")


def typed(data: bytes) -> Any:
    """Section 6, for the types of the example."""

    def extension(code: int, payload: bytes) -> Any:
        parts = typed(payload)
        return tuple(parts) if code == 3 else (code, parts)

    return msgpack.unpackb(data, ext_hook=extension, strict_map_key=False)


def test_a_reader_written_from_the_page_reads_the_worked_example() -> None:
    file, (record,) = read_segment(hex_in_doc())
    assert file == {
        "incarnation": 2,
        "rank": 0,
        "world_size": 1,
        "first": 201,
        "run_id": bytes.fromhex(RUN_ID),
    }
    assert (record["kind"], record["flags"], record["step"], record["lap"]) == (1, 1, 201, 0)
    assert typed(record["meta"]) == {
        "steps": [
            {
                "optimizers": [[True, ({"lr": 0.5},), None, None, None]],
                "absent": b"",
                "averages": {},
            }
        ],
        "held": bytes(4),
        "items": {"rng/torch": b"\x01"},
        "residual": [1, 9],
        "digests": b"\x04\x03\x02\x01",
    }
    assert read_footer(hex_in_doc()) == ({201: 64}, [])
    gradient = np.zeros(300, np.uint32)
    gradient[record["sections"]["indices/float32"]] = record["sections"]["values/float32"]
    floats = gradient.view(np.float32)
    assert {int(i): float(floats[i]) for i in np.flatnonzero(floats)} == {1: 0.5, 258: -2.0}


@pytest.mark.slow
def test_it_reads_what_lowdiff_writes_of_longer_arrays_and_several_steps(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    written = []
    for step in (7, 8, 9):
        indices = np.sort(rng.choice(2**40, 500 * step, replace=False))
        halves = rng.integers(0, 40, 500 * step, dtype=np.uint16)
        doubles = rng.standard_normal(3).view(np.uint64)
        sections = (
            Section("indices/bfloat16", "ascending", indices),
            Section("values/bfloat16", "planes", halves),
            Section("indices/float64", "ascending", np.array([], np.int64)),
            Section("values/float64", "planes", np.array([], np.uint64)),
            Section("more", "raw", doubles),
        )
        groups = ({"betas": (0.9, 0.999), "lr": 1e-3}, {"lr": float(step)})
        step_of = OptimizerStep(True, groups, groups[::-1], grad_scale=8.0, found_inf=0.0)
        written.append(Differential(step, 4, 1, 3, (step_of,), (0, 9), (), Payload(sections)))
    data = segment_of(tmp_path, *written)
    assert b"\x28\xb5\x2f\xfd" in data, "at least one plane is a zstd frame"
    _, records = read_segment(data)
    assert [record["step"] for record in records] == [7, 8, 9]
    assert {record["flags"] for record in records} == {5}, "sections and meta are coded"
    for record, differential in zip(records, written, strict=True):
        meta = typed(record["meta"])
        (of_body,) = meta["steps"]
        (optimizer,) = of_body["optimizers"]
        assert optimizer[1] == differential.optimizers[0].consumed
        assert optimizer[2] == differential.optimizers[0].after
        assert optimizer[3:] == [8.0, 0.0]
        assert (of_body["absent"], meta["held"]) == (struct.pack("<2I", 0, 9), b"")
        for section in differential.payload.sections:
            np.testing.assert_array_equal(record["sections"][section.name], section.data)
    assert read_footer(data) == ({record["step"]: record["offset"] for record in records}, [])
    for length in range(0, len(data) - 64, 701):
        _, fewer = read_segment(data[: 64 + length])
        assert [r["step"] for r in fewer] == [7, 8, 9][: len(fewer)]
        header = FileHeader.unpack(data, Path("segment"))
        assert len(fewer) == len(list(read_records(memoryview(data[: 64 + length]), header)))


# The other examples and tables


def test_the_manifest_on_the_page_is_whole(tmp_path: Path) -> None:
    (text,) = re.findall(r"```json\n(.*?)```", DOC, re.DOTALL)
    path = tmp_path / "rank-0000.json"
    path.write_text(text)
    document = json.loads(text)
    assert read_json(path) == {k: v for k, v in document.items() if k not in ("format", "crc32c")}
    checksum = document.pop("crc32c")
    inner = ",".join(
        f'"{key}":{json.dumps(document[key], separators=SHORT)}' for key in sorted(document)
    )
    assert checksum == crc32c(f"{{{inner}}}".encode("ascii"))


def test_the_checksum_is_the_one_that_the_page_describes() -> None:
    assert crc32c(b"123456789") == 0xE3069283
    assert "of the ASCII text `123456789` it is\n`0xE3069283`" in DOC


VALUES = re.findall(r"^\| `(.+?)` \| `([0-9a-f ]+)` \|$", DOC, re.MULTILINE)


@pytest.mark.parametrize(("value", "stored"), VALUES, ids=[value for value, _ in VALUES])
def test_typed_values_on_the_page_have_these_bytes(value: str, stored: str) -> None:
    parsed = ast.literal_eval(value)
    assert encode(parsed) == bytes.fromhex(stored)
    assert same(decode(bytes.fromhex(stored)), parsed)


def test_the_page_has_examples_of_typed_values() -> None:
    assert len(VALUES) == 5


def test_the_page_names_every_type_code_and_coding() -> None:
    table = DOC[DOC.index("| code | type | parts |") : DOC.index("Nesting is at most")]
    rows = re.findall(r"^\| ([\d, ]+) \|", table, re.MULTILINE)
    on_page = {int(code) for row in rows for code in row.split(",")}
    assert on_page == {code for code in range(-128, 128) if stored_type_of_code(code)}
    assert "coding: " + ", ".join(f"{i} {name}" for i, name in enumerate(CODINGS)) in DOC


def test_the_names_on_the_page_are_those_on_disk() -> None:
    run = RunFolder(Path("RUN"))
    staging = StagingFolder.of(Path("STAGING"), "RUN_ID", 2, 0)
    snapshot = run.snapshot(2, 200)
    for path in (
        run.run_file,
        run.fence(2, 0),
        snapshot / "rank-0000.json",
        snapshot / "rank-0000.safetensors",
        run.segment(2, 0, 201),
        run.lock(0),
        run.retention_lock,
        run.retention_file,
        run.pin("LABEL"),
        staging.chunk(0),
        staging.owner,
        staging.residual,
        staging.snapshot,
        staging.status,
    ):
        assert re.search(rf"^{re.escape(str(path))}\b", DOC, re.MULTILINE), path


# The golden run, read with the page


def golden_records() -> dict[int, dict[str, Any]]:
    found: dict[int, dict[str, Any]] = {}
    for path in sorted(GOLDEN.glob("segments/rank-0000/*.seg")):
        data = path.read_bytes()
        _, records = read_segment(data)
        marked = [record["step"] for record in records if record["flags"] & 2]
        assert read_footer(data) == ({r["step"]: r["offset"] for r in records}, marked)
        found |= {record["step"]: record for record in records}
    return found


def test_footers_of_real_segments_say_what_the_page_says() -> None:
    assert sorted(golden_records()) == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("step", [1, 3, 6])
def test_digests_are_checksums_of_the_parameters(tmp_path: Path, step: int) -> None:
    state = lowdiff.recover(shutil.copytree(GOLDEN, tmp_path / "run"), step)
    names = [spec.name for spec in state.fence.layout.parameters]
    meta = typed(golden_records()[step]["meta"])
    trained = [state.parameters[name] for name in names]
    expected = [crc32c(bits(flat(tensor)).tobytes()) for tensor in trained]
    assert meta["digests"] == struct.pack(f"<{len(expected)}I", *expected)
    *_, of_average = meta["steps"][-1]["averages"]["average"]
    averaged = [state.averages["average"][name] for name in names]
    expected = [crc32c(bits(flat(tensor)).tobytes()) for tensor in averaged]
    assert of_average == struct.pack(f"<{len(expected)}I", *expected)


def test_what_something_else_wrote_stands_where_the_page_says(tmp_path: Path) -> None:
    state = lowdiff.recover(shutil.copytree(GOLDEN, tmp_path / "run"), 3)
    sections = golden_records()[3]["sections"]
    written = {name: values for name, values in sections.items() if name.startswith("written/")}
    assert set(written) == {"written/before/0", "written/after/0", "written/average/0/average"}
    name = state.fence.layout.parameters[0].name
    np.testing.assert_array_equal(written["written/after/0"], bits(flat(state.parameters[name])))
    average = state.averages["average"][name]
    np.testing.assert_array_equal(written["written/average/0/average"], bits(flat(average)))


@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
def test_a_ranks_share_is_the_one_on_the_page(world_size: int) -> None:
    sizes, specs = [5, 40, 40, 1, 0, 17, 40, 3], list[ParameterSpec]()
    for i, size in enumerate(sizes):
        offset = specs[-1].stop if specs else 0
        specs.append(ParameterSpec(f"p{i}", (size,), (1,), ("float32", "float64")[i % 2], offset))
    held, owners = [0] * world_size, dict[int, int]()
    for i in sorted(range(len(specs)), key=lambda i: -specs[i].nbytes):
        rank = min(range(world_size), key=lambda r: held[r])
        held[rank] += specs[i].nbytes
        owners[i] = rank
    assert share_owners(Layout(tuple(specs)), world_size) == [owners[i] for i in range(len(specs))]


def test_residual_slots_lie_as_the_page_says(tmp_path: Path) -> None:
    parameter = ParameterSpec("a", (3,), (1,), "float32", 0)
    other = ParameterSpec("b", (5,), (1,), "float64", 3)
    path = tmp_path / "residual"
    slots = ResidualSlots(path, Layout((parameter, other)), 3)
    slots.views[2][0][:] = b"twelve bytes"
    slots.views[2][1][:] = bytes(range(40))
    first = slots.complete(0).generation
    assert slots.complete(2).generation == first + 1
    checksum_slots(path)
    data = path.read_bytes()
    num_slots, size = struct.unpack_from("<QQ", data)
    assert (num_slots, size, len(data)) == (3, 128, 128 + 3 * 128)
    stamps = list(struct.iter_unpack("<QQ", data[16:64]))
    contents = [data[128 + i * size :][:size] for i in range(num_slots)]
    assert stamps[1] == (0, 0)
    for slot, number in ((0, first), (2, first + 1)):
        assert stamps[slot] == (number, number % 2**32 << 32 | crc32c(contents[slot]))
    assert data[64:96] == bytes(32)
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert data[96:128] == hashlib.blake2b(boot.encode(), digest_size=32).digest()
    assert contents[2][:12] == b"twelve bytes"
    assert contents[2][64:104] == bytes(range(40))
