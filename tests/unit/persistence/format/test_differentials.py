"""A record's scalars are shrunk in segments, come back as they were, and are bounded."""

from __future__ import annotations

import tracemalloc
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import zstandard
from crc32c import crc32c
from hypothesis import given
from hypothesis import strategies as st

from lowdiff.errors import DamagedFile
from lowdiff.persistence.files.checked_copy import CheckedCopy
from lowdiff.persistence.files.paths import StagingFolder
from lowdiff.persistence.format.codec import Codec
from lowdiff.persistence.format.differentials import encode_scalars, read_differential, sections_of
from lowdiff.persistence.format.framing import (
    FileHeader,
    FileKind,
    RecordHeader,
    RecordKind,
    RecordRef,
    StoredRecord,
    read_records,
)
from lowdiff.persistence.format.sections import sections_bytes, write_sections
from lowdiff.persistence.format.values import BadEncoding, decode, encode, same
from lowdiff.persistence.staging.log import StagingLog, staged_records
from lowdiff.persistence.writer.segments import coded_record
from lowdiff.types import (
    AverageStep,
    Bits,
    Differential,
    EarlierStep,
    OptimizerStep,
    Payload,
    Section,
    Written,
)

CODEC = Codec()
RUN_ID = "00112233445566778899aabbccddeeff"
PATH = Path("segment")


def differential(**items: object) -> Differential:
    values = Section("values/float32", "planes", np.arange(5, dtype=np.uint32))
    return Differential(
        step=3,
        incarnation=0,
        rank=0,
        world_size=1,
        optimizers=(OptimizerStep(True, ({"lr": 0.5},)),),
        absent=(),
        held=(0,),
        payload=Payload((values,)),
        items={name: encode(value) for name, value in items.items()},
    )


def staged(root: Path, written: Differential) -> RecordRef:
    folder = StagingFolder.of(root, RUN_ID, 0, 0)
    folder.root.mkdir(parents=True)
    log = StagingLog(folder, run_id=RUN_ID, world_size=1, chunk_bytes=1 << 16, cap_bytes=1 << 24)
    meta, sections = encode_scalars(written), sections_of(written)
    log.append(RecordKind.DIFFERENTIAL, written.step, meta, sections, durable_step=-1)
    ((_, record),) = staged_records(folder)
    return record


def in_segment(record: bytes) -> RecordRef:
    """The only record of a segment, found as a reader finds it."""
    header = FileHeader(FileKind.SEGMENT, RUN_ID, 0, 0, 1, sequence=3)
    (found,) = read_records(memoryview(header.pack() + record), header)
    return found


def with_meta(record: RecordRef, meta: bytes) -> RecordRef:
    """A record whose meta claims to be coded, with checksums that hold."""
    body = bytes(record.sections) + meta + bytes(-len(meta) % 8)
    header = replace(
        record.header,
        meta_coded=True,
        meta_bytes=len(meta),
        body_bytes=len(body),
        body_checksum=crc32c(body),
    )
    return in_segment(header.pack() + body)


def read(record: RecordRef) -> Differential:
    return read_differential(StoredRecord(record, PATH, may_change=False), CODEC)


def assert_same(found: Differential, expected: Differential) -> None:
    for name in (
        "step",
        "optimizers",
        "absent",
        "held",
        "items",
        "residual",
        "digests",
        "averages",
    ):
        assert getattr(found, name) == getattr(expected, name)
    (left,), (right,) = found.payload.sections, expected.payload.sections
    np.testing.assert_array_equal(left.data, right.data)
    ours, theirs = found.written, expected.written
    assert_same_values(ours.before, theirs.before)
    assert_same_values(ours.after, theirs.after)
    assert ours.averages.keys() == theirs.averages.keys()
    for average, values in ours.averages.items():
        assert_same_values(values, theirs.averages[average])


def assert_same_values(found: Mapping[int, Bits], expected: Mapping[int, Bits]) -> None:
    assert found.keys() == expected.keys()
    for index, values in found.items():
        assert values.dtype == expected[index].dtype
        np.testing.assert_array_equal(values, expected[index])


