"""Items of a dead rank come from its own memory, and else only where all ranks had them alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lowdiff.persistence.files.paths import StagingFolder
from lowdiff.persistence.format.values import decode, encode
from lowdiff.persistence.staging.items import StagedItems, read_items
from lowdiff.persistence.staging.status import SavedStatus
from lowdiff.recovery.sources.inheritance import (
    ItemSums,
    alike_bits,
    items_of_dead,
    items_of_lost,
)

GENERATOR, BUFFER, SCHEDULER = "rng/torch", "buffer/mean", "stateful/scheduler"
GENERATORS, BUFFERS, OBJECTS = 1, 2, 4
STEP = 5


def items(**values: Any) -> dict[str, bytes]:
    names = {"generator": GENERATOR, "buffer": BUFFER, "scheduler": SCHEDULER}
    return {names[key]: encode(value) for key, value in values.items()}


@pytest.fixture
def survivor(tmp_path: Path) -> StagingFolder:
    return folder(tmp_path, 0)


def folder(root: Path, rank: int) -> StagingFolder:
    stage = StagingFolder.of(root, "0" * 32, 0, rank)
    stage.root.mkdir(parents=True)
    return stage


def stage_two(stage: StagingFolder, rank: int) -> StagedItems:
    """Stage two steps in which everything moved."""
    staged = StagedItems(stage, {})
    for step in (STEP - 1, STEP):
        found = items(generator=100 * rank + step, buffer=200 * rank + step, scheduler=step)
        staged.stage(step, found)
    return staged


def told(kinds: int, step: int = STEP) -> SavedStatus:
    return SavedStatus(alike=kinds, alike_step=step)


def test_sums_tell_the_kind_that_differs() -> None:
    first, second = ItemSums(), ItemSums()
    first.update(items(generator=1, buffer=2, scheduler=3))
    second.update(items(generator=1, buffer=7, scheduler=4))
    assert alike_bits([first.by_kind, second.by_kind]) == GENERATORS
    second.update(items(scheduler=3))
    assert alike_bits([first.by_kind, second.by_kind]) == GENERATORS | OBJECTS


def test_differences_of_two_items_do_not_cancel() -> None:
    first, second = ItemSums(), ItemSums()
    first.update({"stateful/a": encode(1), "stateful/b": encode(1)})
    second.update({"stateful/a": encode(2), "stateful/b": encode(2)})
    assert not alike_bits([first.by_kind, second.by_kind]) & OBJECTS


def test_the_dead_ranks_own_memory_counts_where_it_is_there(
    survivor: StagingFolder, tmp_path: Path
) -> None:
    stage_two(survivor, 0)
    dead = folder(tmp_path, 1)
    stage_two(dead, 1)
    found, why = items_of_dead(STEP, 1, survivor, dead, takes_buffers=False)
    assert (found, why) == (read_items(dead, STEP), "")


def test_objects_that_were_alike_come_from_the_survivor(survivor: StagingFolder) -> None:
    stage_two(survivor, 0)
    found, why = items_of_lost(STEP, 1, survivor, told(OBJECTS), takes_buffers=True)
    assert found is not None
    assert "seeded anew" in why
    assert decode(found[SCHEDULER]) == STEP
    assert decode(found[BUFFER]) == STEP
    assert isinstance(decode(found[GENERATOR]), torch.Tensor)


def test_generators_that_were_alike_come_from_the_survivor(survivor: StagingFolder) -> None:
    stage_two(survivor, 0)
    found, why = items_of_lost(STEP, 1, survivor, told(GENERATORS | OBJECTS), takes_buffers=True)
    assert found == read_items(survivor, STEP)
    assert not why


@pytest.mark.parametrize(
    ("alike", "what"), [(OBJECTS, BUFFER), (BUFFERS | GENERATORS, SCHEDULER), (0, SCHEDULER)]
)
def test_what_was_not_alike_is_lost_with_the_node(
    survivor: StagingFolder, alike: int, what: str
) -> None:
    stage_two(survivor, 0)
    found, why = items_of_lost(STEP, 0, survivor, told(alike), takes_buffers=alike != OBJECTS)
    assert found is None
    assert what in why


def test_a_node_that_was_lost_before_it_told_of_the_step_had_what_was_alike_before(
    survivor: StagingFolder,
) -> None:
    """It was in its optimizer, so the news of the step before are the newest that all ranks told."""
    state = "stateful/checkpointer.state"
    staged = StagedItems(survivor, {state: encode({})})
    for step in (STEP - 1, STEP):
        staged.stage(step, items(generator=step, scheduler=step))
    saved = told(GENERATORS | OBJECTS, STEP - 1)
    found, why = items_of_lost(STEP, 1, survivor, saved, takes_buffers=False)
    assert found == read_items(survivor, STEP)
    assert why == "what it alone wrote into checkpointer.state in this step, if it did, is lost"
    found, why = items_of_lost(STEP, 1, survivor, told(OBJECTS, STEP - 1), takes_buffers=False)
    assert found is not None
    assert "seeded anew" in why
    assert found[GENERATOR] != encode(STEP)
    for lost in (told(GENERATORS, STEP - 1), told(7, STEP - 2), told(7, -1)):
        assert items_of_lost(STEP, 1, survivor, lost, takes_buffers=False)[0] is None


def test_what_a_script_wrote_in_the_step_of_which_a_lost_node_did_not_tell_is_lost(
    survivor: StagingFolder,
) -> None:
    state = "stateful/checkpointer.state"
    staged = StagedItems(survivor, {state: encode({})})
    staged.stage(STEP - 1, items(scheduler=1))
    staged.stage(STEP, {state: encode({"best": 1})})
    found, why = items_of_lost(STEP, 1, survivor, told(7, STEP - 1), takes_buffers=False)
    assert found is None
    assert state in why


def test_what_was_ahead_of_an_earlier_call_of_the_step_is_not_its_end(tmp_path: Path) -> None:
    own, dead = (StagingFolder.of(tmp_path, "a" * 32, 0, rank) for rank in (0, 1))
    for stage, calls in ((own, 2), (dead, 1)):
        stage.root.mkdir(parents=True)
        items = StagedItems(stage, {})
        items.stage(6, {"rng/torch": b"old of %d" % stage.rank})
        for call in range(calls):
            items.put_ahead(7, {"rng/torch": b"%d of %d" % (call, stage.rank)}, call)
        if stage is own:
            items.stage(7, {"rng/torch": b"1 of 0"})
    found, why = items_of_dead(7, 1, own, dead, takes_buffers=False)
    assert found is not None
    assert found["rng/torch"] not in (b"0 of 1", b"1 of 0")
    assert "seeded anew" in why


def test_an_object_that_a_rank_changed_for_the_first_time_is_as_it_was_in_front_of_the_optimizer(
    tmp_path: Path,
) -> None:
    own, dead = (StagingFolder.of(tmp_path, "a" * 32, 0, rank) for rank in (0, 1))
    name = "stateful/checkpointer.state"
    for stage in (own, dead):
        stage.root.mkdir(parents=True)
        items = StagedItems(stage, {name: b"empty"})
        items.stage(6, {})
        items.put_ahead(7, {name: b"of %d" % stage.rank}, 0)
        if stage is own:
            items.stage(7, {name: b"of 0"})
    found, why = items_of_dead(7, 1, own, dead, takes_buffers=False)
    assert (found, why) == ({name: b"of 1"}, "")
