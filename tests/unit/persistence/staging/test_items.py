"""Items of the last two steps: whole, or not there."""

from __future__ import annotations

from pathlib import Path

import pytest

from lowdiff.errors import StorageError
from lowdiff.persistence.files.paths import StagingFolder
from lowdiff.persistence.staging.items import StagedItems, read_ahead, read_items

BASE = {"rng/torch": b"0", "stateful/scheduler": b"s", "buffer/mask": b"m" * 5000}


@pytest.fixture
def stage(tmp_path: Path) -> StagingFolder:
    folder = StagingFolder.of(tmp_path, "a" * 32, 0, 1)
    folder.root.mkdir(parents=True)
    return folder


def test_the_last_two_steps_can_be_read(stage: StagingFolder) -> None:
    items = StagedItems(stage, BASE)
    for step in range(5):
        items.stage(step, {"rng/torch": str(step).encode()})
    assert read_items(stage, 4) == {**BASE, "rng/torch": b"4"}
    assert read_items(stage, 3) == {**BASE, "rng/torch": b"3"}
    assert read_items(stage, 2) is None
    assert read_items(stage, 5) is None


def test_ahead_of_a_step_only_what_changes_is_there(stage: StagingFolder) -> None:
    items = StagedItems(stage, BASE)
    items.put_ahead(3, {"rng/torch": b"3"}, 1)
    assert read_ahead(stage, 3) == (1, {"rng/torch": b"3"})
    assert read_ahead(stage, 4) == (-1, {})


def test_large_items_that_have_settled_are_written_with_those_of_the_beginning(
    stage: StagingFolder,
) -> None:
    items, large = StagedItems(stage, BASE), b"t" * (1 << 17)
    items.stage(0, {"frozen/target": large})
    sizes = [items.stage(step, {"rng/torch": str(step).encode()}) for step in range(1, 8)]
    assert sizes[0] > len(large) > sizes[-1]
    assert "frozen/target" not in items.changing
    for step in (6, 7):
        expected = {**BASE, "frozen/target": large, "rng/torch": str(step).encode()}
        assert read_items(stage, step) == expected


@pytest.mark.parametrize("length", [0, 7, 21, -1])
def test_what_was_cut_is_not_there(stage: StagingFolder, length: int) -> None:
    items = StagedItems(stage, BASE)
    for step in (1, 2):
        items.stage(step, {"rng/torch": b"x" * 100})
    path = stage.items(1 + 2 % 2)
    path.write_bytes(path.read_bytes()[:length])
    assert read_items(stage, 2) is None
    assert read_items(stage, 1) is not None


def test_a_flipped_bit_is_noticed_wherever_it_is(stage: StagingFolder) -> None:
    items = StagedItems(stage, BASE)
    items.stage(2, {"rng/torch": b"x" * 100})
    path = stage.items(1)
    data = path.read_bytes()
    for place in range(len(data)):
        path.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        assert read_items(stage, 2) is None, place


def test_a_shorter_body_replaces_a_longer_one(stage: StagingFolder) -> None:
    items = StagedItems(stage, BASE)
    items.stage(0, {"a": b"x" * 10_000})
    items.stage(2, {"a": b"y"})
    assert read_items(stage, 2) == {**BASE, "a": b"y"}


def test_no_room_is_a_named_error(stage: StagingFolder) -> None:
    items = StagedItems(stage, BASE)
    stage.items(1).mkdir()
    with pytest.raises(StorageError, match="items of step 2 cannot be staged"):
        items.stage(2, {})