def test_the_state_of_a_random_generator_shrinks_in_a_segment_only(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    torch.rand(1000, generator=generator)
    written = differential(torch=generator.get_state())
    record = staged(tmp_path, written)
    assert not record.header.meta_coded
    assert bytes(record.meta) == encode_scalars(written)
    coded = in_segment(coded_record(record, CODEC))
    assert coded.header.meta_coded
    assert coded.header.meta_bytes < 0.6 * record.header.meta_bytes
    assert_same(read(coded), written)


@pytest.mark.parametrize(
    "item",
    [
        np.random.default_rng(0).integers(0, 256, 5000, dtype=np.uint8),
        np.zeros(1 << 20, np.uint8),
    ],
    ids=["noise", "shrinks too much"],
)
def test_scalars_that_a_frame_does_not_suit_are_stored_as_they_are(
    item: object, tmp_path: Path
) -> None:
    written = differential(item=item)
    record = staged(tmp_path, written)
    coded = in_segment(coded_record(record, CODEC))
    assert not coded.header.meta_coded
    assert bytes(coded.meta) == bytes(record.meta)
    assert_same(read(coded), written)


def test_coded_scalars_that_are_no_frame_are_damage(tmp_path: Path) -> None:
    record = in_segment(coded_record(staged(tmp_path, differential(n=list(range(500)))), CODEC))
    frame = bytes(record.meta)
    assert record.header.meta_coded
    assert read(with_meta(record, frame)).step == 3
    for wrong in (b"", frame[:-1], frame + b"\0", CODEC.expand(frame), bytes(100)):
        with pytest.raises(DamagedFile, match="step 3 is no differential"):
            read(with_meta(record, wrong))


@pytest.mark.parametrize("scalars", [[], 3, {"steps": [{"averages": []}]}])
def test_scalars_of_another_kind_are_damage(tmp_path: Path, scalars: object) -> None:
    record = in_segment(coded_record(staged(tmp_path, differential()), CODEC))
    meta = zstandard.ZstdCompressor().compress(encode(scalars))
    with pytest.raises(DamagedFile, match="step 3 is no differential"):
        read(with_meta(record, meta))


def test_coded_scalars_that_would_fill_the_memory_are_damage(tmp_path: Path) -> None:
    bomb = zstandard.ZstdCompressor().compress(bytes(1 << 28))
    record = with_meta(staged(tmp_path, differential()), bomb)
    tracemalloc.start()
    try:
        with pytest.raises(DamagedFile, match="a zstd frame of 268435456 bytes"):
            read(record)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


PATTERNS = st.one_of(
    *(
        st.lists(st.integers(0, 2 ** (8 * dtype.itemsize) - 1), min_size=1, max_size=40).map(
            partial(np.array, dtype=dtype)
        )
        for dtype in (np.dtype(np.uint16), np.dtype(np.uint32), np.dtype(np.uint64))
    )
)
VALUES = st.dictionaries(st.integers(0, 300), PATTERNS, max_size=3)


@given(
    before=VALUES,
    after=VALUES,
    averages=st.dictionaries(st.text(min_size=1, max_size=8), VALUES.filter(bool), max_size=2),
    digests=st.lists(st.integers(0, 2**64 - 1) | st.integers(0, 9), max_size=5).map(tuple),
)
def test_what_else_was_written_comes_back_from_staging_and_from_a_segment(
    tmp_path_factory: pytest.TempPathFactory,
    before: dict[int, Bits],
    after: dict[int, Bits],
    averages: dict[str, dict[int, Bits]],
    digests: tuple[int, ...],
) -> None:
    written = replace(
        differential(),
        digests=digests,
        averages={
            name: AverageStep(True, "", 0.9, 3, digests=digests[:2]) for name in (*averages, "b/c")
        },
        written=Written(before, after, averages),
    )
    record = staged(tmp_path_factory.mktemp("staged"), written)
    assert_same(read(record), written)
    assert_same(read(in_segment(coded_record(record, CODEC))), written)


def test_a_section_of_what_was_written_that_names_no_parameter_is_damage(tmp_path: Path) -> None:
    for number, name in enumerate(("written/before/x", "written/beside/3", "written/average/3")):
        values = Section(name, "planes", np.arange(3, dtype=np.uint32))
        record = staged(tmp_path / str(number), replace(differential(), payload=Payload((values,))))
        with pytest.raises(DamagedFile, match="step 3 is no differential"):
            read(record)


# Several optimizer steps in one body


def with_steps(num_steps: int, *sections: Section) -> RecordRef:
    """A staged record whose body has some optimizer steps."""
    written = differential()
    scalars = decode(encode_scalars(written))
    scalars["steps"] *= num_steps
    meta = encode(scalars)
    meta_bytes = len(meta) + -len(meta) % 8
    body = bytearray(sections_bytes(sections) + meta_bytes)
    copy = CheckedCopy(memoryview(body))
    write_sections(copy, sections)
    copy.add(meta.ljust(meta_bytes, b"\0"))
    header = RecordHeader(
        RecordKind.DIFFERENTIAL, False, len(meta), len(body), crc32c(body), 3, 0, 0, 1, 0
    )
    return in_segment(header.pack() + body)


def test_all_optimizer_steps_of_a_body_come_back(tmp_path: Path) -> None:
    def values(first: int) -> Bits:
        return np.arange(first, first + 5, dtype=np.uint32)

    earlier = tuple(
        EarlierStep(
            optimizers=(OptimizerStep(True, ({"lr": 0.1 * n},)), OptimizerStep(False, ())),
            absent=(n,),
            payload=Payload((Section(str(n), "planes", values(n)),)),
            averages={"ema": AverageStep(True, "get_ema_avg_fn", 0.9, n)} if n else {},
            written=Written({3: values(20 + n)}, {4: values(30)}, {"ema": {4: values(40)}}),
        )
        for n in range(3)
    )
    written = replace(differential(), earlier=earlier)
    record = staged(tmp_path, written)
    for found in (read(record), read(in_segment(coded_record(record, CODEC)))):
        assert [s.name for s in found.payload.sections] == ["values/float32"]
        assert len(found.earlier) == 3
        for left, right in zip(found.steps, written.steps, strict=True):
            assert left.optimizers == right.optimizers
            assert left.absent == right.absent
            assert left.averages == right.averages
            assert [(s.name, s.data.tolist()) for s in left.payload.sections] == [
                (s.name, s.data.tolist()) for s in right.payload.sections
            ]
            assert same(
                [left.written.before, left.written.after, left.written.averages],
                [right.written.before, right.written.after, right.written.averages],
            )


def test_a_section_of_an_optimizer_step_that_is_not_there_is_damage() -> None:
    assert read(with_steps(1)).step == 3
    assert len(read(with_steps(2)).earlier) == 1
    for name in ("step/1/values/float32", "step/-1/x", "step/a/x", "step/99999999999/x"):
        section = Section(name, "planes", np.arange(5, dtype=np.uint32))
        with pytest.raises(DamagedFile, match="step 3 is no differential"):
            read(with_steps(1, section))
    with pytest.raises(DamagedFile, match="no optimizer step"):
        read(with_steps(0))


# The frames themselves


def damaged(stored: bytes) -> list[bytes]:
    """Every byte with each of its bits flipped."""
    return [
        bytes([*stored[:i], stored[i] ^ 1 << bit, *stored[i + 1 :]])
        for i in range(len(stored))
        for bit in range(8)
    ]


def test_text_shrinks_and_comes_back() -> None:
    text = b"lr 0.001, betas 0.9 and 0.999; " * 40
    frame = CODEC.shrink(text)
    assert frame is not None
    assert len(frame) < len(text) / 4
    assert CODEC.expand(memoryview(frame)) == text


@given(st.binary(max_size=300), st.integers(1, 400))
def test_any_text_comes_back_or_is_left_as_it_is(text: bytes, times: int) -> None:
    text = times * text
    frame = CODEC.shrink(text)
    if frame is not None:
        assert len(frame) < len(text)
        assert CODEC.expand(frame) == text


def test_text_that_would_shrink_too_much_or_not_at_all_is_left_as_it_is() -> None:
    assert CODEC.shrink(bytes(1 << 20)) is None
    assert CODEC.shrink(np.random.default_rng(0).bytes(1000)) is None
    assert CODEC.shrink(b"") is None


def test_text_that_claims_to_expand_too_much_allocates_nothing() -> None:
    bomb = zstandard.ZstdCompressor().compress(bytes(1 << 28))
    tracemalloc.start()
    try:
        for frame in (bomb, bomb[:1000], bomb[:12]):
            with pytest.raises(BadEncoding, match="a zstd frame of 268435456 bytes"):
                CODEC.expand(frame)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_damaged_text_is_another_text_or_raises_bad_encoding() -> None:
    text = b"lr 0.001, betas 0.9 and 0.999; " * 10
    frame = CODEC.shrink(text)
    assert frame is not None
    for stored in damaged(frame):
        try:
            assert len(CODEC.expand(stored)) <= 256 * len(stored)
        except BadEncoding:
            continue
    for wrong in [frame[:n] for n in range(len(frame))] + [frame + b"\0", text, b""]:
        with pytest.raises(BadEncoding):
            CODEC.expand(wrong)
