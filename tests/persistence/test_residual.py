"""Slots keep the residual of every step that can still be recovered (design rule R3)."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lowdiff.compressors.feedback import NUM_SLOTS
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


# Three slots suffice: every interleaving of two and three ranks

#: Where a rank stands within a step: two buckets, each written and then sent without waiting, then
#: the wait for everybody's share of both, then staging, after which the next step begins.
START, WRITING_1, SENT_1, WRITING_2, SENT_2, GATHERED = range(6)
Position = tuple[int, int]  # step, place in it
NUM_STEPS = 6


def successors(world: tuple[Position, ...]) -> Iterator[tuple[Position, ...]]:
    for rank, (step, place) in enumerate(world):
        if place == SENT_2 and any(other < (step, SENT_2) for other in world):
            continue  # the all-gather waits for a rank that has not sent yet
        position = (step, place + 1) if place < GATHERED else (step + 1, START)
        if position[0] <= NUM_STEPS:
            yield (*world[:rank], position, *world[rank + 1 :])


def reachable(num_ranks: int) -> set[tuple[Position, ...]]:
    first = ((1, START),) * num_ranks
    found, frontier = {first}, [first]
    while frontier:
        for world in successors(frontier.pop()):
            if world not in found:
                found.add(world)
                frontier.append(world)
    return found


def content(position: Position, skipped: frozenset[int], num_slots: int) -> list[list[int | None]]:
    """Per slot and bucket: the step whose residual it holds, None while it is being written."""
    slots: list[list[int | None]] = [[0, 0] for _ in range(num_slots)]
    current = 0
    for step in range(1, position[0] + 1):
        target = (current + 1) % num_slots
        place = position[1] if step == position[0] else GATHERED
        for bucket, (writing, sent) in enumerate(((WRITING_1, SENT_1), (WRITING_2, SENT_2))):
            if place >= writing:
                slots[target][bucket] = step if place >= sent else None
        if step not in skipped:
            current = target
    return slots


def is_safe(num_ranks: int, num_slots: int, skipped: frozenset[int]) -> bool:
    """Whether all can die at any moment and find each rank's residual of the step to recover."""
    for world in reachable(num_ranks):
        staged = min(step - 1 for step, _ in world)
        advanced = [step for step in range(1, staged + 1) if step not in skipped]
        slot = len(advanced) % num_slots
        wanted = advanced[-1] if advanced else 0
        for position in world:
            if content(position, skipped, num_slots)[slot] != [wanted, wanted]:
                return False
    return True


SKIPS = [
    frozenset(skips) for n in range(3) for skips in itertools.combinations(range(1, NUM_STEPS), n)
]


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_no_interleaving_of_ranks_overwrites_a_residual_that_recovery_needs(num_ranks: int) -> None:
    assert all(is_safe(num_ranks, NUM_SLOTS, skipped) for skipped in SKIPS)


def test_one_slot_fewer_would_not_be_enough() -> None:
    assert not is_safe(2, NUM_SLOTS - 1, frozenset())


def test_the_model_knows_that_ranks_can_be_one_step_apart_and_no_more() -> None:
    apart = {max(world)[0] - min(world)[0] for world in reachable(2)}
    assert apart == {0, 1}
