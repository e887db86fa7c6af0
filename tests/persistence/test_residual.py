"""A residual lies in slots that outlive the trainer; tests/protocol says why three suffice."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lowdiff.persistence.residual import ResidualLayout, create_slots, read_slot
from lowdiff.types import ITEM_BYTES, Layout, ParameterSpec


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
    slots = create_slots(tmp_path / "residual", LAYOUT, 3)
    views = [view for slot in slots for view in slot]
    assert not any(byte for view in views for byte in view)
    for i, view in enumerate(views):
        view[:] = bytes([i + 1]) * len(view)
    for i, view in enumerate(views):
        assert bytes(view) == bytes([i + 1]) * len(view)
    sizes = [spec.numel * ITEM_BYTES[spec.dtype] for spec in LAYOUT.parameters]
    assert [len(view) for view in slots[2]] == sizes
    assert (tmp_path / "residual").stat().st_size == 3 * 320


WRITER = """
import os, signal, sys
from pathlib import Path
from lowdiff.persistence.residual import create_slots
from lowdiff.types import Layout, ParameterSpec

specs = ParameterSpec("a", (5,), (1,), "float32", 0), ParameterSpec("b", (9,), (1,), "float64", 5)
create_slots(Path(sys.argv[1]), Layout(specs), 3)[1][0][:] = b"twenty bytes, exact!"
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_trainer_wrote_is_read_from_its_slot(tmp_path: Path) -> None:
    path = tmp_path / "residual"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", WRITER, str(path)]
    assert subprocess.run(command, env=environment, check=False).returncode == -signal.SIGKILL
    views = read_slot(path, layout_of(("float32", 5), ("float64", 9)), 3, 1)
    assert views is not None
    assert bytes(views[0]) == b"twenty bytes, exact!"
    assert bytes(views[1]) == bytes(72)
    with pytest.raises(TypeError, match="read-only"):
        views[0][0] = 0


def test_a_file_that_does_not_fit_the_layout_has_no_slots(tmp_path: Path) -> None:
    path = tmp_path / "residual"
    assert read_slot(path, LAYOUT, 3, 0) is None
    path.touch()
    assert read_slot(path, LAYOUT, 3, 0) is None
    create_slots(path, LAYOUT, 3)
    assert read_slot(path, LAYOUT, 3, 2) is not None
    assert read_slot(path, LAYOUT, 3, 3) is None
    assert read_slot(path, LAYOUT, 3, -1) is None
    assert read_slot(path, LAYOUT, 4, 0) is None
    assert read_slot(path, layout_of(("float32", 500)), 3, 0) is None
