"""What replay holds in memory is bounded by what records decode to, whoever wrote them."""

from __future__ import annotations

import struct
import threading
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import zstandard
from crc32c import crc32c

import lowdiff
from lowdiff.errors import DamagedFile
from lowdiff.persistence.files.mapped_file import read_view
from lowdiff.persistence.files.paths import RunFolder
from lowdiff.persistence.format.framing import FileHeader, read_records
from lowdiff.persistence.run.catalog import Catalog, scan
from lowdiff.recovery import search
from lowdiff.recovery.load import load_snapshot
from lowdiff.recovery.plan import RecoveryPlan, plan_recovery
from lowdiff.recovery.replay import replayer as replay
from lowdiff.recovery.state import RecoveredState
from tests.unit.recovery.training import Trained, refuse_blocks, train

STEPS = 7


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder = tmp_path_factory.mktemp("replay")
    return train(folder, STEPS, end="crash", snapshot_every=100, batch_size=STEPS)


def planned(trained: Trained) -> tuple[Catalog, RecoveryPlan]:
    catalog = scan(RunFolder(trained.run), [])
    return catalog, plan_recovery(catalog)


@pytest.mark.parametrize(
    ("steps_in_memory", "windows"), [(1, [1] * STEPS), (3, [3, 3, 1]), (100, [STEPS])]
)
def test_windows_are_as_large_as_what_they_decode_to(
    trained: Trained, steps_in_memory: int, windows: list[int], limits: Callable[..., None]
) -> None:
    catalog, plan = planned(trained)
    fence = catalog.incarnations[0]
    ((*_, last),) = replay.windows(plan.steps, fence)
    (shard,) = last.shards
    decoded = shard.payload.bytes + sum(map(len, shard.items.values()))
    limits(replay_window_bytes=(steps_in_memory - 0.5) * decoded)
    found = list(replay.windows(plan.steps, fence))
    assert [len(window) for window in found] == windows
    assert [s.shards[0].step for window in found for s in window] == list(range(1, STEPS + 1))


def test_where_blocks_fail_the_second_attempt_finds_nothing_of_the_first(
    trained: Trained, monkeypatch: pytest.MonkeyPatch, limits: Callable[..., None]
) -> None:
    tensors: list[weakref.ref[Any]] = []
    left: list[tuple[int, list[str]]] = []

    def load(*args: Any) -> RecoveredState:
        readers = [t.name for t in threading.enumerate() if t.name.startswith("lowdiff-decode")]
        left.append((sum(tensor() is not None for tensor in tensors), readers))
        state = load_snapshot(*args)
        tensors.extend(map(weakref.ref, state.parameters.values()))
        return state

    limits(first_replay_window_bytes=1)
    refuse_blocks(monkeypatch)
    monkeypatch.setattr(search, "load_snapshot", load)
    assert lowdiff.recover(trained.run, STEPS).step == STEPS
    assert left == [(0, [])] * 2


def bomb(num_bytes: int) -> bytes:
    """A section of zeros, in far fewer bytes."""
    frame = zstandard.ZstdCompressor().compress(bytes(num_bytes))
    data = struct.pack("<BQ", 1, len(frame)) + frame
    head = struct.pack("<HBBIQQ", 0, 2, 1, 0, num_bytes, len(data))
    return head + data + bytes(-len(data) % 8)


def with_section(segment: Path, section: bytes) -> None:
    """Add a section to the last record of a segment; every checksum holds."""
    view = read_view(segment)
    *_, last = read_records(view, FileHeader.unpack(view, segment))
    body = section + bytes(last.body)
    header = replace(last.header, body_bytes=len(body), body_checksum=crc32c(body))
    segment.write_bytes(bytes(view[: last.offset]) + header.pack() + body)


def test_a_section_larger_than_any_gradient_is_damage(trained: Trained, tmp_path: Path) -> None:
    copy = trained.copied(tmp_path)
    with_section(copy.segment(1), bomb(1 << 16))
    assert lowdiff.recover(copy.run, STEPS).step == STEPS, "what fits is of no concern"
    with_section(copy.segment(1), bomb(1 << 26))
    with pytest.raises(DamagedFile, match=r"67\d{6} bytes, where \d+ are allowed"):
        lowdiff.recover(copy.run, STEPS)
