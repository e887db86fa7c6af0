"""A residual lies in slots that outlive the trainer; `test_residual_slots` says why three suffice."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lowdiff.persistence.staging.residual_slots import (
    ResidualSlots,
    checksum_slots,
    read_slot,
)
from lowdiff.types import ITEM_BYTES, Layout, ParameterSpec, ResidualLayout, ResidualMark


def layout_of(*parameters: tuple[str, int]) -> Layout:
    specs, offset = [], 0
    for i, (dtype, numel) in enumerate(parameters):
        specs.append(ParameterSpec(f"p{i}", (numel,), (1,), dtype, offset))
        offset += numel
    return Layout(tuple(specs))


LAYOUT = layout_of(("float32", 5), ("bfloat16", 33), ("float64", 0), ("float64", 8), ("float16", 1))


def test_each_parameter_has_a_range_of_its_own_that_starts_a_cache_line() -> None:
    ranges = ResidualLayout(LAYOUT)
    assert ranges.ranges == [(0, 20), (64, 130), (192, 192), (192, 256), (256, 258)]
    assert ranges.slot_bytes == 320


def test_a_slot_of_nothing_still_has_a_length() -> None:
    assert ResidualLayout(layout_of()).slot_bytes == 64


def test_slots_start_as_zeros_and_do_not_overlap(tmp_path: Path) -> None:
    slots = ResidualSlots(tmp_path / "residual", LAYOUT, 3).views
    views = [view for slot in slots for view in slot]
    assert not any(byte for view in views for byte in view)
    for i, view in enumerate(views):
        view[:] = bytes([i + 1]) * len(view)
    for i, view in enumerate(views):
        assert bytes(view) == bytes([i + 1]) * len(view)
    sizes = [spec.numel * ITEM_BYTES[spec.dtype] for spec in LAYOUT.parameters]
    assert [len(view) for view in slots[2]] == sizes
    assert (tmp_path / "residual").stat().st_size == 128 + 3 * 320


WRITER = """
import os, signal, sys
from pathlib import Path
from lowdiff.persistence.staging.residual_slots import ResidualSlots
from lowdiff.types import Layout, ParameterSpec

specs = ParameterSpec("a", (5,), (1,), "float32", 0), ParameterSpec("b", (9,), (1,), "float64", 5)
slots = ResidualSlots(Path(sys.argv[1]), Layout(specs), 3)
slots.views[1][0][:] = b"twenty bytes, exact!"
print(slots.complete(1).generation, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_trainer_wrote_is_read_from_its_slot(tmp_path: Path) -> None:
    path = tmp_path / "residual"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[4])}
    command = [sys.executable, "-c", WRITER, str(path)]
    done = subprocess.run(command, env=environment, check=False, stdout=subprocess.PIPE)
    assert done.returncode == -signal.SIGKILL
    mark = ResidualMark(1, int(done.stdout))
    views = read_slot(path, layout_of(("float32", 5), ("float64", 9)), mark)
    assert views is not None
    assert bytes(views[0]) == b"twenty bytes, exact!"
    assert bytes(views[1]) == bytes(72)
    with pytest.raises(TypeError, match="read-only"):
        views[0][0] = 0


def test_a_file_that_does_not_fit_the_layout_has_no_slots(tmp_path: Path) -> None:
    path = tmp_path / "residual"
    assert read_slot(path, LAYOUT, ResidualMark(0, 1)) is None
    path.touch()
    assert read_slot(path, LAYOUT, ResidualMark(0, 1)) is None
    slots = ResidualSlots(path, LAYOUT, 3)
    for slot in range(3):
        mark = slots.complete(slot)
        assert read_slot(path, LAYOUT, mark) is not None
        assert read_slot(path, layout_of(("float32", 500)), mark) is None
    assert read_slot(path, LAYOUT, ResidualMark(0, mark.generation + 1)) is None
    with path.open("ab") as file:
        file.write(b"x")
    assert read_slot(path, LAYOUT, mark) is None


def test_a_slot_is_found_only_while_it_holds_what_the_mark_names(tmp_path: Path) -> None:
    path = tmp_path / "residual"
    slots = ResidualSlots(path, LAYOUT, 3)
    first = slots.complete(0)
    assert read_slot(path, LAYOUT, first) is not None
    assert read_slot(path, LAYOUT, ResidualMark(1, 0)) is None, "never completed"
    slots.reuse(0)
    assert read_slot(path, LAYOUT, first) is None
    assert read_slot(path, LAYOUT, ResidualMark(0, 0)) is None
    second = slots.complete(0)
    assert read_slot(path, LAYOUT, first) is None
    assert read_slot(path, LAYOUT, second) is not None


@pytest.mark.slow
def test_once_the_writer_has_checksummed_them_any_flipped_bit_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "residual"
    slots = ResidualSlots(path, LAYOUT, 3)
    slots.views[1][3][:] = bytes(range(64))
    mark = slots.complete(1)
    checksum_slots(path)
    assert read_slot(path, LAYOUT, mark) is not None
    whole = path.read_bytes()
    generation, content = range(16 + 16, 16 + 24), range(128 + 320, 128 + 640)
    checksum = range(16 + 24, 16 + 28)
    for place in (*range(16), *generation, *checksum, *content):
        for bit in range(8):
            flipped = bytearray(whole)
            flipped[place] ^= 1 << bit
            path.write_bytes(flipped)
            assert read_slot(path, LAYOUT, mark) is None, (place, bit)
    path.write_bytes(whole)
    assert read_slot(path, LAYOUT, mark) is not None


def test_a_live_trainer_that_is_taken_for_dead_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "residual"
    slots = ResidualSlots(path, LAYOUT, 3)
    slots.complete(1)
    checksum_slots(path)
    slots.reuse(1)
    slots.views[1][0][:] = bytes(range(20))
    assert read_slot(path, LAYOUT, slots.complete(1)) is not None


def test_a_checksum_is_taken_once(tmp_path: Path) -> None:
    path = tmp_path / "residual"
    slots = ResidualSlots(path, LAYOUT, 3)
    mark = slots.complete(1)
    checksum_slots(path)
    slots.views[1][0][0] ^= 1
    checksum_slots(path)
    assert read_slot(path, LAYOUT, mark) is None


def test_without_a_checksum_a_slot_counts_only_as_long_as_the_machine_runs(tmp_path: Path) -> None:
    path = tmp_path / "residual"
    mark = ResidualSlots(path, LAYOUT, 3).complete(0)
    data = bytearray(path.read_bytes())
    data[100] ^= 1  # another boot's name
    path.write_bytes(data)
    assert read_slot(path, LAYOUT, mark) is None


def test_no_two_lives_number_their_residuals_alike(tmp_path: Path) -> None:
    marks = [ResidualSlots(tmp_path / str(i), LAYOUT, 3).complete(0) for i in range(20)]
    assert len({mark.generation for mark in marks}) == 20


def test_where_there_is_no_residual_nothing_is_checksummed(tmp_path: Path) -> None:
    path = tmp_path / "residual"
    checksum_slots(path)
    assert not path.exists()
    for content in (b"", b"short", bytes(200), b"\xff" * 200):
        path.write_bytes(content)
        checksum_slots(path)
        assert path.read_bytes() == content
